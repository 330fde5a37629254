"""What a model withstands: clean accuracy, every attack, and masks that it did not help to choose.

ALGORITHMS Part V; the attacks are HackAttend's (arXiv 2402.16470, Part IV). A model that was
trained on masks may have learnt to read the label off a mask, or to hide its gradients: the attack
then fails, and nothing was gained. So two more kinds of masks are tried:

- **Transferred.** The units that an attack found on another model, for the same sentences; counted
  over the examples that both models get right, for only these have a mask.
- **Wrong label.** t is a random class other than the predicted one: wrong wherever the model is
  right, and drawn without the labels. `lowered` cuts what lowers the confidence in t most, as if t
  were the label, with the whole budget: an honest model gets surer of its answer, one that reads
  labels off masks says t. `raised` cuts what leads to t, with HackAttend's search for a target.

Flips are counted over the examples that the model gets right, and by the judge (disrupt/judge.py)
where the masks come from a HackAttend. `lowered` cuts at least one unit a head, as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keyhole.data import Batch, Example
from keyhole.disrupt import Disruption, HackAttend, Unit
from keyhole.disrupt.batches import Table
from keyhole.disrupt.budget import budget
from keyhole.disrupt.judge import judge
from keyhole.disrupt.tasks import ask
from keyhole.disrupt.units import Units, survey
from keyhole.errors import InputError
from keyhole.harden.defences.attack_masks import AttackMasks, Cuts, tokens
from keyhole.harden.defences.defence import logits
from keyhole.models.masking import rewriting
from keyhole.results import FORMAT, environment


@dataclass(frozen=True)
class Measured:
    """Flips among the examples that were tried; `queries` of one example, `seconds` of all.

    `share` is the mean share of all units that the flips took, where the judge counted it.
    """

    examples: int
    flips: int
    queries: float
    seconds: float
    share: float = 0.0

    @property
    def success(self) -> float:
        return self.flips / max(1, self.examples)


@dataclass(frozen=True)
class Evaluation:
    """`accuracy` over `examples`; the rest over the first of them that were attacked.

    `found` holds the outcomes behind `attacks`, for pictures and as a donor; files leave it out.
    """

    accuracy: float
    examples: int
    attacks: dict[str, Measured]
    transferred: dict[str, Measured]
    wrong_label: dict[str, Measured]
    seconds: float
    environment: dict[str, str] = field(default_factory=lambda: environment())
    found: dict[str, Disruption] = field(
        default_factory=dict[str, Disruption], compare=False, repr=False
    )

    def to_dict(self) -> dict[str, Any]:
        told = asdict(replace(self, found={}))
        del told["found"]
        return {"format": FORMAT, **told}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Evaluation:
        if data.get("format") != FORMAT:
            raise InputError(f"expected format {FORMAT}, got {data.get('format')}")
        try:
            kinds: dict[str, Any] = {
                kind: {name: Measured(**one) for name, one in data[kind].items()} for kind in _KINDS
            }
            return cls(**{name: data[name] for name in _PLAIN}, **kinds)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"expected an evaluation, got {error!r}") from error


_PLAIN = ("accuracy", "examples", "seconds", "environment")
_KINDS = ("attacks", "transferred", "wrong_label")


def standard(share: float = 0.01, **changes: Any) -> dict[str, HackAttend]:
    """The attacks that every model is tried with; `changes` are for all of them."""
    return {
        "stronger": HackAttend.strongest(share, **changes),
        "as released": HackAttend.as_released(share, **changes),
        "random": HackAttend.as_released(share, ranking="random", order="random", **changes),
    }


def evaluate(
    model: Any,
    examples: Sequence[Example],
    tokenizer: Any,
    *,
    attacks: Mapping[str, HackAttend],
    donors: Mapping[str, Disruption] | None = None,
    wrong_label: HackAttend | None = None,
    attacked: int | None = None,
    seed: int = 0,
    together: int = 64,
    longest: int | None = 128,
    watch: Callable[[Evaluation], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Evaluation:
    """Clean accuracy on all examples, everything else on the first `attacked` of them.

    `donors` are attacks on other models (see `attack`). `wrong_label` makes the masks for wrong
    labels; without it there are none. `watch` is told what is known after each part; `progress`
    after each batch the part's name, how many of its examples are done, and of how many.
    """
    started = time.perf_counter()

    def table(name: str, count: int | None = None) -> Table:
        told = None if progress is None else partial(progress, name)
        return Table(model, tokenizer, examples, together, longest, watch=told).first(count)

    chosen = partial(table, count=attacked)
    found = Evaluation(table("clean").accuracy(), len(examples), {}, {}, {}, 0.0)

    def know(kind: str, name: str, one: Measured) -> None:
        nonlocal found
        kinds = {**getattr(found, kind), name: one}
        found = replace(found, seconds=time.perf_counter() - started, **{kind: kinds})
        if watch is not None:
            watch(found)

    for name, method in attacks.items():
        one = chosen(name).attack(method)
        found = replace(found, found={**found.found, name: one})
        know("attacks", name, _counted(one))
    for name, donor in (donors or {}).items():
        know("transferred", name, transferred(chosen(name), donor))
    if wrong_label is not None:
        know("wrong_label", "lowered", lowered(chosen("lowered"), wrong_label, seed))
        know("wrong_label", "raised", raised(chosen("raised"), wrong_label, seed))
    return replace(found, seconds=time.perf_counter() - started)


def attack(
    model: Any, examples: Sequence[Example], tokenizer: Any, method: HackAttend, *,
    together: int = 64, longest: int | None = 128,
) -> Disruption:  # fmt: skip
    """An attack in batches of texts of like length; the outcomes in the examples' order."""
    return Table(model, tokenizer, examples, together, longest).attack(method)


def transferred(table: Table, donor: Disruption) -> Measured:
    """The donor's units cut here, whether they flipped the donor or not."""
    if getattr(table.tokenizer, "padding_side", "right") != "right":
        raise InputError("expected padding on the right: units of another batch would be shifted")
    started, flips, count = time.perf_counter(), 0, 0
    method = HackAttend(**donor.method)
    cuts = {outcome.id: outcome.cut for outcome in donor.attacked}
    for part, batch, labels in table.batches():
        question = ask(table.model, batch, labels)
        units = survey(table.model, question, spare=method.spare)
        cut = torch.stack([_mask(units, cuts.get(one.id, ())) for one in part])
        cut = cut.to(units.free.device) & units.free  # what is not there cannot be cut
        limits = budget(units, method.share, method.scope, method.head_units, method.least)
        verdict = judge(table.model, question, units, cut, limits, method.batch)
        has = torch.tensor([one.id in cuts for one in part], device=labels.device)
        right = (table.predicted(batch) == labels) & has
        count += int(right.sum())
        flips += int((verdict.flipped & right).sum())
    return Measured(count, flips, 1.0, time.perf_counter() - started)


def _mask(units: Units, cut: Sequence[Unit]) -> Tensor:
    """The inverse of `Units.named`, (units,)."""
    mask = torch.zeros(units.total, dtype=torch.bool)
    for unit in cut:
        place = units.places[unit.layer] if unit.layer < len(units.places) else None
        inside = (unit.sequence, unit.head, unit.query, unit.key)
        shape = () if place is None else place.shape
        if place is None or any(one >= size for one, size in zip(inside, shape, strict=True)):
            raise InputError(f"expected a donor with the same layers and heads, got {unit}")
        units.at(mask, place)[inside] = True
    return mask


def lowered(table: Table, method: HackAttend, seed: int) -> Measured:
    """Masks that lower the confidence in a wrong label, as if it were the right one."""
    started, flips, count = time.perf_counter(), 0, 0
    for part, batch, labels in table.batches():
        before = table.predicted(batch)
        wrong = wrong_labels(table.model, batch, part, seed)
        cuts = lowering(table.model, batch, wrong, method)
        with torch.no_grad(), rewriting(table.model, cuts):
            after = logits(table.model, batch).argmax(-1)
        right = before == labels
        count += int(right.sum())
        flips += int((right & (after != before)).sum())
    return Measured(count, flips, method.rounds + 1.0, time.perf_counter() - started)


def lowering(model: Any, batch: Batch, wrong: Tensor, method: HackAttend) -> Cuts:
    """The cuts themselves: the labels are nowhere near."""
    made, cuts = AttackMasks(share=method.share, rounds=method.rounds), Cuts()
    with torch.enable_grad(), rewriting(model, cuts), _followed(model):
        scores = partial(logits, model, batch)
        ranked = cuts.gradients(cuts.look(scores), wrong)
        made.attack(scores, cuts, ranked, wrong, tokens(batch))
    return cuts


@contextmanager
def _followed(model: Any) -> Generator[None]:
    """Maps have gradients even where all weights are frozen: the embeddings ask for them."""
    weights = list(model.get_input_embeddings().parameters())
    before = [weight.requires_grad for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, asked in zip(weights, before, strict=True):
            weight.requires_grad_(asked)


def raised(table: Table, method: HackAttend, seed: int) -> Measured:
    """Masks that lead to a wrong label; the search is given the prediction, not the label."""
    started = time.perf_counter()
    flips, count, queries, share = 0, 0, 0, 0.0
    for part, batch, labels in table.batches():
        before = table.predicted(batch)
        wrong = wrong_labels(table.model, batch, part, seed)
        found = method(table.model, batch, before, targets=wrong)
        for outcome, right in zip(found.outcomes, (before == labels).tolist(), strict=True):
            count += right
            flips += right and outcome.flipped
            queries += outcome.queries if right else 0
            share += outcome.share if right and outcome.flipped else 0.0
    seconds = time.perf_counter() - started
    return Measured(count, flips, queries / max(1, count), seconds, share / max(1, flips))


def wrong_labels(model: Any, batch: Batch, part: Sequence[Example], seed: int) -> Tensor:
    """A random class other than the predicted one for each example, the same in any batch."""
    with torch.no_grad():
        scores = logits(model, batch)
    steps: list[int] = []
    for example in part:
        own = int.from_bytes(example.text.encode()[:200], "little") % (2**61 - 1)
        stream = torch.Generator().manual_seed((seed * 1_000_003 + own) % 2**62)
        steps.append(int(torch.randint(1, scores.shape[-1], (), generator=stream)))
    step = torch.tensor(steps, device=scores.device)
    return (scores.argmax(-1) + step) % scores.shape[-1]


def _counted(found: Disruption) -> Measured:
    return Measured(
        len(found.attacked), found.flips, found.queries, found.seconds, found.share
    )  # fmt: skip
