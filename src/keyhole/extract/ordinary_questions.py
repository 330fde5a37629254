"""One head from ordinary queries: a server finds nothing unusual to refuse (ours).

The published attacks ask with unit vectors, with single tokens, with `[x+δ ; x]`. A server may
refuse all of that: short sequences, tokens of an odd norm, along one coordinate or along one
another. It cannot refuse sequences of independent random tokens of an ordinary norm, and those
suffice. For a fixed last token b and fixed other tokens C, with u = Wb and Z the sum of e^score
over both,

    f([a ; C ; b]) = μ + σ(aᵀu − log Z)·(vᵀa − μ),   μ = f([C ; b]),

so every further answer is one linear equation for u and log Z, once v is known:

    aᵀu − log Z = logit((f − μ) / (vᵀa − μ)).

d + 1 of them give Wb, d last tokens give W. v comes first: from d single tokens where those are
answered; else from one (C, b), whose answers to enough tokens a hold 2d + 1 unknowns u, v, log Z
(`fit_values`).

Exact answers are asked for with tokens as short as is usual, since soft attention loses fewest
digits; inexact ones with long tokens, whose answers are larger. Equations are weighted by what
`answer_error` does to their logit, and are `oversampling` times as many as needed; where answers
are inexact, all of them are fitted at once in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import expect_count, expect_number
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import ask_scores
from keyhole.extract.domain import within_reach
from keyhole.extract.extraction import Step, setting
from keyhole.extract.gauss_newton import SingleTokens, fitted_head, levenberg
from keyhole.extract.judge import NEARLY, Exam, Method
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import BudgetExhausted, Oracle

_EPSILON = torch.finfo(torch.float64).eps
_STREAM = 0x4F524449  # keeps the judge's questions apart from the attack's
_PER_KIND = 4
_NORMS = (0.7, 1.4)  # of the usual one: the judge's two kinds of questions
_SHORT, LONG = 0.55, 1.4  # of the usual norm: tokens for exact answers, for others
_COARSE = 0.1  # the largest relative error of an approximation, where answers are inexact
_TRIES = 8  # sets of questions that v is read from where single tokens are refused
_EXPLAINED = 8.0  # root mean square of the residuals in units of an answer's error


@dataclass(frozen=True)
class OrdinaryQuestions(Method):
    """Extraction of one head by random tokens of an ordinary norm, `min_tokens` or more of them."""

    usual_norm: float | None = setting(None, "norm of honest clients' tokens; d^(1/4) if not given")
    min_tokens: int = setting(1, "the fewest tokens that the target takes")
    answer_error: float = setting(0.0, "how far an answer may be off")
    oversampling: float = setting(1.5, "questions for each unknown")
    seed: int = 0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        expect_number("usual_norm", self.usual_norm, above=0)
        expect_number("answer_error", self.answer_error, least=0)
        expect_count("min_tokens", self.min_tokens)
        expect_number("oversampling", self.oversampling, least=1)

    def expected_queries(self, dim: int) -> int:
        values = self.count(dim) if self.min_tokens == 1 else self.count(2 * dim) + 1
        return values + dim * (self.count(dim) + 1)

    def count(self, unknowns: int) -> int:
        """Questions for so many unknowns and one more."""
        return math.ceil(self.oversampling * (unknowns + 1))

    def norm(self, dim: int) -> float:
        return usual_norm_of(dim) if self.usual_norm is None else self.usual_norm

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        """Fresh questions of the ordinary kind: others are not answered."""
        stream = torch.Generator().manual_seed(self.seed ^ _STREAM)
        sets: list[tuple[Tensor, Tensor]] = []
        for length in (self.min_tokens, self.min_tokens + 1, self.min_tokens + 4):
            with suppress(Unsuccessful):  # few dimensions hold few tokens that differ
                parts = [
                    factor * self.norm(oracle.dim) * ordinary_sequence(length, oracle.dim, stream)
                    for factor in _NORMS
                    for _ in range(_PER_KIND)
                ]
                sets.append(within_reach(oracle, torch.stack(parts)))
        return Exam(tuple(sets), excused=_COARSE if self.answer_error else NEARLY)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        if d < 2:
            raise Unsuccessful(
                Status.NOT_APPLICABLE, "in one dimension every token is along every other"
            )
        state = _State(self, oracle)
        state.read_values()
        yield state.step()
        try:
            for last in spread_tokens(d, state.stream):
                state.read_image(last)
        except BudgetExhausted:
            yield state.step()
            raise
        if self.answer_error:
            yield state.step()
            state.refine()
        yield state.step()


class _State:
    """What was asked so far, and what follows from it."""

    def __init__(self, method: OrdinaryQuestions, oracle: Oracle) -> None:
        self._method, self._oracle = method, oracle
        self._factor = LONG if method.answer_error else _SHORT  # of the usual norm
        self._asked: list[SingleTokens | WithContext] = []
        self._last: list[Tensor] = []
        self._images: list[Tensor] = []
        self._v = torch.zeros(oracle.dim, dtype=torch.float64)
        self._W: Tensor | None = None
        self.stream = torch.Generator().manual_seed(method.seed)

    def read_values(self) -> None:
        """v, from single tokens or from what a token changes next to others."""
        d = self._oracle.dim
        if self._method.min_tokens == 1:
            alone = torch.empty(0, d, dtype=torch.float64)
            norm = self._factor * self._method.norm(d)
            tokens = norm * ordinary_tokens(self._method.count(d), alone, self.stream)
            answers = ask_scores(self._oracle, tokens.unsqueeze(1))
            self._asked.append(SingleTokens(tokens, answers))
            self._v = least_squares(tokens, answers[:, None])[:, 0]
        else:
            self._v = self._fit_values()
        if not bool(self._v.any()):
            raise Unsuccessful(Status.NOT_IDENTIFIABLE, "v = 0: every answer is zero")

    def _fit_values(self) -> Tensor:
        """v by what tokens change next to others; another set where one leads nowhere."""
        d = self._oracle.dim
        for _ in range(_TRIES):
            last = ordinary_sequence(1, d, self.stream)[0]
            asked = self._ask(last, self._method.count(2 * d), _SHORT)
            v, miss = fit_values(asked)
            if miss <= _EXPLAINED * self._error(asked.answers):
                self._asked.append(asked)
                return v
        raise Unsuccessful(Status.MISMATCH, "no head explains what a token changes next to others")

    def read_image(self, last: Tensor) -> None:
        """Wb for a unit token b, from the logits of the attention to many tokens next to it."""
        asked = self._ask(last, self._method.count(self._oracle.dim), self._factor)
        self._asked.append(asked)
        tokens, mean = asked.tokens[0], asked.answers[0, -1]
        gap = tokens @ self._v - mean
        alpha = ((asked.answers[0, :-1] - mean) / gap).clamp(_EPSILON, 1 - _EPSILON)
        # What an answer's error does to a logit; where v and a say nothing, hardly any weight.
        weights = gap.abs() * alpha * (1 - alpha) / self._error(asked.answers)
        system = torch.cat([tokens, -torch.ones_like(gap)[:, None]], 1)
        logits = torch.logit(alpha)
        solved = least_squares(weights[:, None] * system, (weights * logits)[:, None])[:, 0]
        self._last.append(asked.others[0, -1])
        self._images.append(solved[:-1])

    def refine(self) -> None:
        """All answers at once: each of them depends on v."""
        images = self._asked[-len(self._last) :]  # of the same sizes; before them stands v's own
        joined = WithContext.joined([part for part in images if isinstance(part, WithContext)])
        asked = [*self._asked[: -len(images)], joined]
        self._v, self._W = fitted_head(self._v, self._solved(), asked)

    def step(self) -> Step:
        d = self._oracle.dim
        W = self._solved() if self._W is None else self._W
        return Step(Head(W, self._v), known=d + d * len(self._last), unknowns=d * d + d)

    def _solved(self) -> Tensor:
        """W from what it makes of the last tokens, 0 at right angles to them."""
        d = self._oracle.dim
        if not self._last:
            return torch.zeros(d, d, dtype=torch.float64)
        last, images = torch.stack(self._last), torch.stack(self._images)
        return images.mT @ last / last[0].square().sum()  # they are at right angles

    def _ask(self, last: Tensor, count: int, factor: float) -> WithContext:
        """The answers to `count` first tokens next to others, of which `last` is the last."""
        norm = factor * self._method.norm(self._oracle.dim)
        others = last[None]
        while len(others) < self._method.min_tokens:
            others = torch.cat([ordinary_tokens(1, others, self.stream), others])
        tokens = norm * ordinary_tokens(count, others, self.stream)
        others = norm * others
        mean = ask_scores(self._oracle, others[None])
        rest = others.expand(count, *others.shape)
        given = ask_scores(self._oracle, torch.cat([tokens.unsqueeze(1), rest], 1))
        return WithContext(tokens[None], others[None], torch.cat([given, mean])[None])

    def _error(self, answers: Tensor) -> float:
        """How far an answer may be off."""
        rounding = 4 * _EPSILON * float(answers.abs().max())
        return max(self._method.answer_error, rounding, torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class WithContext:
    """First tokens a (s, m, d) next to the same others C (s, k, d), of which the last is b.

    `answers` (s, m + 1) are those to `[a ; C]`, and in the end of a row the one to C alone.
    """

    tokens: Tensor
    others: Tensor
    answers: Tensor

    @classmethod
    def joined(cls, parts: Sequence[WithContext]) -> WithContext:
        columns = zip(*((p.tokens, p.others, p.answers) for p in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))

    def predicted(self, v: Tensor, W: Tensor) -> Tensor:
        u = (self.others[:, -1] @ W.mT)[..., None]
        first, rest = self.tokens @ u, (self.others @ u).mT
        scores = torch.cat([first, rest.expand(-1, first.shape[1], -1)], -1)
        value = (self.others @ v)[:, None]
        values = torch.cat([(self.tokens @ v)[..., None], value.expand_as(scores[..., 1:])], -1)
        alone = (rest.softmax(-1) * value).sum(-1)
        return torch.cat([(scores.softmax(-1) * values).sum(-1), alone], 1)


def fit_values(asked: WithContext) -> tuple[Tensor, float]:
    """v from one set where nothing else is known: u, v and log Z by damped Gauss–Newton.

    It starts where attention is even: u = 0, and v from a linear fit. With v comes the root mean
    square of what is left unexplained.
    """
    tokens, mean = asked.tokens[0], asked.answers[0, -1]
    change, k, d = asked.answers[0, :-1] - mean, asked.others.shape[1], tokens.shape[1]
    ones = torch.ones(len(tokens), 1, dtype=torch.float64)
    even = least_squares(torch.cat([tokens, ones], 1), change[:, None])[:d, 0]
    theta = torch.cat([torch.zeros_like(even), (k + 1) * even, even.new_tensor([math.log(k)])])

    def at(theta: Tensor) -> tuple[Tensor, Tensor]:
        u, v, log_sum = theta[:d], theta[d:-1], theta[-1]
        alpha, gap = torch.sigmoid(tokens @ u - log_sum), tokens @ v - mean
        slope = (alpha * (1 - alpha) * gap)[:, None]
        return alpha * gap - change, torch.cat([slope * tokens, alpha[:, None] * tokens, -slope], 1)

    theta, left = levenberg(at, theta, steps=200)
    return theta[d:-1], left / math.sqrt(len(tokens))


# Random tokens that look like anybody's: neither along a coordinate nor along one another.

_APART = 0.85  # |cosine| that two tokens of one sequence may have
_DRAWS = 1000
_PEAK = 0.9  # |coordinate| that a unit token may have


def usual_norm_of(dim: int) -> float:
    """d^¼: the scores of a W of spectral norm 2 then have a deviation of about 1.

    So they have in a working layer, and nobody knows better of a target that is a black box.
    """
    return dim**0.25


def ordinary_tokens(count: int, others: Tensor, stream: torch.Generator) -> Tensor:
    """Random unit tokens (count, d), each neither along an axis nor along a token of `others`."""
    dim = others.shape[1]
    kept = torch.empty(0, dim, dtype=torch.float64)
    for _ in range(_DRAWS):
        drawn = torch.randn(2 * count + 8, dim, generator=stream, dtype=torch.float64)
        drawn = torch.nn.functional.normalize(drawn, dim=1)
        odd = torch.cat([drawn.abs() / _PEAK, (drawn @ others.mT).abs() / _APART], 1)
        kept = torch.cat([kept, drawn[odd.amax(1) < 1] if dim > 1 else drawn])
        if len(kept) >= count:
            return kept[:count]
    raise Unsuccessful(
        Status.NOT_APPLICABLE,
        f"{dim} dimensions are too few for {len(others) + 1} tokens of which none are alike",
    )


def are_ordinary(units: Tensor) -> Tensor:
    """Which of the sequences (b, n, d) of unit tokens have none along an axis or another."""
    cosines = (units @ units.mT).abs()
    cosines.diagonal(dim1=-2, dim2=-1).zero_()
    return (cosines.amax((-2, -1)) < _APART) & (units.abs().amax((-2, -1)) < _PEAK)


def ordinary_sequence(length: int, dim: int, stream: torch.Generator) -> Tensor:
    tokens = torch.empty(0, dim, dtype=torch.float64)
    for _ in range(length):
        tokens = torch.cat([tokens, ordinary_tokens(1, tokens, stream)])
    return tokens


def spread_tokens(dim: int, stream: torch.Generator) -> Tensor:
    """d such tokens at right angles to one another: what they are multiplied by is solved for best.

    In few dimensions a random basis may have an axis in it; then another one is drawn.
    """
    for _ in range(_DRAWS):
        basis, R = torch.linalg.qr(torch.randn(dim, dim, generator=stream, dtype=torch.float64))
        if dim == 1 or float(basis.abs().max()) < _PEAK:
            return (basis * R.diagonal().sign()).mT
    raise Unsuccessful(
        Status.NOT_APPLICABLE, f"{dim} dimensions have no basis without a token along an axis"
    )
