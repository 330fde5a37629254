"""One or several heads from inexact answers, by least squares on random queries (ours).

The exact methods solve for one number at a time at scales where everything else vanishes; answers
in half precision, or behind a sigmoid, do not reach that far. Here all weights are fitted at once,
to N = `oversampling`·H(d² + d) answers to random sequences of ordinary size,

    min_{W, v}  Σ_k (f(X_k) − a_k)² / σ_k²,    f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_N)·v_hᵀx_i,

by Levenberg–Marquardt from several starts, with the Jacobian in closed form: for A = softmax and
g_i = A_i (vᵀx_i − f), ∂f/∂W = (Σ_i g_i x_i) x_Nᵀ and ∂f/∂v = Σ_i A_i x_i. σ_k is what rounding
does to an answer. H is the smallest number of heads that explains the answers within it; that no
fewer do, and that fresh questions agree, is the evidence. It takes a few times as many queries as
there are unknowns, and suits up to a few hundred of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import expect_count, expect_number
from keyhole.core.numerics import LinAlgError, least_squares
from keyhole.extract.bilinear import ask_scores
from keyhole.extract.domain import CHANGED
from keyhole.extract.extraction import Step, setting
from keyhole.extract.gauss_newton import levenberg
from keyhole.extract.judge import NEARLY, Exam, Method
from keyhole.extract.single_head import SingleHead
from keyhole.oracle.planted import Head, MultiHead
from keyhole.oracle.protocol import Oracle, OracleError

_EPSILON = torch.finfo(torch.float64).eps
_LENGTHS = (1, 2, 3, 4)  # of the questions, in turn
_SQUARES = 4.0 ** torch.arange(-6, 7, dtype=torch.float64)  # s² that are looked at for a scale
_PAIRS = 8  # that are looked at for a scale
_OPEN = 0.2  # |α − ½| of gates that are half open
_EXPLAINED = 2.0  # root mean square of the residuals in units of σ
_FINE = 1e-6  # errors of answers with which weak attention is still seen clearly
_STEPS = 120
_UNKNOWNS = 400  # of all heads, up to which their number is looked for
_STALLED = 12  # steps within which a start has to gain a tenth


@dataclass(frozen=True)
class Fitted(Method):
    """All weights at once from inexact answers."""

    heads: int | None = setting(None, "how many there are, if that is known")
    answer_error: float = setting(0.0, "how far an answer may be off")
    precision: float = setting(_EPSILON, "relative error of an answer")
    most: int = setting(6, "heads that are tried, where their number is not known")
    oversampling: float = setting(4.0, "questions for each unknown")
    starts: int = setting(8, "random starts of each fit")
    seed: int = 0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("most", "starts", "heads"):
            expect_count(name, getattr(self, name))
        expect_number("answer_error", self.answer_error, least=0)
        expect_number("precision", self.precision, above=0)
        expect_number("oversampling", self.oversampling, above=1)

    @property
    def accepted(self) -> float:
        return max(self.tolerance, 4 * self.precision)

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        return replace(Exam.draw(oracle, self.seed), excused=max(NEARLY, 16 * self.precision))

    def expected_queries(self, dim: int) -> int | None:
        return None if self.heads is None else self._count(self.heads, dim)

    def _count(self, heads: int, dim: int) -> int:
        return math.ceil(self.oversampling * heads * (dim * dim + dim))

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = torch.Generator().manual_seed(self.seed)
        scale = _scale(oracle, stream)
        if max(self.precision, self.answer_error) <= _FINE:
            scale /= 2  # softer attention has fewer false minima, and digits enough are left
        answered = _Answers(oracle, stream, scale)
        unknowns = oracle.dim**2 + oracle.dim
        most = max(1, min(self.most, _UNKNOWNS // unknowns))
        counts = range(1, most + 1) if self.heads is None else (self.heads,)
        miss = math.inf
        for count in counts:
            answered.extend(self._count(count, oracle.dim))
            if count == counts[0]:
                self._expect_linear(answered)
            first = _solved(oracle, self.seed) if count == 1 else None
            W, v, miss = self._fit(answered, count, stream, first)
            if miss <= _EXPLAINED:
                model = Head(W[0], v[0]) if count == 1 else MultiHead(list(W), list(v))
                remark = f"{count} heads explain the answers" if count > 1 else ""
                yield Step(model, count * unknowns, count * unknowns, remark=remark)
                return
            if count == counts[0]:
                self._expect_steady(answered)  # before the long search for more heads
        raise Unsuccessful(
            Status.MISMATCH,
            f"{counts[-1]} heads leave residuals {miss:.1e} times the answers' own error",
        )

    def _expect_linear(self, answered: _Answers) -> None:
        """One token has nothing to attend to but itself: heads answer with `(Σ_h v_h)ᵀx`."""
        y, X = answered.parts[1], answered.questions[1][:, 0]
        if not bool(answered.values.any()):
            if self.answer_error or self.precision > _EPSILON:
                raise Unsuccessful(
                    Status.MISMATCH, "every answer of ordinary size is rounded to zero"
                )
            raise Unsuccessful(Status.NOT_IDENTIFIABLE, "every answer is zero, whatever W may be")
        miss = (y - X @ _total(answered)) / self._sigma(y)
        if float(miss.square().mean().sqrt()) > 4 * _EXPLAINED:
            raise Unsuccessful(
                Status.MISMATCH, "answers to single tokens are not linear: no heads explain them"
            )

    def _expect_steady(self, answered: _Answers) -> None:
        """The first questions once more: no heads explain a target that changes."""
        y, X = answered.parts[1], answered.questions[1][:_PAIRS]
        off = (_answered(answered.oracle, X) - y[:_PAIRS]).abs() / self._sigma(y)[:_PAIRS]
        changed = int((off > 4 * _EXPLAINED).sum())
        if changed:
            raise Unsuccessful(
                Status.MISMATCH, f"asked again, {changed} of {len(X)} questions {CHANGED}"
            )

    def _sigma(self, y: Tensor) -> Tensor:
        """What rounding does to each answer."""
        error = self.answer_error + self.precision * (y.abs() + y.abs().median())
        return error / math.sqrt(3) + 16 * _EPSILON * y.abs().max().clamp(min=1e-300)

    def _fit(
        self,
        answered: _Answers,
        heads: int,
        stream: torch.Generator,
        first: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, float]:
        """The best of several starts, which ends early when one explains the answers."""
        sigma = self._sigma(answered.values)
        fits: list[tuple[Tensor, Tensor, float]] = []
        for _ in range(self.starts):
            drawn = _start(answered, heads, stream)
            start = drawn if fits or first is None else first
            fits.append(_fitted(answered, sigma, start))
            if fits[-1][2] <= _EXPLAINED:
                break
        return min(fits, key=lambda fit: fit[2])


class _Answers:
    """Random questions of several lengths with their answers; more can be asked."""

    def __init__(self, oracle: Oracle, stream: torch.Generator, scale: float) -> None:
        self.oracle, self.stream, self.scale = oracle, stream, scale
        self.questions = {
            length: torch.empty(0, length, oracle.dim, dtype=torch.float64) for length in _LENGTHS
        }
        self.parts = {length: torch.empty(0, dtype=torch.float64) for length in _LENGTHS}

    def extend(self, count: int) -> None:
        """Ask until there are `count` answers."""
        for place, length in enumerate(_LENGTHS):
            wanted = (count + len(_LENGTHS) - 1 - place) // len(_LENGTHS)
            missing = wanted - len(self.parts[length])
            if missing <= 0:
                continue
            shape = (missing, length, self.oracle.dim)
            tokens = torch.randn(shape, generator=self.stream, dtype=torch.float64)
            sizes = torch.rand(missing, 1, 1, generator=self.stream, dtype=torch.float64)
            tokens = self.scale * (0.1 + 1.2 * sizes) * tokens
            answers = _answered(self.oracle, tokens)
            usable = answers.isfinite()  # a link may be saturated
            self.questions[length] = torch.cat([self.questions[length], tokens[usable]])
            self.parts[length] = torch.cat([self.parts[length], answers[usable]])

    @property
    def values(self) -> Tensor:
        return torch.cat([self.parts[length] for length in _LENGTHS])

    def model(self, W: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Answers of heads W (H, d, d), v (H, d), and the Jacobian (N, H(d² + d))."""
        parts = [_heads(W, v, X) for X in self.questions.values()]
        outputs, slopes = zip(*parts, strict=True)
        return torch.cat(outputs), torch.cat(slopes)


def _heads(W: Tensor, v: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    last = X[:, -1]
    A = torch.einsum("nid,hde,ne->hni", X, W, last).softmax(-1)
    values = torch.einsum("nid,hd->hni", X, v)
    each = (A * values).sum(-1)
    g = torch.einsum("hni,nid->hnd", A * (values - each.unsqueeze(-1)), X)
    by_W = torch.einsum("hnd,ne->nhde", g, last).flatten(1)
    by_v = torch.einsum("hni,nid->nhd", A, X).flatten(1)
    return each.sum(0), torch.cat([by_W, by_v], 1)


def _scale(oracle: Oracle, stream: torch.Generator) -> float:
    """The size of tokens at which attention is neither uniform nor all in one place.

    α of `[s(x+δ) ; sx]` leaves ½ where s²·δᵀWx is about 1; the smallest such s².
    """
    raw = torch.randn(2, _PAIRS, oracle.dim, generator=stream, dtype=torch.float64)
    x, delta = raw / math.sqrt(oracle.dim)
    for square in _SQUARES.tolist():
        s = math.sqrt(square)
        alone = _answered(oracle, s * torch.cat([x, delta]).unsqueeze(1)).view(2, -1)
        both = _answered(oracle, s * torch.stack([x + delta, x], 1))
        alpha = (both - alone[0]) / alone[1]
        if not bool(alpha.isfinite().all()):
            return s / 4  # a link is saturated: stay well below
        if float((alpha - 0.5).abs().median()) > _OPEN:
            return s
    return 1.0


def _solved(oracle: Oracle, seed: int) -> tuple[Tensor, Tensor] | None:
    """One head as exact answers would give it: near enough to start from."""
    try:
        *_, step = SingleHead(seed=seed).steps(oracle)
    except (Unsuccessful, OracleError, LinAlgError):
        return None
    model = step.model
    return (model.W.unsqueeze(0), model.v.unsqueeze(0)) if isinstance(model, Head) else None


def _answered(oracle: Oracle, sequences: Tensor) -> Tensor:
    """Scores, NaN where the oracle's answer says nothing."""
    try:
        return ask_scores(oracle, sequences)
    except OracleError as error:
        if error.answers is None or error.answers.ndim != 1:
            raise
        return error.answers


def _total(answered: _Answers) -> Tensor:
    """Σ_h v_h, from the answers to single tokens."""
    tokens, answers = answered.questions[1][:, 0], answered.parts[1]
    return least_squares(tokens, answers[:, None])[:, 0]


def _start(answered: _Answers, heads: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random heads whose values add up to the linear function of single tokens."""
    dim = answered.oracle.dim
    total = _total(answered)
    size = 0.3 / (answered.scale**2 * math.sqrt(dim))
    W = size * torch.randn(heads, dim, dim, generator=stream, dtype=torch.float64)
    v = torch.randn(heads, dim, generator=stream, dtype=torch.float64) * total.abs().mean()
    return W, v + (total - v.sum(0)) / heads


def _fitted(
    answered: _Answers, sigma: Tensor, start: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, float]:
    """The heads near a start, and the root mean square of their residuals in units of σ."""
    y, shape = answered.values, start[0].shape
    size = start[0].numel()

    def model(unknowns: Tensor) -> tuple[Tensor, Tensor]:
        given, J = answered.model(unknowns[:size].view(shape), unknowns[size:].view(shape[:2]))
        return (given - y) / sigma, J / sigma[:, None]

    explained = 0.1 * math.sqrt(len(y))
    first = torch.cat([part.flatten() for part in start])
    unknowns, left = levenberg(model, first, _STEPS, explained, _STALLED)
    W, v = unknowns[:size].view(shape), unknowns[size:].view(shape[:2])
    return W, v, left / math.sqrt(len(y))
