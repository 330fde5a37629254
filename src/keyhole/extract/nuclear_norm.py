"""One head of low rank as published: random rank-one measurements and a convex program.

Theorem 5.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873), after Cai
and Zhang (2015): for Gaussian pairs (δ_k, x_k), k = 1 … m with m = O(rd),

    W = argmin ‖Z‖_*   subject to   δ_kᵀ Z x_k = logit((f([x_k+δ_k ; x_k]) − vᵀx_k) / vᵀδ_k).

This is the theorem as published: δ_k and x_k are independent standard Gaussian vectors,
none is rotated, chosen or drawn again (Theorem A.2 is about such pairs only), and every
pair is one measurement. It is the baseline for low_rank.py, which needs fewer queries
and no convex program.

There is one numerical departure. A form of Gaussian pairs has the size of ‖W‖_F, where
logits have few digits left or none, so a pair is sent as (sδ_k, sx_k), and its form
divided by s². The first few pairs find s, and a pair whose s proves unsuitable is sent
again: this takes a few queries more than `expected_queries`. A pair with a small vᵀδ
keeps fewer digits; almost surely none is 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keyhole.core import mismatch
from keyhole.core.errors import expect_count, expect_number, optional
from keyhole.core.float64 import normal, random_stream, zeros
from keyhole.extract.bilinear import BilinearForms, max_abs, read_values
from keyhole.extract.extraction import Extraction, Step, setting
from keyhole.extract.judge import Method
from keyhole.extract.low_rank import degrees_of_freedom, expect_rank
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import Oracle


@dataclass(frozen=True)
class NuclearNorm(Method):
    """Low-rank extraction as in the paper: `oversampling · rank · d` random measurements."""

    rank: int = field(metadata={"help": "rank of W"})
    oversampling: float = setting(6.0, "measurements for each of the rank·d unknowns")
    seed: int = 0
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        expect_count("rank", self.rank)
        expect_number("oversampling", self.oversampling, above=0)

    def __call__(self, oracle: Oracle) -> Extraction:
        expect_rank(self.rank, oracle.dim)
        _cvxpy()  # before anything is paid for
        return super().__call__(oracle)

    def expected_queries(self, dim: int) -> int:
        expect_rank(self.rank, dim)
        return dim + self._measurements(dim)

    def _measurements(self, dim: int) -> int:
        return math.ceil(self.oversampling * self.rank * dim)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        unknowns = degrees_of_freedom(d, self.rank)
        v = read_values(oracle)
        yield Step(Head(zeros(d, d), v), known=d, unknowns=unknowns)
        count = self._measurements(d)
        stream = random_stream(self.seed)
        deltas, xs = normal(stream, 2, count, d)
        y = BilinearForms(oracle, v).pairs(deltas, xs)
        W = self._program(deltas, xs, y)
        yield Step(Head(W, v), known=min(unknowns, d + count), unknowns=unknowns)

    def _program(
        self,
        deltas: Tensor,
        xs: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Solve the convex program for W."""
        cp = _cvxpy()
        d = deltas.shape[1]
        # Divide each equation by ‖δ‖‖x‖, since solvers stop at absolute residuals.
        lengths = [
            torch.linalg.vector_norm(t, dim=1, keepdim=True) for t in (deltas, xs)
        ]
        deltas = deltas / lengths[0]
        xs = xs / lengths[1]
        y = y / (lengths[0] * lengths[1])[:, 0]
        rows = torch.einsum("ki,kj->kij", deltas, xs).reshape(len(y), d * d)
        scale = max_abs(y) or 1.0
        Z = cp.Variable((d, d))
        fits = rows.numpy() @ cp.vec(Z, order="C") == (y / scale).numpy()
        problem = cp.Problem(cp.Minimize(cp.normNuc(Z)), [fits])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # the judge measures the error
                problem.solve(solver="CLARABEL")
        except cp.error.SolverError as error:
            raise mismatch(f"the convex program failed: {error}") from error
        if Z.value is None:
            raise mismatch(f"the convex program is {problem.status}")
        return scale * torch.as_tensor(Z.value, dtype=torch.float64)


def _cvxpy() -> Any:
    return optional(
        "cvxpy", "NuclearNorm needs CVXPY, which is not installed", "convex"
    )
