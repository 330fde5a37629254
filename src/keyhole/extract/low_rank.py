"""One head of low rank, with as many queries as it has unknowns: d + 2rd − r².

Theorem 5.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873) draws
random measurements and solves a convex program (nuclear_norm.py). Here queries are
adaptive and every bilinear form is exact, so a cross approximation is enough. With `Z =
Δ W Xᵀ`,

    repeat: measure a column of Z;  if it lies in the span of the earlier ones, stop;
            choose the row of its largest part outside that span, and measure that row;
    Z = C · C[I]⁻¹ · Z[I]      C: the columns, I: the chosen rows

Entries where rows and columns cross are measured once: d + 2rd − r² in all. If the rank
is not known, one more column ends the search, with d − r queries. C is orthogonalised
before the solve, so small singular values of W cost no precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count
from keyhole.core.float64 import random_stream, zeros
from keyhole.extract.bilinear import (
    BilinearForms,
    ProbeBasis,
    lengths,
    random_orthogonal,
    read_values,
)
from keyhole.extract.extraction import Extraction, Step, setting
from keyhole.extract.judge import Method
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import BudgetExhausted, Oracle


@dataclass(frozen=True)
class LowRank(Method):
    """Exact extraction of one head of low rank; finds the rank if it is not given."""

    rank: int | None = setting(None, "rank of W; found if not given")
    seed: int = 0
    tolerance: float = 1e-8
    resolution: float = setting(
        1e-11, "size of rounding in a new column, relative to the largest"
    )

    def __post_init__(self) -> None:
        expect_count("rank", self.rank, 0)

    def __call__(self, oracle: Oracle) -> Extraction:
        expect_rank(self.rank, oracle.dim)  # before anything is paid for
        return super().__call__(oracle)

    def expected_queries(self, dim: int) -> int | None:
        expect_rank(self.rank, dim)
        return None if self.rank is None else degrees_of_freedom(dim, self.rank)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        limit = d if self.rank is None else self.rank
        v = read_values(oracle)
        stream = random_stream(self.seed)
        probes = ProbeBasis.draw(v, stream)
        X = random_orthogonal(d, stream)
        # One column of a matrix of rank 1 says little about the size of the others.
        cross = _Cross(BilinearForms(oracle, v, headroom=64), probes.deltas, X)

        def so_far(rank: int) -> Step:
            """Return what is known of a W of at most this rank."""
            columns, rows = cross.factors()
            W = probes.solve(columns) @ (rows @ X)
            return Step(
                Head(W, v),
                known=degrees_of_freedom(d, len(cross.rows)),
                unknowns=degrees_of_freedom(d, rank),
            )

        yield so_far(limit)
        try:
            while len(cross.rows) < limit and cross.grow(self.resolution):
                # A step costs d²k operations: only at powers of two, and at the end.
                if len(cross.rows).bit_count() == 1:
                    yield so_far(limit)
        except BudgetExhausted:
            yield so_far(limit)
            raise
        yield so_far(len(cross.rows))


def expect_rank(rank: int | None, d: int) -> None:
    """Raise InputError if the rank exceeds the dimension."""
    if rank is not None and rank > d:
        raise InputError(f"the rank must not exceed the dimension, {d}: got {rank}")


def degrees_of_freedom(d: int, r: int) -> int:
    """Return the degrees of freedom of v and of a d×d matrix of rank r."""
    return d + 2 * r * d - r * r


class _Cross:
    """Columns and rows of `Z = Δ W Xᵀ`, measured one pair at a time."""

    def __init__(
        self,
        forms: BilinearForms,
        deltas: Tensor,
        X: Tensor,
    ) -> None:
        self._forms = forms
        self._deltas = deltas
        self._X = X
        self._Zt = torch.full_like(X, math.nan)  # [j, i] = δ_iᵀ W x_j
        self._span = zeros(0, len(X))  # orthonormal, of the columns
        self._largest = 0.0
        self.columns = 0
        self.rows: list[int] = []

    def grow(self, resolution: float) -> bool:
        """Measure one more column and row; return False if the column is in the span already.

        If the budget ends, the state stays as it was.
        """
        j = self.columns
        self._fill([i for i in range(len(self._X)) if i not in self.rows], [j])
        self.columns += 1
        column = self._Zt[j]
        self._largest = max(self._largest, float(lengths(column)))
        fresh = column
        for _ in range(2):  # twice against rounding
            fresh = fresh - (fresh @ self._span.mT) @ self._span
        norm = lengths(fresh)
        if self._forms.largest == 0 or norm <= resolution * self._largest:
            return False  # only rounding is outside of the span
        span = torch.cat([self._span, (fresh / norm)[None]])
        row = self._pivot(span)
        self._fill([row], range(self.columns, len(self._X)))
        self._span = span
        self.rows.append(row)
        return True

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return `Z = columns @ rows` as an orthonormal basis and its coefficients."""
        basis = self._span.mT
        return basis, torch.linalg.solve(basis[self.rows], self._Zt[:, self.rows].mT)

    def _pivot(self, span: Tensor) -> int:
        """Return the row where the newest direction is furthest from what chosen rows explain."""
        basis = span.mT
        k = len(self.rows)
        newest = basis[:, k]
        if k:
            weights = torch.linalg.solve(basis[self.rows, :k], newest[self.rows])
            newest = newest - basis[:, :k] @ weights
        newest = newest.abs()
        newest[self.rows] = 0.0
        return int(newest.argmax())

    def _fill(self, i: list[int], j: range | list[int]) -> None:
        """Measure the entries of Z in rows i and columns j."""
        if not i or not len(j):
            return
        part = torch.empty(len(j), len(i), dtype=torch.float64)
        self._forms.grid(self._deltas[i], self._X[list(j)], part)
        self._Zt[torch.tensor(list(j)).unsqueeze(1), torch.tensor(i)] = part
