"""HackAttend: flip a prediction by cutting a small share of the attention; the text is unchanged.

*Unveiling Vulnerability of Self-Attention* (arXiv 2402.16470). A unit is one entry of
an attention map: a layer, a head, a query and a key (units.py). The attack has three
parts: a ranking of the units (rankings.py), a budget of how many may be cut
(budget.py), and a schedule that tries masks. The schedule is `Greedy`, as released
(greedy.py), or `Rerank`, which is stronger at the same budget (rerank.py). Examples
that the model gets wrong are skipped and counted. The judge decides what is a flip
(judge.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_among, expect_count, expect_number
from keyhole.data import Batch
from keyhole.disrupt.budget import budget
from keyhole.disrupt.disruption import (
    Attacker,
    Disruption,
    Outcome,
    described,
    joined,
)
from keyhole.disrupt.greedy import Greedy, Order, Scale
from keyhole.disrupt.judge import judge, run_control
from keyhole.disrupt.masked_queries import MaskedQueries, Search
from keyhole.disrupt.rankings import RANKINGS
from keyhole.disrupt.rerank import Rerank
from keyhole.disrupt.tasks import Question, ask
from keyhole.disrupt.units import Units, survey

Scope = Literal["head", "model"]
Loss = Literal["margin", "cross-entropy"]
Spare = Literal["special", "special keys", "first token", "padding"]
_SPARED = {
    "special": "special tokens",
    "special keys": "special keys",
    "first token": "the first token",
    "padding": "only padding",
}


@dataclass(frozen=True)
class HackAttend:
    """Cut at most `share` of each head's units, or with scope "model", of all units of the model.

    A head has (n−1)² units, as the paper counts. `least` units may be cut in each head
    even if the share of a short text is less than one unit. `target` is the class to
    flip to, None for any other class. A language model is asked for a `continuation` of
    that many tokens. `spare` says which units are not cut: those with a special token
    as query or key ("special") or as key ("special keys"), those with the first token
    as query or key ("first token", as released), or only padding ("padding"). `batch`
    is the batch size of a forward pass.
    """

    share: float = 0.01
    ranking: str = "removal"
    schedule: Greedy | Rerank = Rerank()  # noqa: RUF009 - frozen
    scope: Scope = "head"
    least: int = 0
    loss: Loss = "margin"
    target: int | None = None
    continuation: int = 1
    spare: Spare = "special"
    batch: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        expect_number("share", self.share, least=0, most=1)
        expect_among("ranking", self.ranking, RANKINGS)
        expect_among("scope", self.scope, Scope)
        expect_among("loss", self.loss, Loss)
        expect_among("spare", self.spare, Spare)
        expect_count("least", self.least, 0)
        expect_count("batch", self.batch, 1)
        expect_count("continuation", self.continuation, 1)
        if not isinstance(self.schedule, Greedy | Rerank):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"expected a schedule Greedy() or Rerank(), got {self.schedule!r}"
            )

    @classmethod
    def as_released(
        cls,
        share: float = 0.01,
        scale: Scale = "full",
        *,
        order: Order = "importance",
        **changes: Any,
    ) -> HackAttend:
        """The attack of the released code (greedy.py); the paper's text has ranking="magnitude"."""
        released: dict[str, Any] = {
            "ranking": "gradient",
            "least": 1,
            "loss": "cross-entropy",
            "spare": "first token",
        }
        return cls(share, schedule=Greedy(order, scale), **{**released, **changes})

    @classmethod
    def strongest(
        cls,
        share: float = 0.01,
        scope: Scope = "head",
        *,
        rounds: int = 16,
        prefixes: int = 2,
        refine: int = 24,
        restarts: int = 1,
        **changes: Any,
    ) -> HackAttend:
        """Many rankings and swaps, with few prefixes of each: more flips, at more queries."""
        schedule = Rerank(rounds, prefixes, refine, restarts)
        return cls(share, schedule=schedule, scope=scope, **changes)

    @classmethod
    def random(cls, share: float = 0.01, **changes: Any) -> HackAttend:
        """The control: like `as_released`, but with heads and units in random order."""
        settings: dict[str, Any] = {
            "ranking": "random",
            "order": "random",
            "spare": "special",
        }
        return cls.as_released(share, **{**settings, **changes})

    @classmethod
    def from_dict(cls, method: Mapping[str, Any]) -> HackAttend:
        """Return the attack that the `method` of a result describes."""
        try:
            schedule = {**method["schedule"]}
            make = {"greedy": Greedy, "rerank": Rerank}[schedule.pop("name")]
            settings: dict[str, Any] = {
                field.name: method[field.name] for field in fields(cls)
            }
            settings["schedule"] = make(**schedule)
            return cls(**settings)
        except (KeyError, TypeError) as error:
            raise InputError(
                f"these are not the settings of a HackAttend: {error!r}"
            ) from error

    @property
    def words(self) -> str:
        """A description for people of how attention is cut."""
        what = "each head's attention" if self.scope == "head" else "all attention"
        return f"{100 * self.share:g}% of {what} cut{self._differences()}"

    def _differences(self) -> str:
        """Describe the differences from the default attack, each after a comma."""
        if self.control:
            return " at random"
        schedule = self.schedule
        usual = HackAttend()
        parts = list[str]()
        if isinstance(schedule, Greedy):
            usual = HackAttend.as_released()
            parts.append("as released" if self.as_published else "released schedule")
        if self.ranking != usual.ranking:
            parts.append(f"ranked by {self.ranking}")
        if isinstance(schedule, Greedy) and schedule.order != "importance":
            parts.append(f"{schedule.order} order")
        if isinstance(schedule, Greedy) and schedule.scale == "half":
            parts.append("half scale")
        if self.spare != usual.spare:
            parts.append(f"{_SPARED[self.spare]} spared")
        return "".join(f", {part}" for part in parts)

    @property
    def as_published(self) -> bool:
        """Whether the budget, the loss and the spared units are those of the released code."""
        released = HackAttend.as_released(self.share)
        names = ("scope", "least", "loss", "target", "spare")
        return all(getattr(self, name) == getattr(released, name) for name in names)

    @property
    def control(self) -> bool:
        """Whether units are chosen at random."""
        return self.ranking == "random"

    def __call__(
        self,
        model: Any,
        batch: Batch,
        labels: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        ids: Sequence[str] = (),
    ) -> Disruption:
        """Attack a batch as the tokenizer returns it. `ids` name its examples in the result.

        The `labels` of a language model default to its own answer.
        `special_tokens_mask` in the batch marks the special tokens; without it they are
        guessed (units.py).
        """
        target = targets if targets is not None else self.target
        question = ask(
            model, batch, labels, target=target, continuation=self.continuation
        )
        size = self._size(question)
        return attack(
            self, model, question, ids, self.spare, self.batch, size, self._found
        )

    def _found(
        self,
        model: Any,
        question: Question,
        units: Units,
    ) -> Iterator[dict[str, Any]]:
        """Search and judge. Yield the resulting fields of `Outcome` for each example."""
        limits = budget(units, self.share, self.scope, self.least)
        queries = MaskedQueries(model, question, units, self._size(question))
        noise = _noise(question, units, self.seed)
        proposal = self.schedule(
            Search(queries, limits, self.ranking, self.loss, noise)
        )
        verdict = judge(model, question, units, proposal.cut, limits, self.batch)
        columns = {
            "flipped": verdict.flipped,
            "confidence_after": verdict.confidence,
            "queries": queries.asked,
            "steps": proposal.steps,
            **counts(units, verdict.masked),
        }
        for row in range(question.size):
            yield {
                **{name: values[row].item() for name, values in columns.items()},
                "after": tuple(verdict.predicted[row].tolist()),
                "cut": units.named(verdict.masked[row]),
            }

    def _size(self, question: Question) -> int:
        """The number of examples, or masks of an example, in one forward pass."""
        return max(1, self.batch // question.rows)


def _noise(
    question: Question,
    units: Units,
    seed: int,
) -> Tensor:
    """Draw uniform numbers (b, units) that depend only on the seed and the example's own input."""
    rows: list[Tensor] = []
    for number in range(question.size):
        first = next(iter(question.inputs.values()))[number].double().cpu().flatten()
        places = torch.arange(1, len(first) + 1, dtype=torch.float64)
        stream = torch.Generator().manual_seed(
            seed + int((first * places).sum().abs()) % 2**31
        )
        rows.append(torch.rand(units.total, generator=stream))
    return torch.stack(rows).to(units.free.device)


def attack(
    attacker: Attacker,
    model: Any,
    question: Question,
    ids: Sequence[str],
    spare: Spare,
    batch: int,
    size: int,
    search: Callable[[Any, Question, Units], Iterable[dict[str, Any]]],
) -> Disruption:
    """Attack the examples that the model gets right, `size` of them at a time.

    `search` yields the fields of `Outcome` that an attack sets, for each example.
    """
    if model.training:
        raise InputError("the model is in training mode: call model.eval() first")
    names = list(ids) or [str(number) for number in range(question.size)]
    if len(names) != question.size:
        raise InputError(
            f"ids must name {question.size} examples: {len(names)} were given"
        )
    parts: list[Disruption] = []
    for part in torch.arange(question.size, device=question.labels.device).split(size):
        started = time.perf_counter()
        some = question.part(part)
        units = survey(model, some, spare=spare)
        control, clean = run_control(model, some, units, batch)
        answers = map(tuple, some.predicted(clean).tolist())
        sure = some.confidence(clean).tolist()
        outcomes = [
            Outcome(names[number], False, False, answer, answer, confidence, confidence)
            for number, answer, confidence in zip(
                part.tolist(), answers, sure, strict=True
            )
        ]
        right = some.right(clean)
        if some.target is not None:  # some may be at the target already
            right &= ~(some.labels == some.target).all(-1)
        chosen = right.nonzero().squeeze(1)
        if len(chosen):
            found = search(model, some.part(chosen), units.part(chosen))
            for number, fields in zip(chosen.tolist(), found, strict=True):
                outcomes[number] = replace(outcomes[number], right=True, **fields)
        parameter = next(model.parameters())
        parts.append(
            Disruption(
                described(attacker),
                tuple(outcomes),
                control,
                time.perf_counter() - started,
                type(model).__name__,
                str(parameter.device),
                str(parameter.dtype).removeprefix("torch."),
                task=question.task,
            )
        )
    return joined(parts)


def counts(units: Units, masked: Tensor) -> dict[str, Tensor]:
    """Return the fields of `Outcome` that count masked units, (b,) each."""
    per_head = units.per_head(masked)
    of_head = units.head_units
    hit = per_head > 0
    return {
        "masked": masked.sum(1),
        "units": units.exists.sum(1),
        "heads": hit.sum(1),
        "worst_head": (per_head / of_head.clamp(min=1)).amax(1),
        "perturbation": masked.sum(1) / (of_head * hit).sum(1).clamp(min=1),
    }
