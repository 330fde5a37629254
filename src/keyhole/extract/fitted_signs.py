"""Several heads from the signs of their scores: scores by bisection, then a fit (ours).

sign_only.py reads one head, whose answer to a pair has one gate. For several heads,
with u = Σ_h v_h and δ_i = x_i − x for the tokens before the last one, x,

    f(X) = uᵀx + Φ,    Φ = Σ_h Σ_i α_hi·v_hᵀδ_i,    α_h = softmax of δ_iᵀW_h x and 0.

With λx for x and δ_i/λ for δ_i every α is as it was, and the score is λ·uᵀx + Φ/λ: its
sign changes where λ² = −Φ/uᵀx. So bisecting λ measures Φ relative to uᵀx, for sequences
of any length, if the two have opposite signs; otherwise a query shows nothing. The
direction of u comes from single tokens (halfspace.py). Scores are then known in units
of |u|, and fitted.py reads them like those of a target that answers with as many
digits. If Σ_h v_h = 0, this method does not work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.errors import expect_count, expect_number
from keyhole.extract.exams import SignMethod
from keyhole.extract.extraction import Step, setting
from keyhole.extract.fitted import Fitted
from keyhole.extract.halfspace import Ratios, bisect, centre, signs
from keyhole.oracle.protocol import Oracle

# Φ, of which a score is a difference, and u are bisected to 1/64 of the accuracy
_FINER = 64.0
# range of log₂ of −Φ/uᵀx, relative to Σ|δ_i|/|uᵀx|
_LOW = -20.0
_HIGH = 12.0
_OVERSAMPLING = (
    8.0  # twice as much as usual, since half of the scores cannot be measured
)


@dataclass(frozen=True)
class FittedSigns(SignMethod):
    """Extraction of one or several heads from signs; Σ_h v_h of the model has length 1."""

    heads: int | None = setting(None, "how many there are, if that is known")
    accuracy: float = setting(1e-6, "relative error to which scores are bisected")
    seed: int = 0

    def __post_init__(self) -> None:
        expect_count("heads", self.heads)
        expect_number("accuracy", self.accuracy, least=1e-10, below=1e-2)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        direction = Ratios(oracle, torch.Generator().manual_seed(self.seed))
        direction.sharpen(self.accuracy / _FINER)
        fit = Fitted(
            self.heads,
            precision=self.accuracy,
            oversampling=_OVERSAMPLING,
            seed=self.seed,
        )
        yield from fit.steps(_Scores(oracle, direction.v, self.accuracy))


class _Scores:
    """Scores measured through signs, with NaN where −Φ/uᵀx is negative or out of range."""

    def __init__(
        self,
        oracle: Oracle,
        u: Tensor,
        precision: float,
    ) -> None:
        self.dim = oracle.dim
        self.precision = precision
        self._oracle = oracle
        self._u = u

    def __call__(self, sequences: Tensor) -> Tensor:
        x = sequences[:, -1]
        alone = x @ self._u
        if sequences.shape[1] == 1:
            return alone
        deltas = sequences[:, :-1] - x[:, None]
        size = torch.linalg.vector_norm(deltas, dim=2).sum(1) / alone.abs()
        usable = (size > 0) & size.isfinite()

        def alike(rows: Tensor, logs: Tensor) -> Tensor:
            """Return which scores have the sign of uᵀx where log₂ of λ² is `logs`."""
            scale = (torch.exp2(logs[rows]) * size[rows]).sqrt()[:, None]
            last = scale * x[rows]
            tokens = torch.cat(
                [last[:, None] + deltas[rows] / scale[:, None], last[:, None]], 1
            )
            return signs(self._oracle, tokens) == (alone[rows] > 0)

        low, high = (torch.full_like(alone, end) for end in (_LOW, _HIGH))
        for end, wanted in ((low, False), (high, True)):
            rows = usable.nonzero().squeeze(1)
            if len(rows):
                usable[rows] = alike(rows, end) == wanted
        low[~usable] = high[~usable]
        width = self.precision / (_FINER * math.log(2))

        def below(rows: Tensor, logs: Tensor) -> Tensor:
            return ~alike(rows, logs)

        for _ in bisect(low, high, lambda: width, centre, below):
            pass
        Phi = -torch.exp2(centre(low, high)) * size * alone
        return torch.where(usable, alone + Phi, torch.nan)
