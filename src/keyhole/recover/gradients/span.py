"""What the gradient of a layer's weights says of the layer's inputs.

For Y = X Wᵀ the gradient of W is (∂L/∂Y)ᵀ X = Σ_i δ_i x_iᵀ: its rows are combinations of the inputs
x_i (DAGER, arXiv 2405.15586). With fewer inputs than the layer is wide, and gradients δ_i that are
linearly independent, the row space is the span of the inputs: an input lies in it, anything else
almost surely does not. Departure: the gradients of the query, key and value maps, which all receive
the same x_i, are stacked, so that inputs whose query gets no gradient are seen as well.

Numbers are rounded, so the span is that of the singular vectors above a floor: the largest singular
value that the errors alone would have. For independent errors of sizes σ_ij that is the length of
the largest row of σ plus that of the largest column nearly (Bandeira and van Handel, 2016).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keyhole.recover.gradients.update import Update

_FLOAT32 = 3e-7  # of the largest singular value: what adding up in float32 leaves
_ABOVE = 1.1  # of the floor: what counts as a direction of the span
_ROOM = 3  # directions that must be left for the span to say anything
_BLURRED = 0.4  # a tolerance that many other inputs meet as well
_SHARP = 1e-3  # a tolerance that nothing else meets by chance
TIGHT = 1e-4  # of a row's length: how far from the span it may be in float32


@dataclass(frozen=True, eq=False)
class Span:
    """An orthonormal `basis` (d, r) of the inputs' span, and of its complement, `rest` (d, d − r).

    `tolerance` is how far from the span, relative to its length, an input may seem to be.
    """

    basis: Tensor
    rest: Tensor
    tolerance: float

    @property
    def rank(self) -> int:
        return self.basis.shape[1]

    @property
    def says(self) -> bool:
        """Is anything outside of it? With as many inputs as the layer is wide, nothing is."""
        return self.rest.shape[1] >= _ROOM

    @property
    def blurred(self) -> bool:
        """Do the errors hide which inputs lie in it?"""
        return self.rank == 0 or self.tolerance >= _BLURRED

    @property
    def sharp(self) -> bool:
        """Is what lies in it as good as proven? What seems to by rounding or noise is not."""
        return self.says and self.tolerance <= _SHARP

    def distance(self, rows: Tensor) -> Tensor:
        """How far rows (…, d) are from the span, relative to their lengths."""
        rows = rows.to(self.rest)
        return (rows @ self.rest).norm(dim=-1) / rows.norm(dim=-1)

    def some_directions(self, count: int) -> Tensor:
        """Random directions (d, k) of the complement: along them distances are right on average."""
        stream = torch.Generator().manual_seed(0)
        count = min(count, self.rest.shape[1])
        mixed = torch.randn(self.rest.shape[1], count, generator=stream, dtype=torch.float64)
        return self.rest @ mixed.to(self.rest) / count**0.5


def span_of(rows: Tensor, variance: Tensor) -> Span:
    """The span of a gradient's rows (m, d); `variance` (m, d) is that of their errors."""
    _, values, directions = torch.linalg.svd(rows, full_matrices=rows.shape[0] < rows.shape[1])
    noise = float(variance.sum(0).max().sqrt() + variance.sum(1).max().sqrt())
    largest = float(values[0])
    floor = max(_ABOVE * noise, _FLOAT32 * largest)
    rank = int((values > floor).sum())
    last = float(values[rank - 1]) if rank else largest
    # Wedin (1972): errors of that size turn the span by their share of its smallest value.
    tolerance = max(TIGHT, min(0.5, noise / max(last, 1e-30)))
    return Span(directions[:rank].mT, directions[rank:].mT, tolerance)


def map_rows(update: Update, names: dict[int, str], map_: nn.Module) -> Tensor | None:
    """The gradient (outputs, inputs) of one linear map; None where it was not handed over."""
    weight = map_.get_parameter("weight")
    given = update.values.get(names.get(id(weight), ""))
    return None if given is None else inputs_last(given.to(weight.device).double(), map_)


def inputs_last(tensor: Tensor, map_: nn.Module) -> Tensor:
    """A tensor of a map's weights with its inputs along the last axis: GPT-2's hold them first."""
    return tensor if isinstance(map_, nn.Linear) else tensor.mT
