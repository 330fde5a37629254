"""Bilinear forms of a hidden matrix, one query each: the measurement every extraction rests on.

*Provably Learning Attention with Queries*, arXiv 2601.16873, proof of Theorem 4.1. For one head

    f([x]) = vᵀx                                     so  v_i = f([e_i]);
    f([x+δ ; x]) = vᵀx + α·vᵀδ,  α = σ(δᵀWx)         so  δᵀWx = logit((f − vᵀx) / vᵀδ).

Departures, all for precision:

- Scale. The logit magnifies errors by 1/(α(1−α)), and a tiny one drowns in rounding. Tokens are
  scaled by `s` so that the largest |δᵀWx| seen comes out near 1; the first few queries find `s`.
  An answer whose error bound exceeds `_PRECISION` of the largest entry is asked again at the
  scale known by then. That costs nothing when W is of ordinary size.
- Probes. A basis whose elements all have the same inner product with v makes no δ weak, yet with
  orthonormal δ that product is only ‖v‖/√d. Adding v̂ to each (`δ_i = q_i + v̂`) makes it about
  ‖v‖ and leaves the smallest singular value of the basis at 1: √d times the signal for nothing.
- Random rotations spread a spiky W, so that one scale suits every entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.oracle.protocol import BudgetExhausted, Oracle, ask

_PRECISION = 1e-12  # an answer worse than this, relative to the largest entry, is asked again
_EPSILON = torch.finfo(torch.float64).eps
_BATCH_BYTES = 32 << 20
_SCALES = (2.0**-60, 2.0**60)  # of s², where the search for a scale ends
_SOUND = 0.1  # a logit known better than this tells the scale; a worse one is saturated
_TRIES = 12
_SPARE = 0.5  # bounds what is asked again, as a share of all: an oracle may be anything


def read_values(oracle: Oracle) -> Tensor:
    """`v_i = f([e_i])`: d queries of length one, exact."""
    v = ask_scores(oracle, torch.eye(oracle.dim, dtype=torch.float64).unsqueeze(1))
    if not bool(v.any()):
        raise Unsuccessful(
            Status.NOT_IDENTIFIABLE, "v = 0: every answer is zero, whatever W may be"
        )
    return v


def scalar(answers: Tensor) -> Tensor:
    if answers.ndim != 1:
        shape = tuple(answers.shape[1:])
        raise Unsuccessful(
            Status.NOT_APPLICABLE, f"expected one score per sequence, got answers of shape {shape}"
        )
    return answers


def ask_scores(oracle: Oracle, sequences: Tensor) -> Tensor:
    """One score per sequence, in batches of a good size.

    If the budget ends, the exception holds all scores that were paid for, of earlier batches too.
    """
    answers: list[Tensor] = []
    try:
        for part in sequences.split(batch_rows(*sequences.shape[1:])):
            answers.append(scalar(ask(oracle, part)))
    except BudgetExhausted as end:
        answers += [] if end.answers is None else [scalar(end.answers)]
        raise BudgetExhausted(end.budget, torch.cat(answers) if answers else None) from end
    return torch.cat(answers)


def ask_through(
    oracle: Oracle,
    sequences: Tensor,
    answer: Callable[[Tensor], Tensor],
    put: Callable[[Oracle, Tensor], Tensor] = ask,
) -> Tensor:
    """`answer` of the oracle's answers, also of those that were paid for when a budget ended."""
    try:
        return answer(put(oracle, sequences))
    except BudgetExhausted as end:
        answers = None if end.answers is None else answer(end.answers)
        raise BudgetExhausted(end.budget, answers) from end


def in_batches(
    oracle: Oracle, count: int, questions: Callable[[slice], Tensor]
) -> Iterator[tuple[slice, Tensor]]:
    """Scores of pairs of tokens by batch; if the budget ends, those that were paid for as well."""
    size = batch_rows(2, oracle.dim)
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
    """How many sequences to send at once: enough for matrix speed, small in memory."""
    return max(1, min(4096, _BATCH_BYTES // (8 * length * dim)))


@dataclass(frozen=True)
class ProbeBasis:
    """`δ_i = q_i + v̂` with Q orthogonal and `Q v̂ = 1/√d`, and its inverse in closed form."""

    Q: Tensor
    unit_v: Tensor

    @classmethod
    def draw(cls, v: Tensor, stream: torch.Generator) -> ProbeBasis:
        v = v / v.abs().max()
        unit_v = v / torch.linalg.vector_norm(v)
        return cls(equalised(unit_v[None], random_orthogonal(len(v), stream))[0], unit_v)

    @property
    def deltas(self) -> Tensor:
        return self.Q + self.unit_v

    def solve(self, Z: Tensor) -> Tensor:
        """`Y` with `deltas @ Y = Z`, by Sherman–Morrison."""
        root = math.sqrt(len(self.unit_v))
        along_v = Z.sum(0) / (root * (1 + root))  # v̂ᵀY, since 1ᵀQ = √d·v̂ᵀ
        return self.Q.mT @ (Z - along_v)


def lengths(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1)


def equalised(g: Tensor, Q: Tensor) -> Tensor:
    """The orthogonal rows Q turned so that all have the same positive product with g (R, d)."""
    target = Q.sum(0) / math.sqrt(len(Q))
    mirror = g / lengths(g).unsqueeze(1) - target
    square = (mirror * mirror).sum(1).clamp(min=1e-28)[:, None, None]
    return Q - (mirror @ Q.mT).unsqueeze(2) * (2 / square * mirror.unsqueeze(1))


def random_units(count: int, d: int, stream: torch.Generator) -> Tensor:
    """Random tokens (count, d) of length one."""
    raw = torch.randn(count, d, generator=stream, dtype=torch.float64)
    return raw / torch.linalg.vector_norm(raw, dim=1, keepdim=True)


def random_orthogonal(d: int, stream: torch.Generator) -> Tensor:
    Q, R = torch.linalg.qr(torch.randn(d, d, generator=stream, dtype=torch.float64))
    return Q * R.diagonal().sign()


@dataclass(frozen=True)
class _Questions:
    """Pairs (δ, x) by index into two lists, with their inner products with v."""

    deltas: Tensor
    xs: Tensor
    v_delta: Tensor
    v_x: Tensor
    i: Tensor
    j: Tensor

    def part(self, rows: Tensor) -> _Questions:
        return replace(self, i=self.i[rows], j=self.j[rows])

    def tokens(self, s: float) -> Tensor:
        """`[s(x+δ) ; sx]` for each pair."""
        tokens = torch.empty(len(self.i), 2, self.xs.shape[1], dtype=torch.float64)
        torch.mul(self.xs[self.j], s, out=tokens[:, 1])
        torch.add(tokens[:, 1], self.deltas[self.i], alpha=s, out=tokens[:, 0])
        return tokens

    def gates(self, answers: Tensor, s: float) -> Tensor:
        """`α = (f − vᵀx) / vᵀδ` for the first `len(answers)` pairs."""
        i, j = self.i[: len(answers)], self.j[: len(answers)]
        return (answers / s - self.v_x[j]) / self.v_delta[i]

    def errors(self, alpha: Tensor, square: float) -> Tensor:
        """What rounding of an answer does to a form that was measured at gate α and scale s²."""
        noise = _EPSILON * (1 + (self.v_x[self.j] / self.v_delta[self.i]).abs())
        return noise / (alpha * (1 - alpha)).clamp(min=_EPSILON**2) / square


@dataclass(frozen=True)
class _Record:
    """The forms measured so far and bounds on their errors, by number of the question."""

    forms: Tensor
    errors: Tensor


class BilinearForms:
    """Measures `δᵀWx` for chosen δ and x through an oracle whose `v` is known.

    `headroom` is how much larger than all before a form may turn out to be without a second query.
    """

    def __init__(self, oracle: Oracle, v: Tensor, headroom: float = 1.0) -> None:
        self._oracle = oracle
        self._v = v
        self._headroom = headroom
        self._square = 1.0  # s²: both tokens are scaled by s
        self.largest = 0.0  # the largest |δᵀWx| seen that stands out of rounding
        self._asked = 0
        self._again = 0

    def grid(self, deltas: Tensor, xs: Tensor, out: Tensor) -> None:
        """`out[j, i] = δ_iᵀ W x_j`. If the budget ends, what was answered is in `out`."""
        index = torch.arange(len(deltas) * len(xs))
        self._measure(deltas, xs, index % len(deltas), index // len(deltas), out.view(-1))

    def pairs(self, deltas: Tensor, xs: Tensor) -> Tensor:
        """`δ_kᵀ W x_k` for each k."""
        index = torch.arange(len(xs))
        out = torch.empty(len(xs), dtype=torch.float64)
        self._measure(deltas, xs, index, index, out)
        return out

    def _measure(self, deltas: Tensor, xs: Tensor, i: Tensor, j: Tensor, out: Tensor) -> None:
        questions = _Questions(deltas, xs, deltas @ self._v, xs @ self._v, i, j)
        record = _Record(out, torch.zeros_like(out))
        rows = batch_rows(2, deltas.shape[1])
        start = 0 if self._asked else self._scout(questions, record)
        done = 0
        while done < len(i):
            stop = min(start + rows, len(i))
            if start < stop:
                self._ask(questions, torch.arange(start, stop), record)
            self._ask_again(questions, torch.arange(done, stop), record)
            start = done = stop

    def _scout(self, questions: _Questions, record: _Record) -> int:
        """Settle the scale with one question, then four more; returns how many are answered."""
        count = len(questions.i)
        for rows in (torch.arange(min(1, count)), torch.arange(1, min(5, count))):
            for _ in range(_TRIES):
                if not len(rows):
                    break
                square = self._square
                self._ask(questions, rows, record)
                rows = rows[record.errors[rows] * square > _SOUND]
            else:
                raise Unsuccessful(
                    Status.SATURATED, "attention is 0 or 1 however small the inputs are"
                )
        return min(5, count)

    def _ask(self, questions: _Questions, rows: Tensor, record: _Record) -> None:
        """One batch at the present scale; then the scale is adapted to what came back."""
        square, s = self._square, math.sqrt(self._square)
        part = questions.part(rows)
        try:
            answers = scalar(ask(self._oracle, part.tokens(s)))
        except BudgetExhausted as end:
            if end.answers is not None:
                alpha = part.gates(end.answers, s)
                record.forms[rows[: len(alpha)]] = _logit(alpha) / square
            raise
        self._asked += len(answers)
        alpha = part.gates(answers, s)
        if bool((alpha - 0.5).abs().min() > 1.0):
            raise Unsuccessful(
                Status.MISMATCH, "the answers leave the range that a single head allows"
            )
        record.forms[rows] = _logit(alpha) / square
        record.errors[rows] = part.errors(alpha, square)
        self._rescale(record.forms[rows], record.errors[rows], square)

    def _ask_again(self, questions: _Questions, rows: Tensor, record: _Record) -> None:
        """Repeat what was measured at a scale that has turned out to be a bad one."""
        for _ in range(_TRIES):
            rows = rows[record.errors[rows] > _PRECISION * self.largest]
            if not len(rows):
                return
            part = questions.part(rows)
            # A form that does not stand out of rounding may be zero: its digits say nothing
            # about the gate at another scale.
            forms, errors = record.forms[rows], record.errors[rows]
            seen = torch.where(_clear(forms, errors), forms, 0.0)
            alpha = torch.sigmoid(seen * self._square)
            rows = rows[part.errors(alpha, self._square) < record.errors[rows] / 2]
            if not 0 < len(rows) <= 16 + _SPARE * self._asked - self._again:
                return
            self._again += len(rows)
            self._ask(questions, rows, record)

    def _rescale(self, forms: Tensor, errors: Tensor, square: float) -> None:
        """Choose s² so that the largest form comes out near 1; leave it if it is near enough."""
        sound = errors * square <= _SOUND
        clear = forms[sound & _clear(forms, errors)]
        if len(clear):
            self.largest = max(self.largest, float(clear.abs().max()))
        # The first answers are a poor guess at the largest: leave headroom above them.
        headroom = max(self._headroom, 16 if self._asked == 1 else 4 if self._asked <= 5 else 1)
        fitting = 1 / (headroom * self.largest) if self.largest else math.inf
        if not bool(sound.all()):  # some are saturated: how far, nobody can tell
            wanted = min(square / 64, fitting)
        elif 0.25 < square / fitting < 4 * headroom:
            return
        else:
            wanted = min(square * 2.0**20, fitting)
        low, high = _SCALES
        self._square = 4.0 ** round(math.log(min(max(wanted, low), high), 4))


def _clear(forms: Tensor, errors: Tensor) -> Tensor:
    """Which forms stand out of rounding."""
    return forms.abs() > 8 * errors


def _logit(alpha: Tensor) -> Tensor:
    return torch.logit(alpha, eps=_EPSILON)
