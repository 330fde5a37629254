"""The equations of one problem in ball arithmetic: every number a midpoint with a rigorous radius.

    r(X) = Σ_h A_h X V_h (+ X) − B        J(box) ∋ dr/dX at every X of the box X̂ ± ρ

Weights, outputs and X̂ are float64 and enter exactly; each operation of Arb (python-flint) then
encloses the true value, so that nothing that float64 would have rounded is lost. J is the formula
of equations.py with balls in the place of numbers, not a linearisation of it.

Where the plain replacement would be wide, an equal form that is narrower takes its place. The
scores differ from those at X̂ by `e_iᵀWx̂_j + (Wᵀx̂_i + u)ᵀe_j + e_iᵀWe_j` with |e| ≤ ρ, which is
bounded entry by entry; and `A_ij = 1/(1 + Σ_{k≠j} e^{S_ik}/e^{S_ij})` holds each score once.

The equations may be mixed, `r(X) M` with an m×m matrix M: with M ≈ V⁻¹ the values become the tokens
themselves, and what an ill-conditioned V would add to every bound is gone, so wider boxes pass the
test. The solutions are the same unless M is singular, and then every J is, so no certificate can
come of it.

All methods work at the precision of the caller (`precision`).
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keyhole.core.errors import MissingExtra
from keyhole.invert.problem import Problem

if TYPE_CHECKING:
    from flint import arb, arb_mat

Rows = list[list["arb"]]


def flint() -> Any:
    try:
        return importlib.import_module("flint")  # by name: it is an extra
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            "certificates need python-flint, which is not installed", "proofs"
        ) from missing


@contextmanager
def precision(bits: int) -> Generator[None]:
    """Arb's working precision, put back afterwards: it is one setting for the whole process."""
    with flint().ctx.workprec(bits):
        yield


def exact(matrix: Tensor) -> arb_mat:
    """A float64 matrix (or vector, as a column) without any rounding."""
    rows = matrix.unsqueeze(-1) if matrix.ndim == 1 else matrix
    return flint().arb_mat(*rows.shape, rows.flatten().tolist())


def upward(number: arb) -> float:
    """A float64 that is no smaller than any number of the ball; infinity where there is none."""
    bound = float(number.upper())
    return math.inf if math.isnan(bound) else math.nextafter(bound, math.inf)


def magnitudes(matrix: arb_mat) -> arb_mat:
    """Entry by entry, an upper bound of |·|."""
    entries = [entry.abs_upper() for entry in matrix.entries()]
    return flint().arb_mat(matrix.nrows(), matrix.ncols(), entries)


def row_sums(matrix: arb_mat) -> arb_mat:
    """`Σ_j |M_ij|` as a column, bounded from above."""
    ones = [1] * matrix.ncols()
    return magnitudes(matrix) * flint().arb_mat(matrix.ncols(), 1, ones)


@dataclass(frozen=True, eq=False)
class Balls:
    """One problem, its numbers exact, V and B times M = `mix`.

    `free` says which entries of X (row by row) are unknown.
    """

    W: list[arb_mat]
    V: list[arb_mat]
    B: arb_mat
    mix: arb_mat
    key_bias: list[arb_mat] | None
    free: list[list[bool]]
    causal: bool
    residual: bool

    @classmethod
    def of(cls, problem: Problem, mix: Tensor | None = None) -> Balls:
        M = exact(torch.eye(problem.outputs) if mix is None else mix)
        W, V = (
            [exact(t) for t in (weights if weights.ndim == 3 else weights.unsqueeze(0))]
            for weights in (problem.W, problem.V)
        )
        B, u = exact(problem.B), problem.key_bias
        if problem.output_bias is not None:
            B = B - _on_every_row(exact(problem.output_bias).transpose(), problem.length)
        biases = None
        if u is not None:
            biases = [exact(bias).transpose() for bias in u.reshape(len(W), -1)]
        free = unknown(problem).tolist()
        V = [values * M for values in V]
        return cls(W, V, B * M, M, biases, free, problem.causal, problem.residual)

    def residuals(self, X: arb_mat) -> arb_mat:
        """`(attention(X) − B) M` as a column of n·m balls."""
        out = -self.B
        for h, V in enumerate(self.V):
            queries = self._queries(X, h)
            out = out + self._maps(queries * X.transpose()) * (X * V)
        out = out + X * self.mix if self.residual else out
        return flint().arb_mat(out.nrows() * out.ncols(), 1, out.entries())

    def jacobian(self, X: arb_mat, radius: float) -> arb_mat:
        """J(box) for the box X ± radius in the unknown entries: n·m rows, a column per unknown."""
        make = flint().arb_mat
        n, d, m = X.nrows(), X.ncols(), self.B.ncols()
        widths = make(n, d, [radius if free else 0.0 for row in self.free for free in row])
        box = _widened(X, widths)
        heads = [self._head(X, widths, box, h) for h in range(len(self.W))]
        across = make(len(heads), m * d, [v for V in self.V for v in V.transpose().entries()])
        keys = make([row for head in heads for row in head.keys.tolist()])
        J: Rows = []
        for i in range(n):
            C = [head.C[i] for head in heads]  # H, n·m
            own = make(m, len(C) * n, [c[j * m + a] for a in range(m) for c in C for j in range(n)])
            own = (own * keys).entries()
            # C_il q_iᵀ + A_il Vᵀ, for every token l; heads are the inner dimension
            moved = make(C).transpose() * make([head.queries[i] for head in heads])
            mixed = make([head.A[i] for head in heads]).transpose() * across
            blocks = [x + y for x, y in zip(moved.entries(), mixed.entries(), strict=True)]
            J += self._rows(i, blocks, own, d)
        return make(J)

    def _rows(self, i: int, blocks: list[arb], own: list[arb], d: int) -> Rows:
        """The m rows of J that belong to token i, without the columns of known entries."""
        m = self.B.ncols()
        for a, b in itertools.product(range(m), range(d)):
            bypass = self.mix[b, a] if self.residual else 0
            blocks[(i * m + a) * d + b] += own[a * d + b] + bypass
        return [
            [
                blocks[(token * m + a) * d + b]
                for token, row in enumerate(self.free)
                for b, free in enumerate(row)
                if free
            ]
            for a in range(m)
        ]

    def _head(self, X: arb_mat, widths: arb_mat, box: arb_mat, h: int) -> _Head:
        W = self.W[h]
        at, keys_at = self._queries(X, h), X * W.transpose()
        scores = at * X.transpose()
        spread = widths * magnitudes(keys_at).transpose()
        spread = spread + magnitudes(at) * widths.transpose()
        spread = spread + widths * magnitudes(W) * widths.transpose()
        A = self._maps(_widened(scores, spread))
        H = box * self.V[h]
        values, outputs = H.tolist(), (A * H).tolist()
        C = [
            [p * (v - o) for p, value in zip(row, values, strict=True)
             for v, o in zip(value, output, strict=True)]
            for row, output in zip(A.tolist(), outputs, strict=True)
        ]  # fmt: skip
        queries = self._queries(box, h)
        return _Head(A.tolist(), C, queries.tolist(), box * W.transpose())

    def _queries(self, X: arb_mat, h: int) -> arb_mat:
        """`Wᵀx_i + u`, row by row."""
        queries = X * self.W[h]
        if self.key_bias is None:
            return queries
        return queries + _on_every_row(self.key_bias[h], X.nrows())

    def _maps(self, scores: arb_mat) -> arb_mat:
        rows: Rows = []
        for i, row in enumerate(scores.tolist()):
            seen = row[: i + 1] if self.causal else row
            rows.append(_softmax(seen) + [flint().arb(0)] * (len(row) - len(seen)))
        return flint().arb_mat(rows)


@dataclass(frozen=True, eq=False)
class _Head:
    """What J is made of: A (n×n), `C_ij = A_ij (h_j − o_i)` (row i: n·m), queries and keys."""

    A: Rows
    C: Rows
    queries: Rows
    keys: arb_mat


def unknown(problem: Problem) -> Tensor:
    """True where an entry of X is to be found: (n, d)."""
    if problem.known is None:
        return problem.B.new_ones(problem.length, problem.dim).bool()
    return problem.known.isnan()


def _softmax(scores: list[arb]) -> list[arb]:
    # Any exact shift will do, as long as nothing overflows.
    peak = max(scores, key=lambda s: float(s.mid())).mid()
    powers = [(score - peak).exp() for score in scores]
    nothing = flint().arb(0)
    before = list(itertools.accumulate(powers[:-1], initial=nothing))
    after = list(itertools.accumulate(powers[:0:-1], initial=nothing))[::-1]
    return [1 / (1 + (b + a) / p) for p, b, a in zip(powers, before, after, strict=True)]


def _widened(centres: arb_mat, widths: arb_mat) -> arb_mat:
    """Balls around balls: every number within `widths` of every number of `centres`."""
    ball = flint().arb
    entries = [
        centre + ball(0, width)
        for centre, width in zip(centres.entries(), widths.entries(), strict=True)
    ]
    return flint().arb_mat(centres.nrows(), centres.ncols(), entries)


def _on_every_row(row: arb_mat, n: int) -> arb_mat:
    return flint().arb_mat([row.entries()] * n)
