"""The paper's own route to low rank: random rank-one measurements and a convex program.

Theorem 5.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873), after Cai and Zhang
(2015): for Gaussian pairs (δ_k, x_k), k = 1 … m with m = O(rd),

    W = argmin ‖Z‖_*   subject to   δ_kᵀ Z x_k = logit((f([x_k+δ_k ; x_k]) − vᵀx_k) / vᵀδ_k).

Kept as the baseline for low_rank.py, which needs fewer queries and no program. Departures: pairs
are normalised (the logit's scale is adapted anyway), and pairs with |vᵀδ| tiny are drawn again.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.errors import InputError, MissingExtra
from keyhole.extract.bilinear import BilinearForms, read_values
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Step, settle
from keyhole.extract.low_rank import expect_rank, unknowns
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import Oracle
from keyhole.results import Status, Unsuccessful


@dataclass(frozen=True)
class NuclearNorm:
    """Low-rank extraction as in the paper: `oversampling · rank · d` random measurements."""

    rank: int
    oversampling: float = 5.0
    seed: int = 0
    tolerance: float = 1e-6
    solver: str = "CLARABEL"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"expected a rank of 1 or more, got {self.rank}")
        if not self.oversampling > 0:
            raise InputError(f"expected a positive oversampling, got {self.oversampling}")

    def __call__(self, oracle: Oracle) -> Extraction:
        _cvxpy()  # before anything is paid for
        expect_rank(self.rank, oracle.dim)
        return settle(self, oracle)

    def expected(self, dim: int) -> int:
        expect_rank(self.rank, dim)
        return dim + self._measurements(dim)

    def _measurements(self, dim: int) -> int:
        return math.ceil(self.oversampling * self.rank * dim)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        floor = unknowns(d, self.rank)
        v = read_values(oracle)
        yield Step(Head(torch.zeros(d, d, dtype=torch.float64), v), known=d, floor=floor)
        deltas, xs = self._draw(v, self._measurements(d))
        y = BilinearForms(oracle, v).pairs(deltas, xs)
        yield Step(Head(self._program(deltas, xs, y), v), known=floor, floor=floor)

    def _draw(self, v: Tensor, m: int) -> tuple[Tensor, Tensor]:
        stream = torch.Generator().manual_seed(self.seed)

        def unit(count: int) -> Tensor:
            raw = torch.randn(count, len(v), generator=stream, dtype=torch.float64)
            return raw / torch.linalg.vector_norm(raw, dim=1, keepdim=True)

        deltas = unit(2 * m)
        # The better half by |vᵀδ|, with the sign that makes it positive: both leave W's forms as
        # random as they were and keep the logit's denominator away from zero.
        signal = deltas @ v
        best = signal.abs().argsort(descending=True)[:m]
        return deltas[best] * signal[best].sign().unsqueeze(1), unit(m)

    def _program(self, deltas: Tensor, xs: Tensor, y: Tensor) -> Tensor:
        cp = _cvxpy()
        d = deltas.shape[1]
        rows = torch.einsum("ki,kj->kij", deltas, xs).reshape(len(y), d * d)
        scale = float(y.abs().max()) or 1.0  # solvers stop on absolute residuals
        Z = cp.Variable((d, d))
        fits = rows.numpy() @ cp.vec(Z, order="C") == (y / scale).numpy()
        problem = cp.Problem(cp.Minimize(cp.normNuc(Z)), [fits])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the judge finds out how inaccurate
                problem.solve(solver=self.solver)
        except cp.error.SolverError as error:
            raise Unsuccessful(Status.MISMATCH, f"the convex program failed: {error}") from error
        if Z.value is None:
            raise Unsuccessful(Status.MISMATCH, f"the convex program is {problem.status}")
        return scale * torch.as_tensor(Z.value, dtype=torch.float64)


def _cvxpy() -> Any:
    try:
        return importlib.import_module("cvxpy")  # by name: it is an extra, and carries no types
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            "expected CVXPY for NuclearNorm, got none: pip install 'keyhole[convex]'"
        ) from missing
