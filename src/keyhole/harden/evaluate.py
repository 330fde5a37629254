"""Evaluate a model's robustness: clean accuracy, and flips by attacks and by independent masks.

The attacks are HackAttend's (arXiv 2402.16470). They may fail for a wrong reason: a
model that was trained on masks may have learnt to read the label from a mask, or to
hide its gradients. So two more kinds of masks are tried, which the model has not
influenced:

- **Transferred.** The units that an attack found on another model, for the same texts. Only
  examples that both models get right have such a mask.
- **Wrong label.** t is a random class other than the predicted one, so it is wrong wherever the
  model is right, and the labels are not used. `lowered` cuts the units that lower the
  confidence in t most, as if t were the label, with the whole budget. A robust model
  becomes surer of its answer; a model that reads labels from masks answers t. `raised`
  cuts the units that lead to t, with HackAttend's targeted search.

If requested, the share of answers that is certified for the model smoothed over masks
(smoothing.py) is also measured. It bounds what any attack can do.

Flips are counted over the examples that the model gets right. The judge
(disrupt/judge.py) counts them if the masks come from a HackAttend. `lowered` cuts at
least one unit in each head, as in training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor

from keyhole.core import Result, environment
from keyhole.core.errors import InputError
from keyhole.core.progress import Track, untracked
from keyhole.core.text import percent
from keyhole.data import Batch, Example
from keyhole.disrupt import Attacker, Disruption, HackAttend, Rerank, Unit
from keyhole.disrupt.batches import Batches
from keyhole.disrupt.budget import budget
from keyhole.disrupt.disruption import joined
from keyhole.disrupt.judge import judge
from keyhole.disrupt.tasks import ask
from keyhole.disrupt.units import Units, survey
from keyhole.harden.defences.attack_masks import AttackMasks, Cuts, tokens
from keyhole.harden.defences.defence import logits, table
from keyhole.harden.smoothing import Smoothed, Smoothing
from keyhole.models.hooks import hooks
from keyhole.models.masking import rewriting


@dataclass(frozen=True)
class Measured:
    """Flips among the examples that were tried, with the mean queries and the total seconds.

    `share` is the mean share of all units that was cut for a flip, if the judge counted
    it.
    """

    examples: int
    flips: int
    queries: float
    seconds: float
    share: float = 0.0

    @property
    def success(self) -> float:
        return self.flips / max(1, self.examples)


@dataclass(frozen=True, repr=False)
class Evaluation(Result):
    """`accuracy` over all `examples`, and flips over those that were attacked.

    `disruptions` holds the outcomes of `attacks`, for pictures and for transfers; it is
    not saved.
    """

    accuracy: float
    examples: int
    attacks: dict[str, Measured]
    transferred: dict[str, Measured]
    wrong_label: dict[str, Measured]
    seconds: float
    environment: dict[str, str] = field(default_factory=environment)
    disruptions: dict[str, Disruption] = field(
        default_factory=dict[str, Disruption], compare=False
    )
    smoothed: Smoothed | None = None

    kind: ClassVar[str] = "evaluation"

    def figures(self) -> dict[str, float]:
        """Return the accuracy, and the share of right answers that each kind of mask flips."""
        found = {"clean accuracy": self.accuracy}
        for prefix, group in (
            ("", self.attacks),
            ("masks found on ", self.transferred),
            ("wrong label ", self.wrong_label),
        ):
            for name, each in group.items():
                found[f"flips, {prefix}{name}"] = each.success
        if self.smoothed is not None:
            found["accuracy of the vote over masks"] = self.smoothed.accuracy
            for name, share in self.smoothed.curve().items():
                found[f"certified, any {name}"] = share
        return found

    def summary(self) -> str:
        shown = [
            f"{name} {percent(value, 1)}" for name, value in self.figures().items()
        ]
        return f"{'; '.join(shown)} ({self.examples} examples, {self.seconds:.1f} s)"

    def contents(self) -> dict[str, Any]:
        data = asdict(replace(self, disruptions={}))
        del data["disruptions"]
        return {**data, "smoothed": self.smoothed and self.smoothed.contents()}


def standard(share: float = 0.01, **changes: Any) -> dict[str, HackAttend]:
    """Return the attacks that every model is tried with; `changes` apply to all of them."""
    return {
        "stronger": HackAttend.strongest(share, **changes),
        "as released": HackAttend.as_released(share, **changes),
        "random": HackAttend.random(share, **changes),
    }


def evaluate(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    attacks: Mapping[str, Attacker],
    donors: Mapping[str, Disruption] | None = None,
    wrong_label: HackAttend | None = None,
    smoothing: Smoothing | None = None,
    attacked: int | None = None,
    seed: int = 0,
    batch_size: int = 64,
    max_length: int | None = 128,
    track: Track = untracked,
) -> Evaluation:
    """Measure clean accuracy on all examples, and everything else on the first `attacked`.

    `donors` are attacks on other models (see `attack`). `wrong_label` makes the masks
    for wrong labels. `smoothing` votes over masks.
    """
    started = time.perf_counter()

    def chosen(name: str, count: int | None = attacked) -> Batches:
        part = examples[:count]
        progress = track(name, len(part))
        return Batches(
            model, tokenizer, part, batch_size, max_length, progress=progress
        )

    clean = chosen("clean", None).accuracy()
    disruptions = {
        name: chosen(name).attack(attacker) for name, attacker in attacks.items()
    }
    moved = {
        name: transferred(chosen(name), donor) for name, donor in (donors or {}).items()
    }
    wrong: dict[str, Measured] = {}
    if wrong_label is not None:
        wrong["lowered"] = lowered(chosen("lowered"), wrong_label, seed)
        wrong["raised"] = raised(chosen("raised"), wrong_label, seed)
    smoothed: Smoothed | None = None
    if smoothing is not None:
        voters = chosen("certified")
        smoothed = smoothing.certify(
            model,
            tokenizer,
            voters.examples,
            max_length=max_length,
            progress=voters.progress,
        )
    seconds = time.perf_counter() - started
    return Evaluation(
        clean,
        len(examples),
        {name: _measured(each) for name, each in disruptions.items()},
        moved,
        wrong,
        seconds,
        disruptions=disruptions,
        smoothed=smoothed,
    )


def attack(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    method: Attacker,
    *,
    batch_size: int = 64,
    max_length: int | None = 128,
) -> Disruption:
    """Attack examples in batches of similar length; outcomes are in the order of the examples."""
    return Batches(model, tokenizer, examples, batch_size, max_length).attack(method)


def transferred(batches: Batches, donor: Disruption) -> Measured:
    """Cut the units that an attack chose on another model, whether they flipped it or not."""
    if getattr(batches.tokenizer, "padding_side", "right") != "right":
        raise InputError(
            "the tokenizer must pad on the right: otherwise the units are shifted"
        )
    given = {each.id: replace(each, label=0) for each in donor.examples}
    mine = [replace(each, label=0) for each in batches.examples]
    if any(given.get(each.id, each) != each for each in mine):
        raise InputError(
            "the donor must have attacked the same texts: an id is of another text"
        )
    method = HackAttend.from_dict(donor.method)
    cuts = {outcome.id: outcome.cut for outcome in donor.attacked}

    def flipped() -> Iterator[tuple[Tensor, Tensor]]:
        for part, batch, labels in batches:
            question = ask(batches.model, batch, labels)
            units = survey(batches.model, question, spare=method.spare)
            masks = [_mask(units, cuts.get(example.id, ())) for example in part]
            cut = torch.stack(masks).to(units.free.device) & units.free
            limits = budget(units, method.share, method.scope, method.least)
            verdict = judge(batches.model, question, units, cut, limits, method.batch)
            has = labels.new_tensor([example.id in cuts for example in part]) > 0
            yield (batches.predicted(batch) == labels) & has, verdict.flipped

    return _count(flipped(), queries=1.0)


def _count(found: Iterator[tuple[Tensor, Tensor]], queries: float) -> Measured:
    """Count the examples of each batch that count, and those of them that are flipped."""
    started = time.perf_counter()
    examples = 0
    flips = 0
    for counts, flipped in found:
        examples += int(counts.sum())
        flips += int((counts & flipped).sum())
    return Measured(examples, flips, queries, time.perf_counter() - started)


def _measured(found: Disruption) -> Measured:
    return Measured(
        len(found.attacked), found.flips, found.queries, found.seconds, found.share
    )


def _mask(units: Units, cut: Sequence[Unit]) -> Tensor:
    """Return the mask (units,) of a list of units: the inverse of `Units.named`."""
    mask = torch.zeros(units.total, dtype=torch.bool)
    for unit in cut:
        inside = (unit.sequence, unit.head, unit.query, unit.key)
        try:
            units.at(mask, units.places[unit.layer])[inside] = True
        except IndexError as error:
            raise InputError(
                f"the donor must have the same layers and heads: there is no {unit}"
            ) from error
    return mask


def lowered(
    batches: Batches,
    method: HackAttend,
    seed: int,
) -> Measured:
    """Measure masks that lower the confidence in a wrong label, as if it were right."""

    def flipped() -> Iterator[tuple[Tensor, Tensor]]:
        for part, batch, labels in batches:
            before = batches.predicted(batch)
            wrong = wrong_labels(batches.model, batch, part, seed)
            cuts = lowering(batches.model, batch, wrong, method)
            with rewriting(batches.model, cuts):
                after = batches.predicted(batch)
            yield before == labels, after != before

    return _count(flipped(), queries=_rounds(method) + 1.0)


def lowering(
    model: Any,
    batch: Batch,
    wrong: Tensor,
    method: HackAttend,
) -> Cuts:
    """Cut the units that lower the confidence in the `wrong` labels; the labels are not used."""
    made = AttackMasks(share=method.share, rounds=_rounds(method))
    cuts = Cuts()

    def differentiate(
        _module: Any,
        _args: Any,
        output: Tensor,
    ) -> None:
        output.requires_grad_()  # so that maps have gradients even if weights are frozen

    embeddings = (table(model).register_forward_hook, differentiate)
    with torch.enable_grad(), rewriting(model, cuts), hooks(embeddings):
        scores = partial(logits, model, batch)
        ranked = cuts.gradients(cuts.look(scores), wrong)
        made.attack(scores, cuts, ranked, wrong, tokens(batch))
    return cuts


def _rounds(method: HackAttend) -> int:
    """Return how often units are ranked: once if the schedule is greedy."""
    return method.schedule.rounds if isinstance(method.schedule, Rerank) else 1


def raised(
    batches: Batches,
    method: HackAttend,
    seed: int,
) -> Measured:
    """Measure masks that lead to a wrong label; the search gets the prediction, not the label."""
    found: list[Disruption] = []
    for part, batch, labels in batches:
        before = batches.predicted(batch)
        wrong = wrong_labels(batches.model, batch, part, seed)
        each = method(batches.model, batch, before, targets=wrong)
        right = tuple(compress(each.outcomes, (before == labels).tolist()))
        found.append(replace(each, outcomes=right))
    return _measured(joined(found))


def wrong_labels(
    model: Any,
    batch: Batch,
    part: Sequence[Example],
    seed: int,
) -> Tensor:
    """Draw a class other than the predicted one for each example, independent of its batch."""
    with torch.no_grad():
        scores = logits(model, batch)
    steps: list[int] = []
    for example in part:
        own = int.from_bytes(example.text.encode()[:200], "little") % (2**61 - 1)
        stream = torch.Generator().manual_seed((seed * 1_000_003 + own) % 2**62)
        steps.append(int(torch.randint(1, scores.shape[-1], (), generator=stream)))
    step = torch.tensor(steps, device=scores.device)
    return (scores.argmax(-1) + step) % scores.shape[-1]
