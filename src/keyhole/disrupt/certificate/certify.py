"""A certificate: whichever units are cut, up to k of them, the prediction of this text stands.

Ours; nobody has published one. Two statements, each for the units that an attack may cut:

- **k = 1, exact.** Every unit is cut, one at a time, and the least margin taken: at most
  `layers·heads·n²` passes, each from the cut's layer on (singles.py).
- **k ≥ 2, a bound.** The moves of the single cuts are known exactly, and what k of them do together
  beyond that is bounded (bound.py): for k units of one layer, and for k anywhere, which is far
  harder, because a cut changes the rows that later cuts are made in. Where moves are too large for
  a bound of second order, nothing is claimed.

Arithmetic: all of it is float64, whose rounding is some 1e-12 here, and speaks of the weights as
they are loaded, computed exactly. A margin counts only above `SLACK`, which covers that rounding
and, as measured and not as proved, the 1e-5 by which float32 differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.data import Batch
from keyhole.disrupt.certificate.bound import Unbounded, interplay
from keyhole.disrupt.certificate.classifier import Classifier, Trace, embedded, written_out
from keyhole.disrupt.certificate.jacobians import (
    TANH_BEND,
    Sizes,
    Slopes,
    quadratic,
    sizes,
    slopes,
)
from keyhole.disrupt.certificate.singles import Singles, singles
from keyhole.disrupt.tasks import ask
from keyhole.disrupt.units import Unit, survey

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
        if k < 1:
            raise InputError(f"expected k of at least 1, got {k}")
    if len(batch["input_ids"]) != 1:
        raise InputError(f"expected one text to certify, got {len(batch['input_ids'])}")
    real = batch.get("attention_mask")
    if real is not None and not bool(real.all()):
        padded = int((real == 0).sum())
        raise InputError(
            f"expected a text without padding, got {padded} of {real.shape[1]} tokens that are"
        )
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
            alone = singles(self.classifier, self.traces, slope, bends, self.free, self.label)
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
        self, other: int, size: list[Sizes], slope: list[Slopes], alone: Singles, free: Tensor,
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
