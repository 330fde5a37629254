"""Bilinear forms of every head of a layer whose values are known, at a scale that suits them.

`z = s²·xᵀWδ` (probe_sequences.py) loses e^{|z|} to the softmax and 1/|z| to rounding, so |z| should
come out near 1, and nobody knows the size of W beforehand. Where every token answers, each x is
sent at a ladder of lengths within one sequence and the best rung is kept, entry by entry: queries
cost nothing there. Where only the last token answers, the first question settles the scale, and
only pairs that turn out saturated, or heads far weaker than the others, are asked again at another.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyhole.extract.vectors.probe_sequences import Panel, solve_scores

_RUNGS = 8.0 ** torch.arange(-5, 6, dtype=torch.float64)
_SOUND = 0.1  # a score known better than this tells the scale; a worse one is saturated
_LARGE, _SMALL = 8.0, 0.05  # scores outside are measured again at another scale
_PRECISION, _BLUNT = 1e-12, 4.0  # so are those that lost more than this because they are large
_TRIES = 12
_SQUARES = (2.0**-80, 2.0**80)
_SPARE = 0.5  # bounds what is asked again, as a share of all: an oracle may be anything


class LayerForms:
    """Measures `xᵀ W_h δ` for all keys δ in `blocks`; the keys of a block share a sequence."""

    def __init__(self, panel: Panel, V: Tensor, blocks: list[Tensor]) -> None:
        self._panel = panel
        self._V = V
        self._blocks = blocks
        self._square = 1.0
        self._settled = False
        self._asked = 0
        self._again = 0

    def measure(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        """`x_iᵀ W_h δ_j` and bounds on their errors, both (H, len(xs), number of keys)."""
        parts = [self._block(block, xs) for block in self._blocks]
        forms, errors = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        return forms.transpose(0, 1), errors.transpose(0, 1)

    def _block(self, block: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        if self._panel.every_token:
            return self._climb(block, xs)
        if not self._settled:
            forms, errors = self._scout(block, xs[:1])
            if len(xs) > 1:
                rest = self._at(self._square, block, xs[1:])
                forms, errors = torch.cat([forms, rest[0]]), torch.cat([errors, rest[1]])
        else:
            forms, errors = self._at(self._square, block, xs)
        self._asked += len(xs)
        self._mend(block, xs, forms, errors)
        return forms, errors

    def _at(self, square: float, block: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        """Forms and errors (k, H, p) from one question each, all at one scale."""
        zeros = len(block) - 1  # as much weight on the references as on the keys
        answers = self._panel.respond(block.unsqueeze(0), xs, square, zeros)[0]
        references = self._panel.references(len(xs), zeros)
        z, errors = solve_scores(answers, block @ self._V, references)
        return z / square, errors / square

    def _climb(self, block: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        """The best rung of the ladder for each form; another ladder if W lies beyond it."""
        forms, errors = self._ladder(block, xs)
        for _ in range(_TRIES):
            low, high = self._square * float(_RUNGS[0]), self._square * float(_RUNGS[-1])
            if not self._move(forms, errors, low, high):
                break
            forms, errors = self._ladder(block, xs)
        return forms, errors

    def _ladder(self, block: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        lengths = _RUNGS[:, None, None]
        forms, errors = self._at(self._square, block, (lengths * xs).flatten(0, 1))
        forms = forms.unflatten(0, (-1, len(xs))) / lengths.unsqueeze(3)
        errors = errors.unflatten(0, (-1, len(xs))) / lengths.unsqueeze(3)
        best = errors.argmin(0, keepdim=True)
        return forms.gather(0, best)[0], errors.gather(0, best)[0]

    def _scout(self, block: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """One question, repeated until its scale fits."""
        self._settled = True
        forms, errors = self._at(self._square, block, x)
        for _ in range(_TRIES):
            if not self._move(forms, errors, self._square, self._square):
                break
            forms, errors = self._at(self._square, block, x)
        return forms, errors

    def _move(self, forms: Tensor, errors: Tensor, low: float, high: float) -> bool:
        """Shift the scale if the forms do not fit between `low` and `high`; False if they do."""
        step = max(64.0, high / low)
        sound = errors * low <= _SOUND
        largest = float(forms[sound].abs().max()) if bool(sound.any()) else math.inf
        if largest * low > _LARGE:
            wanted = self._square / step
        elif largest * high < _SMALL:
            wanted = self._square * min(step**2, 1 / max(largest * high, 1e-99))
        else:
            return False
        wanted = 4.0 ** round(math.log(min(max(wanted, _SQUARES[0]), _SQUARES[1]), 4))
        moved, self._square = wanted != self._square, wanted
        return moved

    def _mend(self, block: Tensor, xs: Tensor, forms: Tensor, errors: Tensor) -> None:
        """Ask again, at another scale, what was saturated or too faint; keep the better."""
        for factor in (1 / 8, 1 / 64, 2.0**-12, 2.0**-18):
            z = forms.abs() * self._square
            blunt = (errors > _PRECISION * forms.abs().amax((0, 2), keepdim=True)) & (z > _BLUNT)
            self._repeat(self._square * factor, blunt.flatten(1).any(1), block, xs, forms, errors)
        sound = torch.where(errors * self._square < _SOUND, forms.abs(), 0.0)
        for head in range(len(self._V) if len(self._V) > 1 else 0):
            faint = float(sound[:, head].max()) * self._square
            if 0.0 < faint < _SMALL:
                everyone = torch.ones(len(xs), dtype=torch.bool)
                square = self._square / max(faint, 2.0**-30)
                self._repeat(square, everyone, block, xs, forms, errors)

    def _repeat(
        self, square: float, rows: Tensor, block: Tensor, xs: Tensor, forms: Tensor, errors: Tensor
    ) -> None:
        count = int(rows.sum())
        if not 0 < count <= 16 + _SPARE * self._asked * len(self._V) - self._again:
            return
        self._again += count
        fresh, bounds = self._at(square, block, xs[rows])
        better = bounds < errors[rows]
        forms[rows] = torch.where(better, fresh, forms[rows])
        errors[rows] = torch.where(better, bounds, errors[rows])
