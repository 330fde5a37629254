"""One head from ordinary queries, in which a server finds nothing unusual to refuse (ours).

The published attacks send unit vectors, single tokens and pairs `[x+δ ; x]`. A server
may refuse all of that: short sequences, tokens of an odd norm, tokens along one
coordinate or along each other. It cannot refuse sequences of independent random tokens
of an ordinary norm, and those are enough:

    scores   min_{W, v}  Σ_k (f(X_k) − y_k)²                    Gauss–Newton
    labels   min_{W, v}  Σ_k log(1 + exp(−y_k·f(X_k))),  y = ±1    L-BFGS

from W = 0, where attention is uniform, and from the v of a linear fit to the means of
tokens. There is no proof that this converges to the truth. But with tokens of usual
norm attention is nearly uniform and W = 0 nearly right, and a fit that converges
elsewhere does not explain the answers. If answers are inexact, half of the queries have
long tokens, whose answers show more of W.

Random labels show little: an error ε takes unknowns/ε of them. So the attacker asks
where the copy is in doubt: of many random queries it sends those with the smallest |f|,
fits again, and so on. Each round divides the error by a factor, as in active learning
of halfspaces. Labels do not show the length of v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core import (
    Status,
    Unsuccessful,
    mismatch,
    not_applicable,
    not_identifiable,
)
from keyhole.core.errors import expect_count, expect_number
from keyhole.core.float64 import normal, random_stream, tensor, zeros
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import ask_scores, max_abs
from keyhole.extract.domain import within_reach
from keyhole.extract.extraction import Check, Step, setting
from keyhole.extract.gauss_newton import refined
from keyhole.extract.judge import NEARLY, Exam, Method
from keyhole.oracle.http import Refused
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import Oracle

_EPSILON = torch.finfo(torch.float64).eps
_STREAM = 0x4F524449  # so that the judge has other queries than the attack
_PER_KIND = 4
_NORMS = (0.7, 1.4)  # the judge's two kinds of queries, in usual norms
# of the usual norm: tokens for exact answers, and the longest for others
_SHORT = 0.55
LONG = 1.4
_COARSE = 0.1  # the largest relative error of an approximation, if answers are inexact
_EXPLAINED = 8.0  # the largest root mean square residual, in units of the error
_MOST = 4500  # the most unknowns that are fitted at once
_APART = 0.85  # the largest |cosine| of two tokens of one sequence
_PEAK = 0.9  # the largest |coordinate| of a unit token
_DRAWS = 100


def usual_norm_of(dim: int) -> float:
    """Return d^¼, with which the scores of a W of spectral norm 2 have a deviation of about 1.

    That is so in a trained layer, and of a black box no better guess is possible.
    """
    return dim**0.25


def ordinary_sequences(
    count: int,
    length: int,
    dim: int,
    stream: torch.Generator,
) -> Tensor:
    """Return random unit tokens (count, length, dim), none along an axis or another token."""
    kept = list[Tensor]()
    found = 0
    for _ in range(_DRAWS):
        units = normal(stream, 2 * count + 64, length, dim)
        units = torch.nn.functional.normalize(units, dim=-1)
        cosines = (units @ units.mT).abs()
        cosines.diagonal(dim1=-2, dim2=-1).zero_()
        usual = (cosines.amax((-2, -1)) < _APART) & (units.abs().amax((-2, -1)) < _PEAK)
        kept.append(units[usual])
        found += len(kept[-1])
        if found >= count:
            return torch.cat(kept)[:count]
    raise not_applicable(
        f"{dim} dimensions are too few for {length} tokens that all differ"
    )


@dataclass(frozen=True)
class OrdinaryQuestions(Method):
    """Extraction of one head by sequences of `min_tokens` random tokens of an ordinary norm."""

    usual_norm: float | None = setting(
        None, "norm of honest clients' tokens; d^(1/4) if not given"
    )
    min_tokens: int = setting(2, "tokens of a sequence, at least 2")
    answer_error: float = setting(0.0, "how far an answer may be off")
    oversampling: float = setting(1.5, "queries for each unknown")
    seed: int = 0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        expect_number("usual_norm", self.usual_norm, above=0)
        expect_number("answer_error", self.answer_error, least=0)
        expect_count("min_tokens", self.min_tokens)
        expect_number("oversampling", self.oversampling, least=1)

    def expected_queries(self, dim: int) -> int:
        return math.ceil(self.oversampling * (dim * dim + dim))

    @property
    def length(self) -> int:
        return max(self.min_tokens, 2)

    def norm(self, dim: int) -> float:
        """Return the usual norm of a token."""
        return usual_norm_of(dim) if self.usual_norm is None else self.usual_norm

    def draw(
        self,
        count: int,
        dim: int,
        factor: float,
        stream: torch.Generator,
    ) -> Tensor:
        """Return ordinary sequences (count, n, d) of tokens of `factor` times the usual norm."""
        return (
            factor
            * self.norm(dim)
            * ordinary_sequences(count, self.length, dim, stream)
        )

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        """Return fresh queries of the ordinary kind: others are not answered."""
        stream = random_stream(self.seed ^ _STREAM)
        factors = tensor(_NORMS).repeat_interleave(_PER_KIND)
        sets: list[tuple[Tensor, Tensor]] = []
        for more in (0, 1, 4):
            # Few dimensions hold few tokens that differ, and longer sequences may be
            # refused.
            with suppress(*((Unsuccessful, Refused) if more else ())):
                units = ordinary_sequences(
                    len(factors), self.length + more, oracle.dim, stream
                )
                scaled = self.norm(oracle.dim) * factors[:, None, None] * units
                sets.append(within_reach(oracle, scaled))
        return Exam(tuple(sets), excused=_COARSE if self.answer_error else NEARLY)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        unknowns = _expect_few(d, _MOST)
        stream = random_stream(self.seed)
        X = self.draw(self.expected_queries(d), d, _SHORT, stream)
        if self.answer_error:  # long tokens in every other sequence
            X[::2] *= LONG / _SHORT
        y = ask_scores(oracle, X)
        if not y.any():
            raise not_identifiable("v = 0: every answer is zero")
        rounding = 4 * _EPSILON * max_abs(y)
        error = torch.full_like(y, max(self.answer_error, rounding))
        v = least_squares(X.mean(1), y[:, None])[:, 0]
        head = Head(zeros(d, d), v)
        head = refined(head, ("W", "v"), [(X, y, error)])
        if ((head(X) - y) / error).square().mean().sqrt() > _EXPLAINED:
            raise mismatch("no head explains these answers")
        yield Step(head, known=unknowns, unknowns=unknowns)


def _expect_few(dim: int, most: int) -> int:
    """Return the number of unknowns; raise Unsuccessful if too many to be fitted at once."""
    unknowns = dim * dim + dim
    if unknowns > most:
        raise not_applicable(
            f"{unknowns:,} unknowns are more than the {most:,} that are fitted at once"
        )
    return unknowns


_OPENING = 4.0  # labels for each unknown in the first round
_EACH = 2.0  # … and in every other one
_CHOICE = 12  # queries drawn for each one that is sent
_STEPS = 100  # of L-BFGS in a round
_FURTHER = 1.2  # usual norms of the tokens of the last rounds
# the length of v in the first fit, which sets how certain the fit is of its labels
_SHARP = 5.0
_RIDGE = 1e-9  # on v: without it, a v that explains all labels would become infinite
_TESTED = 400  # fresh labels for the judge
_WRONG = 0.05  # with a larger share of wrong labels, the model is no approximation
_DOUBT = 0.1  # if a score is below this share of the largest, its label may be wrong


@dataclass(frozen=True)
class OrdinaryLabels(OrdinaryQuestions):
    """Extraction of one head from labels (1 or 0) of random tokens of norm `usual_norm`."""

    oversampling: float = setting(_EACH, "queries for each unknown, in a round")
    rounds: int = setting(18, "rounds of queries where the copy is in doubt")
    most: int = setting(1200, "unknowns that are fitted; more take hours")

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count("rounds", self.rounds)

    def expected_queries(self, dim: int) -> int:
        unknowns = dim * dim + dim
        return int(_OPENING * unknowns) + (self.rounds - 1) * int(
            self.oversampling * unknowns
        )

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        stream = random_stream(self.seed ^ _STREAM)
        questions = self.draw(_TESTED, oracle.dim, 1.0, stream)
        return LabelExam(((questions, ask_scores(oracle, questions)),))

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        unknowns = _expect_few(d, self.most)
        stream = random_stream(self.seed)
        X = self.draw(int(_OPENING * unknowns), d, _SHORT, stream)
        y = 2 * ask_scores(oracle, X) - 1
        v = (y[:, None] * X.mean(1)).mean(0)
        v = _SHARP * v / v.norm().clamp(min=torch.finfo(torch.float64).tiny)
        model = Head(zeros(d, d), v)
        for number in range(self.rounds):
            if number:
                count = int(self.oversampling * unknowns)
                factor = _SHORT if 2 * number <= self.rounds else _FURTHER
                pool = self.draw(_CHOICE * count, d, factor, stream)
                asked = pool[model(pool).abs().argsort()[:count]]
                X = torch.cat([X, asked])
                y = torch.cat([y, 2 * ask_scores(oracle, asked) - 1])
            model = _fitted(X, y, model)
            # Each label shows a part of the digits, so the known share grows with their
            # number.
            known = unknowns * len(y) // self.expected_queries(d)
            yield Step(model, known=known, unknowns=unknowns)


def _fitted(
    X: Tensor,
    y: Tensor,
    start: Head,
) -> Head:
    """Return the nearest minimum of the logistic loss, by L-BFGS."""
    W = start.W.clone().requires_grad_()
    v = start.v.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [W, v],
        max_iter=_STEPS,
        history_size=30,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-12,
        tolerance_change=1e-12,
    )

    def loss() -> Tensor:
        search.zero_grad()
        scores = attention.output(X, W.mT, v[:, None], last=True).squeeze(-1)
        total = (
            torch.nn.functional.softplus(-y * scores).mean() + _RIDGE * v.square().sum()
        )
        total.backward()
        return total

    search.step(loss)  # pyright: ignore[reportArgumentType] - its closure gives a tensor
    return Head(W.detach(), v.detach())


@dataclass(frozen=True)
class LabelExam(Exam):
    """Fresh ordinary queries and their labels: the error is the share that a model gets wrong."""

    def grade(self, model: Oracle) -> Check:
        ((questions, labels),) = self.sets
        wrong = float(((model(questions) > 0) != (labels > 0)).double().mean())
        return Check(wrong, wrong, len(labels))

    def agrees(
        self,
        given: Tensor,
        answers: Tensor,
        allowed: float,  # noqa: ARG002
    ) -> bool:
        clear = given.abs() > _DOUBT * max_abs(given)
        return bool(((given > 0) == (answers > 0))[clear].all())

    def verdict(
        self,
        check: Check,
        step: Step,  # noqa: ARG002
        accepted: float,  # noqa: ARG002
    ) -> tuple[Status, str]:
        right = round((1 - check.worst) * check.queries)
        reason = f"{right} of {check.queries} fresh labels are right"
        return (Status.INEXACT if check.worst <= _WRONG else Status.MISMATCH), reason
