"""HackAttend: flip a prediction by cutting a small share of attention, the text left alone.

*Unveiling Vulnerability of Self-Attention* (arXiv 2402.16470); ALGORITHMS.md, Part IV. There are
two schedules: `greedy`, as released (greedy.py), and `rerank`, stronger at the same budget
(rerank.py). A ranking says which units go first (rankings.py), a scope what the share is a share of
(budget.py). Examples that the model gets wrong are skipped and counted; the judge decides what is a
flip (judge.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from keyhole.disrupt.budget import Budget, budget
from keyhole.disrupt.disruption import Disruption, Outcome, joined
from keyhole.disrupt.greedy import greedy
from keyhole.disrupt.judge import Verdict, control, judge
from keyhole.disrupt.masked_queries import Asker
from keyhole.disrupt.prefix_search import Found
from keyhole.disrupt.rankings import Ranking
from keyhole.disrupt.rerank import rerank
from keyhole.disrupt.tasks import Batch, Question, ask
from keyhole.disrupt.units import Units, survey
from keyhole.errors import InputError

Order = Literal["importance", "random layer", "random head", "random"]
Scale = Literal["full", "half"]
Schedule = Literal["rerank", "greedy"]
Scope = Literal["head", "model"]
Count = Literal["paper", "all"]
Loss = Literal["margin", "cross-entropy"]
Spare = Literal["special", "special keys", "padding"]
_CHOICES: dict[str, Any] = {
    "ranking": Ranking, "order": Order, "scale": Scale, "schedule": Schedule, "scope": Scope,
    "head_units": Count, "loss": Loss, "spare": Spare,
}  # fmt: skip
_COUNTS = {"least": 0, "rounds": 1, "prefixes": 1, "refine": 0, "restarts": 0, "batch": 1,
           "continuation": 1}  # fmt: skip


@dataclass(frozen=True)
class HackAttend:
    """At most `share` of each head's units, or with scope "model" of all units of the model.

    `head_units`: a head has (n−1)² units ("paper") or n² ("all"). `least`: units that a head may
    lose in any case, even where the share of a short text is none. `order` and `scale` are for the
    greedy schedule; `rounds`, `prefixes` (asked for in each round), `refine` (rounds of swaps) and
    `restarts` for rerank. `target` is the class to flip to, None for any other. `continuation` is
    the number of tokens that a language model is asked for. `spare`: no unit of a special token is
    cut, as query or key ("special"); only none with a special key ("special keys"); or "padding".
    `batch` is the most sequences in one pass, which bounds memory. `one_at_a_time` asks as the
    released code does, to compare speed.
    """

    share: float = 0.01
    ranking: Ranking = "removal"
    schedule: Schedule = "rerank"
    scope: Scope = "head"
    order: Order = "importance"
    scale: Scale = "full"
    head_units: Count = "paper"
    least: int = 0
    loss: Loss = "margin"
    rounds: int = 8
    prefixes: int = 16
    refine: int = 8
    restarts: int = 0
    target: int | None = None
    continuation: int = 1
    spare: Spare = "special"
    batch: int = 64
    one_at_a_time: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InputError(f"expected a share from 0 to 1, got {self.share}")
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise InputError(f"expected {name} among {known}, got {getattr(self, name)}")
        for name, least in _COUNTS.items():
            if getattr(self, name) < least:
                raise InputError(f"expected {name} of at least {least}, got {getattr(self, name)}")

    @classmethod
    def as_released(
        cls, share: float = 0.01, scale: Scale = "full", ranking: Ranking = "gradient",
        order: Order = "importance", **changes: Any,
    ) -> HackAttend:  # fmt: skip
        """The paper's: `−grad`, one unit a head at least, cumulative greedy over ranked heads."""
        settings: dict[str, Any] = {"least": 1, "loss": "cross-entropy", **changes}
        return cls(
            share=share, ranking=ranking, schedule="greedy", order=order, scale=scale, **settings
        )

    @classmethod
    def strongest(cls, share: float = 0.01, scope: Scope = "head", **changes: Any) -> HackAttend:
        """Many rankings and many swaps, few prefixes of each: success first, queries second."""
        settings: dict[str, Any] = {
            "rounds": 16,
            "prefixes": 2,
            "refine": 24,
            "restarts": 1,
            **changes,
        }
        return cls(share=share, scope=scope, **settings)

    def __call__(
        self, model: Any, batch: Batch, labels: Tensor | None = None, *,
        targets: Tensor | None = None, ids: Sequence[str] = (),
    ) -> Disruption:  # fmt: skip
        """Attack a batch as the tokenizer makes it; `ids` name its examples in the result.

        `labels` of a language model default to its own answer. `special_tokens_mask` in the batch
        says what to spare; without it, see units.py.
        """
        started = time.perf_counter()
        if model.training:
            raise InputError("expected a model in eval mode, got one in training: model.eval()")
        target = targets if targets is not None else self.target
        question = ask(model, batch, labels, target=target, continuation=self.continuation)
        names = list(ids) or [str(number) for number in range(question.size)]
        if len(names) != question.size:
            raise InputError(f"expected {question.size} ids, got {len(names)}")
        every = torch.arange(question.size, device=question.labels.device)
        parts = [
            self._attack(model, question.part(which), [names[i] for i in which.tolist()], started)
            for which in every.split(self._size(question))
        ]
        return joined(parts)

    def _attack(
        self, model: Any, question: Question, names: list[str], started: float
    ) -> Disruption:
        units = survey(model, question, spare=self.spare)
        zero, clean = control(model, question, units, self.batch)
        right = question.right(clean)
        if question.target is not None:
            right &= ~(question.labels == question.target).all(-1)  # nothing to flip there
        limits = budget(units, self.share, self.scope, self.head_units, self.least)
        chosen = right.nonzero().squeeze(1)
        outcomes = [
            _untouched(question, clean, number, name, bool(right[number]))
            for number, name in enumerate(names)
        ]
        if len(chosen):
            attacked = question.part(chosen), units.part(chosen), limits.part(chosen)
            found, asker = self._search(model, *attacked)
            verdict = judge(model, attacked[0], attacked[1], found.cut, attacked[2], self.batch)
            counted = _count(attacked[1], verdict.masked, self.head_units)
            for place, number in enumerate(chosen.tolist()):
                outcomes[number] = _outcome(
                    outcomes[number], verdict, counted, found, asker, attacked[1], place
                )
        seconds = time.perf_counter() - started
        parameter = next(model.parameters())
        return Disruption(
            asdict(self), tuple(outcomes), zero, seconds, type(model).__name__,
            str(parameter.device), str(parameter.dtype).removeprefix("torch."),
        )  # fmt: skip

    def _size(self, question: Question) -> int:
        """Examples, or masks of one, in a pass."""
        return 1 if self.one_at_a_time else max(1, self.batch // question.rows)

    def _search(
        self, model: Any, question: Question, units: Units, limits: Budget
    ) -> tuple[Found, Asker]:
        asker = Asker(model, question, units, self._size(question))
        noise = _noise(question, units, self.seed)
        schedule = greedy if self.schedule == "greedy" else rerank
        return schedule(self, asker, limits, noise), asker


def _noise(question: Question, units: Units, seed: int) -> Tensor:
    """Uniform numbers for each example that do not depend on its neighbours in the batch."""
    rows: list[Tensor] = []
    for number in range(question.size):
        first = next(iter(question.inputs.values()))[number].double().cpu().flatten()
        places = torch.arange(1, len(first) + 1, dtype=torch.float64)
        stream = torch.Generator().manual_seed(seed + int((first * places).sum().abs()) % 2**31)
        rows.append(torch.rand(units.total, generator=stream))
    return torch.stack(rows).to(units.free.device)


@dataclass(frozen=True, eq=False)
class _Counted:
    """Units really masked: in all, over all units, and head by head."""

    masked: Tensor
    units: Tensor
    heads: Tensor
    worst: Tensor
    perturbation: Tensor


def _count(units: Units, masked: Tensor, count: str) -> _Counted:
    per_head, of_head = units.per_head(masked), units.head_units(count)
    hit = per_head > 0
    share = per_head / of_head.clamp(min=1)
    attacked = (of_head * hit).sum(1)
    return _Counted(
        masked.sum(1), units.exists.sum(1), hit.sum(1), share.amax(1),
        masked.sum(1) / attacked.clamp(min=1),
    )  # fmt: skip


def _untouched(question: Question, clean: Tensor, number: int, name: str, right: bool) -> Outcome:
    said = tuple(question.predicted(clean)[number].tolist())
    sure = float(question.confidence(clean)[number])
    return Outcome(name, right, False, said, said, sure, sure)


def _outcome(
    before: Outcome, verdict: Verdict, counted: _Counted, found: Found, asker: Asker, units: Units,
    place: int,
) -> Outcome:  # fmt: skip
    return Outcome(
        id=before.id,
        right=True,
        flipped=bool(verdict.flipped[place]),
        before=before.before,
        after=tuple(verdict.predicted[place].tolist()),
        confidence_before=before.confidence_before,
        confidence_after=float(verdict.confidence[place]),
        queries=int(asker.queries[place]),
        steps=int(found.steps[place]),
        masked=int(counted.masked[place]),
        units=int(counted.units[place]),
        heads=int(counted.heads[place]),
        worst_head=float(counted.worst[place]),
        perturbation=float(counted.perturbation[place]),
        cut=units.named(verdict.masked[place]),
    )
