"""Bilinear forms of a hidden matrix, one query each: the measurement behind every extraction.

*Provably Learning Attention with Queries*, arXiv 2601.16873, proof of Theorem 4.1. For
one head

    f([x]) = vᵀx                                     so  v_i = f([e_i]);
    f([x+δ ; x]) = vᵀx + α·vᵀδ,  α = σ(δᵀWx)         so  δᵀWx = logit((f − vᵀx) / vᵀδ).

Departures, all for precision:

- Scale. The logit multiplies errors by 1/(α(1−α)), and a tiny logit is lost in rounding. Tokens are
  scaled by `s` so that the largest |δᵀWx| seen is about 1; the first few queries find
  `s`. A query whose error bound exceeds `_PRECISION` of the largest form is repeated at
  the scale known by then. If W is of ordinary size, no query is repeated.
- Probes. If all elements of a basis have the same inner product with v, no δ is weak, but with
  orthonormal δ that product is only ‖v‖/√d. Adding v̂ to each (`δ_i = q_i + v̂`) makes
  it about ‖v‖ and leaves the smallest singular value of the basis at 1: √d times the
  signal at no cost.
- Random rotations spread the entries of a sparse W, so that one scale suits all forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import (
    Status,
    Unsuccessful,
    mismatch,
    not_applicable,
    not_identifiable,
)
from keyhole.core.float64 import EPSILON, Stream, identity, normal
from keyhole.oracle.protocol import BudgetExhausted, Oracle, ask

# a query with a larger error, relative to the largest form, is repeated
_PRECISION = 1e-12
_BATCH_BYTES = 32 << 20
_SCALES = (2.0**-60, 2.0**60)  # the least and largest s² that are tried
SOUND = 0.1  # a score known better than this shows the scale; a worse one is saturated
MAX_SCALES = 12  # scales that are tried
# share of the queries that may be repeated: this bounds the cost on any oracle
MAX_REPEATED = 0.5


def read_values(oracle: Oracle) -> Tensor:
    """Return `v_i = f([e_i])`, which is exact, from d queries of length one."""
    v = ask_scores(oracle, identity(oracle.dim)[:, None])
    if not v.any():
        raise not_identifiable("v = 0: every answer is zero, whatever W may be")
    return v


def scalar(answers: Tensor) -> Tensor:
    """Return the answers, or raise Unsuccessful unless each is one score."""
    if answers.ndim != 1:
        shape = tuple(answers.shape[1:])
        raise not_applicable(
            f"expected one score per sequence, got answers of shape {shape}"
        )
    return answers


def ask_scores(oracle: Oracle, sequences: Tensor) -> Tensor:
    """Return one score per sequence, from batches of suitable size.

    If the budget ends, the exception holds all scores that were paid for, of earlier
    batches too.
    """
    answers: list[Tensor] = []
    try:
        for _, part in in_batches(
            oracle, len(sequences), sequences.__getitem__, sequences.shape[1]
        ):
            answers.append(part)
    except BudgetExhausted as end:
        paid = torch.cat(answers) if answers else None
        raise BudgetExhausted(end.budget, paid) from end
    return torch.cat(answers)


@dataclass(frozen=True)
class Derived:
    """An oracle whose answers are computed from those of another."""

    dim: int
    answers: Callable[[Tensor], Tensor]

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.answers(sequences)


def ask_through(
    oracle: Oracle,
    sequences: Tensor,
    answer: Callable[[Tensor], Tensor],
    query: Callable[[Oracle, Tensor], Tensor] = ask,
) -> Tensor:
    """Return `answer` of the oracle's answers; if a budget ends, the exception holds it as well."""
    try:
        return answer(query(oracle, sequences))
    except BudgetExhausted as end:
        answers = None if end.answers is None else answer(end.answers)
        raise BudgetExhausted(end.budget, answers) from end


def in_batches(
    oracle: Oracle,
    count: int,
    questions: Callable[[slice], Tensor],
    length: int = 2,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of each batch of sequences with their scores, also when a budget ends."""
    size = batch_rows(length, oracle.dim)
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        try:
            answers = scalar(ask(oracle, questions(rows)))
        except BudgetExhausted as end:
            if end.answers is not None:
                yield slice(start, start + len(end.answers)), scalar(end.answers)
            raise
        yield rows, answers


def batch_rows(length: int, dim: int) -> int:
    """Return how many sequences to send at once: enough for speed, few enough for memory."""
    return max(1, min(4096, _BATCH_BYTES // (8 * length * dim)))


@dataclass(frozen=True)
class ProbeBasis:
    """The probes `δ_i = q_i + v̂`, with Q orthogonal and `Q v̂ = 1/√d`, inverted in closed form."""

    Q: Tensor
    unit_v: Tensor

    @classmethod
    def draw(cls, v: Tensor, stream: Stream) -> ProbeBasis:
        v = v / max_abs(v)
        unit_v = normalized(v)
        Q = random_orthogonal(len(v), stream)
        return cls(equalised(unit_v[None], Q)[0], unit_v)

    @property
    def deltas(self) -> Tensor:
        return self.Q + self.unit_v

    def solve(self, Z: Tensor) -> Tensor:
        """Return `Y` with `deltas @ Y = Z`, by Sherman–Morrison."""
        root = math.sqrt(len(self.unit_v))
        along_v = Z.sum(0) / (root * (1 + root))  # v̂ᵀY, since 1ᵀQ = √d·v̂ᵀ
        return self.Q.mT @ (Z - along_v)


def lengths(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row."""
    return torch.linalg.vector_norm(rows, dim=-1)


def max_abs(values: Tensor) -> float:
    return float(values.abs().max())


def indices(mask: Tensor) -> Tensor:
    """Return where a mask of one dimension is true."""
    return mask.nonzero()[:, 0]


def normalized(rows: Tensor) -> Tensor:
    """Return the rows at length one; a row of zeros stays."""
    return rows / lengths(rows).clamp(min=1e-300)[..., None]


def matvec(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return the product of each matrix with its own vector."""
    return (matrices @ vectors[..., None])[..., 0]


def equalised(g: Tensor, Q: Tensor) -> Tensor:
    """Return the orthogonal rows Q reflected so that each has the same product > 0 with g."""
    target = Q.sum(0) / math.sqrt(len(Q))
    mirror = normalized(g) - target
    square = (mirror * mirror).sum(1).clamp(min=1e-28)[:, None, None]
    return Q - (mirror @ Q.mT)[..., None] * (2 / square * mirror[:, None])


def random_units(
    count: int,
    d: int,
    stream: Stream,
) -> Tensor:
    """Return random tokens (count, d) of length one."""
    return normalized(normal(stream, count, d))


def random_orthogonal(d: int, stream: Stream) -> Tensor:
    """Return a random orthogonal d×d matrix."""
    Q, R = torch.linalg.qr(normal(stream, d, d))
    return Q * R.diagonal().sign()


@dataclass(frozen=True)
class _Queries:
    """Pairs (δ_i, x_j) by index, with their inner products with v, and what is measured of them."""

    deltas: Tensor
    xs: Tensor
    v_delta: Tensor
    v_x: Tensor
    i: Tensor
    j: Tensor
    forms: Tensor  # by number of the query
    bounds: Tensor  # on their errors

    def part(self, rows: Tensor) -> _Queries:
        return replace(self, i=self.i[rows], j=self.j[rows])

    def tokens(self, s: float) -> Tensor:
        """Return `[s(x+δ) ; sx]` for each pair."""
        tokens = self.xs.new_empty(len(self.i), 2, self.xs.shape[1])
        torch.mul(self.xs[self.j], s, out=tokens[:, 1])
        torch.add(tokens[:, 1], self.deltas[self.i], alpha=s, out=tokens[:, 0])
        return tokens

    def gates(self, answers: Tensor, s: float) -> Tensor:
        """Return `α = (f − vᵀx) / vᵀδ` for the first `len(answers)` pairs."""
        count = len(answers)
        alone = self.v_x[self.j[:count]]
        return (answers / s - alone) / self.v_delta[self.i[:count]]

    def errors(self, alpha: Tensor, square: float) -> Tensor:
        """Return the errors that rounding of the answers causes in forms at gate α and scale s²."""
        noise = EPSILON * (1 + (self.v_x[self.j] / self.v_delta[self.i]).abs())
        return noise / (alpha * (1 - alpha)).clamp(min=EPSILON**2) / square


class BilinearForms:
    """Measures `δᵀWx` for chosen δ and x through an oracle whose `v` is known.

    `headroom` is how much larger than all earlier ones a form may be without being
    measured again.
    """

    def __init__(
        self,
        oracle: Oracle,
        v: Tensor,
        headroom: float = 1.0,
    ) -> None:
        self._oracle = oracle
        self._v = v
        self._headroom = headroom
        self._square = 1.0  # s²: both tokens are scaled by s
        self.largest = 0.0  # the largest |δᵀWx| measured that is above rounding
        self._asked = 0
        self._repeated = 0

    def grid(
        self,
        deltas: Tensor,
        xs: Tensor,
        out: Tensor,
    ) -> None:
        """Write `δ_iᵀ W x_j` to `out[j, i]`. If the budget ends, `out` holds what was answered."""
        index = torch.arange(out.numel())
        i = index % len(deltas)
        j = index // len(deltas)
        self._measure(deltas, xs, i, j, out.view(-1))

    def pairs(self, deltas: Tensor, xs: Tensor) -> Tensor:
        """Return `δ_kᵀ W x_k` for each k."""
        index = torch.arange(len(xs))
        out = xs.new_empty(len(xs))
        self._measure(deltas, xs, index, index, out)
        return out

    def _measure(
        self,
        deltas: Tensor,
        xs: Tensor,
        i: Tensor,
        j: Tensor,
        out: Tensor,
    ) -> None:
        """Measure the forms of pairs (δ_i, x_j); repeat those whose scale was unsuitable."""
        v_delta = deltas @ self._v
        v_x = xs @ self._v
        queries = _Queries(deltas, xs, v_delta, v_x, i, j, out, torch.zeros_like(out))
        rows = batch_rows(2, deltas.shape[1])
        start = 0 if self._asked else self._scout(queries)
        done = 0
        while done < len(i):
            stop = min(start + rows, len(i))
            if start < stop:
                self._ask(queries, torch.arange(start, stop))
            self._repeat(queries, torch.arange(done, stop))
            start = done = stop

    def _scout(self, queries: _Queries) -> int:
        """Find the scale with one query, then four more; return how many are answered."""
        first = torch.arange(min(5, len(queries.i)))
        for rows in (first[:1], first[1:]):
            for _ in range(MAX_SCALES):
                if not len(rows):
                    break
                square = self._square
                self._ask(queries, rows)
                rows = rows[queries.bounds[rows] * square > SOUND]
            else:
                raise Unsuccessful(
                    Status.SATURATED, "attention is 0 or 1 however small the inputs are"
                )
        return len(first)

    def _ask(self, queries: _Queries, rows: Tensor) -> None:
        """Send one batch at the current scale, then adapt the scale to its answers."""
        square = self._square
        s = math.sqrt(square)
        part = queries.part(rows)
        try:
            answers = scalar(ask(self._oracle, part.tokens(s)))
        except BudgetExhausted as end:
            if end.answers is not None:
                alpha = part.gates(end.answers, s)
                queries.forms[rows[: len(alpha)]] = _logit(alpha) / square
            raise
        self._asked += len(answers)
        alpha = part.gates(answers, s)
        if (alpha - 0.5).abs().min() > 1.0:
            raise mismatch("the answers leave the range that a single head allows")
        forms = _logit(alpha) / square
        bounds = part.errors(alpha, square)
        queries.forms[rows] = forms
        queries.bounds[rows] = bounds
        self._rescale(forms, bounds, square)

    def _repeat(self, queries: _Queries, rows: Tensor) -> None:
        """Measure again what was measured at a scale that proved unsuitable."""
        for _ in range(MAX_SCALES):
            rows = rows[queries.bounds[rows] > _PRECISION * self.largest]
            if not len(rows):
                return
            # The gate at another scale; a form that is not above rounding may be zero.
            forms = queries.forms[rows]
            bounds = queries.bounds[rows]
            clear = torch.where(_clear(forms, bounds), forms, 0.0)
            alpha = torch.sigmoid(clear * self._square)
            rows = rows[queries.part(rows).errors(alpha, self._square) < bounds / 2]
            if not 0 < len(rows) <= 16 + MAX_REPEATED * self._asked - self._repeated:
                return
            self._repeated += len(rows)
            self._ask(queries, rows)

    def _rescale(
        self,
        forms: Tensor,
        errors: Tensor,
        square: float,
    ) -> None:
        """Choose s² so that the largest form is about 1, unless it is near enough already."""
        sound = errors * square <= SOUND
        clear = forms[sound & _clear(forms, errors)]
        if len(clear):
            self.largest = max(self.largest, max_abs(clear))
        # The first few forms may be far below the largest: leave headroom above them.
        headroom = self._headroom
        if self._asked <= 5:
            headroom = max(headroom, 16 if self._asked == 1 else 4)
        fitting = 1 / (headroom * self.largest) if self.largest else math.inf
        if not sound.all():
            # Saturated forms do not show by how much s is too large.
            wanted = min(square / 64, fitting)
        elif 0.25 < square / fitting < 4 * headroom:
            return
        else:
            wanted = min(square * 2.0**20, fitting)
        self._square = power_of_four(wanted, *_SCALES)


def power_of_four(
    wanted: float,
    least: float,
    most: float,
) -> float:
    """Return the power of four nearest to a square of scales, between `least` and `most`."""
    return 4.0 ** round(math.log(min(max(wanted, least), most), 4))


def _clear(forms: Tensor, errors: Tensor) -> Tensor:
    """Return which forms are above rounding."""
    return forms.abs() > 8 * errors


def _logit(alpha: Tensor) -> Tensor:
    return torch.logit(alpha, eps=EPSILON)
