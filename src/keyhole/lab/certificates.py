"""A certificate: whichever units are cut, up to k of them, the prediction of this text stands.

Ours; nobody has published one. Two statements of the model as it is, each for the units that an
attack may cut (of the model smoothed over masks: harden/smoothing.py):

- **k = 1, exact.** Every unit is cut, one at a time, and the least margin taken: at most
  `layers·heads·n²` passes, each from the cut's layer on.
- **k ≥ 2, a bound.** The moves of the single cuts are known exactly, and what k of them do together
  beyond that is bounded (cuts.py): for k units of one layer, and for k anywhere, which is far
  harder, because a cut changes the rows that later cuts are made in. Where moves are too large for
  a bound of second order, nothing is claimed.

Arithmetic: all of it is float64, whose rounding is some 1e-12 here, and speaks of the weights as
they are loaded, computed exactly. A margin counts only above `SLACK`, which covers that rounding
and, as measured and not as proved, the 1e-5 by which float32 differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from keyhole.core import Outcome, Result, environment
from keyhole.core.errors import InputError, expect_among, expect_count
from keyhole.core.machine import expect_device
from keyhole.core.progress import Progress, Track, untracked
from keyhole.core.registry import Entry, Registry
from keyhole.core.result import restored
from keyhole.data import Batch, Example, encode
from keyhole.disrupt.hack_attend import Spare
from keyhole.disrupt.run import SHIPPED, examples_of, source_of
from keyhole.disrupt.tasks import ask, settled
from keyhole.disrupt.units import Unit, survey
from keyhole.harden.smoothing import Smoothed, Smoothing
from keyhole.lab.cuts import SingleCuts, Unbounded, cut_each, interplay
from keyhole.lab.written_out import (
    TANH_BEND,
    Classifier,
    Sizes,
    Slopes,
    Trace,
    embedded,
    quadratic,
    sizes,
    slopes,
    written_out,
)
from keyhole.models.anatomy import fitting

SLACK = 1e-3


@dataclass(frozen=True)
class Certificate:
    """What is proved of one text that the model gets right; of others, nothing is.

    `margin` is the answer's lead over the next class; `alone` the least that any single unit
    leaves of it, and `unit` that unit. For k ≥ 2, `whole` is what any k units of the model leave of
    it at least, `layers` what any k of each layer do; None where nothing is proved.
    """

    id: str
    right: bool
    k: int
    margin: float
    alone: float
    units: int
    unit: Unit | None = None
    whole: float | None = None
    layers: tuple[float | None, ...] = ()

    @property
    def flipped(self) -> bool:
        """Does a single unit change the answer?"""
        return self.right and self.alone < 0

    @property
    def holds(self) -> bool:
        """Is it proved that the answer stands, whichever k units are cut?"""
        return self.right and _stands(self.alone if self.k == 1 else self.whole)

    def holds_in(self, layer: int) -> bool:
        """Is it proved that it stands, whichever k units of this layer are cut?"""
        return self.right and (self.holds or (bool(self.layers) and _stands(self.layers[layer])))

    def holds_within_layers(self) -> bool:
        """The same of every layer: all k units in one, whichever that is."""
        return self.holds or all(self.holds_in(layer) for layer in range(max(1, len(self.layers))))


def _stands(bound: float | None) -> bool:
    return bound is not None and bound > SLACK


def certify(
    model: Any, batch: Batch, label: int, k: int = 1, *, spare: str = "special", name: str = "0"
) -> Certificate:
    """`batch` holds one text, without padding, as the tokenizer makes it."""
    return certify_each(model, batch, label, [k], spare=spare, name=name)[0]


def certify_each(
    model: Any, batch: Batch, label: int, ks: Sequence[int], *, spare: str = "special",
    name: str = "0",
) -> list[Certificate]:  # fmt: skip
    """The same for several k at once: the single cuts, most of the work, are made once."""
    for k in ks:
        expect_count("k", k)
    if len(batch["input_ids"]) != 1:
        raise InputError(f"certify takes one text at a time: got {len(batch['input_ids'])}")
    real = batch.get("attention_mask")
    if real is not None and not bool(real.all()):
        padded = int((real == 0).sum())
        raise InputError(f"the text must not be padded: {padded} of {real.shape[1]} tokens are")
    classifier = written_out(model)
    question = ask(model, batch, torch.tensor([label]))
    units = survey(model, question, spare=spare)
    free = torch.stack([units.at(units.free, place)[0, 0] for place in units.places])
    types = batch.get("token_type_ids")
    x = embedded(model, question.inputs["input_ids"][0], None if types is None else types[0])
    with torch.enable_grad():  # the margin's slopes at every stage need a graph
        logits, traces = classifier.passed(x.requires_grad_())
    lead = logits.detach()[label] - logits.detach()
    lead[label] = torch.inf
    right = bool(lead.min() > 0)
    if not right or not bool(free.any()):
        margin = float(lead.min())
        return [Certificate(name, right, k, margin, margin, int(free.sum())) for k in ks]
    proof = _Proof(classifier, logits, traces, free, label)
    return proof.certificates(name, float(lead.min()), ks)


class _Proof:
    """All that the certificate of one text is made of."""

    def __init__(
        self, classifier: Classifier, logits: Tensor, traces: list[Trace], free: Tensor, label: int
    ) -> None:
        self.classifier, self.free, self.label = classifier, free, label
        self.logits, self.graph = logits, traces
        self.traces = [trace.detached() for trace in traces]

    def certificates(self, name: str, margin: float, ks: Sequence[int]) -> list[Certificate]:
        others = [number for number in range(len(self.logits)) if number != self.label]
        size = self._sizes() if max(ks) > 1 else []
        against = [self._against(other, size, ks) for other in others]
        alone, unit, _ = min(against, key=lambda proof: proof[0])
        made: list[Certificate] = []
        for place, k in enumerate(ks):
            columns = zip(*(bounds[place] for _, _, bounds in against), strict=True)
            least = [min(column) for column in columns]
            whole, *layers = [None if bound == -torch.inf else bound for bound in least] or [None]
            count = int(self.free.sum())
            made.append(
                Certificate(name, True, k, margin, alone, count, unit, whole, tuple(layers))
            )
        return made

    def _sizes(self) -> list[Sizes]:
        last, n = len(self.traces) - 1, self.free.shape[-1]
        return [
            sizes(layer, trace, from_input=number > 0, rows=1 if number == last else n)
            for number, (layer, trace) in enumerate(
                zip(self.classifier.layers, self.traces, strict=True)
            )
        ]

    def _against(
        self, other: int, size: list[Sizes], ks: Sequence[int]
    ) -> tuple[float, Unit, list[list[float]]]:
        """The least margin over one other class, its unit, and the bounds for each k ≥ 2."""
        slope = slopes(self.classifier, self.graph, self.logits, self.label, other)
        weights, _ = self.classifier.classes
        bends = TANH_BEND * (weights[self.label] - weights[other]).abs()
        with torch.no_grad():
            alone = cut_each(self.classifier, self.traces, slope, bends, self.free, self.label)
            margins = alone.margins[:, other]
            least = Unit(*self.free.nonzero()[margins.argmin()].tolist())
            pooled = quadratic(bends, self.classifier.pooler[0]).sqrt()
            parts = [(alone, self.free)]
            for number in range(len(self.free)):
                free = torch.zeros_like(self.free)
                free[number] = self.free[number]
                parts.append((alone.of_layer(number, self.free), free))
            bounds = [
                [self._bound(other, size, slope, *part, pooled, k) for part in parts if k > 1]
                for k in ks
            ]
        return float(margins.min()), least, bounds

    def _bound(
        self, other: int, size: list[Sizes], slope: list[Slopes], alone: SingleCuts, free: Tensor,
        pooled: Tensor, k: int,
    ) -> float:  # fmt: skip
        """What k of the free units leave of the margin at least."""
        margin = float(self.logits[self.label] - self.logits[other])
        try:
            cost, more = interplay(size, slope, alone, pooled, free, k)
        except Unbounded:
            return -torch.inf
        cost = cost + more * (margin - alone.margins[:, other]).clamp(min=0)
        return margin - float(cost.topk(min(k, len(cost))).values.sum())


MOST = 64  # units: the bound says nothing long before


@dataclass(frozen=True, repr=False)
class Certification(Result):
    """The certificates of all texts, in their order."""

    certificates: tuple[Certificate, ...]
    k: int
    spare: str
    seconds: float
    model: str = ""
    data: str = ""
    slack: float = SLACK
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "certification"

    @property
    def right(self) -> tuple[Certificate, ...]:
        return tuple(proof for proof in self.certificates if proof.right)

    @property
    def certified(self) -> int:
        return sum(proof.holds for proof in self.right)

    @property
    def flipped(self) -> int:
        return sum(proof.flipped for proof in self.right)

    @property
    def outcome(self) -> Outcome:
        """A single unit flips a text; all are certified; or something is left open."""
        if self.flipped:
            return Outcome.GIVEN_AWAY
        whole = bool(self.right) and self.certified == len(self.right)
        return Outcome.KEPT if whole else Outcome.UNCHECKED

    def summary(self) -> str:
        right, count = self.right, len(self.right)
        stand = sum(proof.alone > self.slack for proof in right)
        lines = [
            f"{stand} of {count} right answers stand whichever single unit is cut, "
            f"{self.flipped} do not (exact: {sum(proof.units for proof in right):,} units were cut)"
        ]
        if self.k > 1:
            lines.append(f"{self.certified} of {count} whichever {self.k} units are cut (proved)")
            layers = max((len(proof.layers) for proof in right), default=0)
            each = [self._of(lambda proof, n=n: proof.holds_in(n)) for n in range(layers)]
            within = self._of(Certificate.holds_within_layers)
            lines.append(
                f"{within} of {count} whichever {self.k} units of one layer are cut (proved); "
                f"layer by layer: {', '.join(map(str, each))}"
            )
        skipped = len(self.certificates) - count
        lines.append(f"{skipped} that the model gets wrong were left alone; {self.seconds:.1f} s")
        return "\n".join(lines)

    def _of(self, proved: Callable[[Certificate], bool]) -> int:
        return sum(map(proved, self.right))

    def contents(self) -> dict[str, Any]:
        proofs = [
            {**asdict(proof), "holds": proof.holds, "flipped": proof.flipped}
            for proof in self.certificates
        ]
        data = asdict(replace(self, certificates=()))
        counts = {"certified": self.certified, "flipped": self.flipped}
        return {**data, **counts, "certificates": proofs}

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        del tensors
        # more: `holds` and `flipped`
        proofs = tuple(restored(Certificate, proof, more=True) for proof in data["certificates"])
        return restored(cls, data, more=True, certificates=proofs)


@dataclass(frozen=True)
class Bounds:
    """Of a BERT classifier as it is: one unit exactly, more by a bound; `spare` is never cut."""

    spare: Spare = "special"

    def __post_init__(self) -> None:
        expect_among("spare", self.spare, Spare)

    def certify(
        self, model: Any, tokenizer: Any, examples: Sequence[Example], k: int, max_length: int,
        progress: Progress,
    ) -> Certification:  # fmt: skip
        started, proofs = time.perf_counter(), list[Certificate]()
        for example in examples:
            batch, labels = encode(tokenizer, [example], max_length=max_length)
            answer = int(settled(model, batch, labels)[0])
            proofs.append(certify(model, batch, answer, k, spare=self.spare, name=example.id))
            progress(len(proofs), len(examples))
        return Certification(tuple(proofs), k, self.spare, time.perf_counter() - started)


METHODS: Registry[Bounds | Smoothing, None] = Registry(
    "method", Entry("bounds", Bounds), Entry("smoothing", Smoothing)
)


def certify_all(
    model: str | Path, data: str | Path | None = None, k: int = 1, *,
    method: str | Bounds | Smoothing = "bounds", text: Sequence[str] = (), label: str | None = None,
    classes: Sequence[str] = (), examples: int | None = None, max_length: int = 128,
    device: str = "cpu", allow_pickle: bool = False, seed: int = 0, track: Track = untracked,
    **options: Any,
) -> Certification | Smoothed:  # fmt: skip
    """Which predictions stand, whichever units are cut, up to k of them; arguments as of `run`."""
    expect_count("K", k)
    expect_count("--max-length", max_length)
    expect_device(device)
    if isinstance(method, str):
        drawn = {"seed": seed} if "seed" in METHODS[method].options else {}
        method = METHODS.make(method, **options, **drawn)
    source = source_of(str(model), None, device, max_length, allow_pickle)
    if isinstance(method, Bounds):
        expect_count("K", k, 1, MOST)
        if source.task != "classification":
            raise InputError(f"bounds are for classifiers: this is a model for {source.task}")
    chosen = examples_of(source, data, text, label, classes, examples)
    loaded, tokenizer = source.load()
    max_length = fitting(loaded, tokenizer, max_length) or max_length
    progress = track("disrupt", len(chosen))
    found = method.certify(loaded, tokenizer, chosen, k, max_length, progress)
    return replace(found, model=str(model), data=SHIPPED if data is None else str(data))
