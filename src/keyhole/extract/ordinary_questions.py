"""One head from ordinary queries: a server finds nothing unusual to refuse (ours).

The published attacks ask with unit vectors, with single tokens, with `[x+δ ; x]`. A server may
refuse all of that: short sequences, tokens of an odd norm, along one coordinate or along one
another. It cannot refuse sequences of independent random tokens of an ordinary norm, and those
suffice:

    scores   min_{W, v}  Σ_k (f(X_k) − y_k)²                    Gauss–Newton
    labels   min_{W, v}  Σ_k log(1 + exp(−y_k·f(X_k))),  y = ±1    L-BFGS

from W = 0, where attention is even, and from the v of a linear fit to the means of tokens. Nothing
proves that it ends at the truth: with tokens as short as is usual attention is nearly even and
W = 0 nearly true, and a fit that ends elsewhere explains no answers. Answers that are inexact are
asked for with long tokens too, whose answers tell more of W.

Random labels teach little: an error ε takes unknowns/ε of them. So the attacker asks where the copy
so far is in doubt: of many random questions those with the smallest |f|, fits again, and so on;
each round lowers the error by a factor, as in active learning of halfspaces. The length of v cannot
be known from labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import expect_count, expect_number
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import ask_scores
from keyhole.extract.domain import within_reach
from keyhole.extract.extraction import Check, Step, setting
from keyhole.extract.gauss_newton import refined
from keyhole.extract.judge import NEARLY, Exam, Method
from keyhole.oracle.http import Refused
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import Oracle

_EPSILON = torch.finfo(torch.float64).eps
_STREAM = 0x4F524449  # keeps the judge's questions apart from the attack's
_PER_KIND = 4
_NORMS = (0.7, 1.4)  # of the usual one: the judge's two kinds of questions
_SHORT, LONG = 0.55, 1.4  # of the usual norm: tokens for exact answers, and the longest for others
_COARSE = 0.1  # the largest relative error of an approximation, where answers are inexact
_EXPLAINED = 8.0  # root mean square of the residuals in units of an answer's error
_MOST = 4500  # unknowns that are fitted at once
_APART = 0.85  # |cosine| that two tokens of one sequence may have
_PEAK = 0.9  # |coordinate| that a unit token may have
_DRAWS = 100


def usual_norm_of(dim: int) -> float:
    """d^¼: the scores of a W of spectral norm 2 then have a deviation of about 1.

    So they have in a working layer, and nobody knows better of a target that is a black box.
    """
    return dim**0.25


def ordinary_sequences(count: int, length: int, dim: int, stream: torch.Generator) -> Tensor:
    """Random unit tokens (count, length, dim), none along an axis or another of its sequence."""
    kept, found = list[Tensor](), 0
    for _ in range(_DRAWS):
        units = torch.randn(2 * count + 64, length, dim, generator=stream, dtype=torch.float64)
        units = torch.nn.functional.normalize(units, dim=-1)
        cosines = (units @ units.mT).abs()
        cosines.diagonal(dim1=-2, dim2=-1).zero_()
        usual = (cosines.amax((-2, -1)) < _APART) & (units.abs().amax((-2, -1)) < _PEAK)
        kept.append(units[usual])
        found += len(kept[-1])
        if found >= count:
            return torch.cat(kept)[:count]
    raise Unsuccessful(
        Status.NOT_APPLICABLE,
        f"{dim} dimensions are too few for {length} tokens of which none are alike",
    )


@dataclass(frozen=True)
class OrdinaryQuestions(Method):
    """Extraction of one head by random tokens of an ordinary norm, `min_tokens` or more of them."""

    usual_norm: float | None = setting(None, "norm of honest clients' tokens; d^(1/4) if not given")
    min_tokens: int = setting(2, "tokens of a sequence, at least 2")
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
        return math.ceil(self.oversampling * (dim * dim + dim))

    @property
    def length(self) -> int:
        return max(self.min_tokens, 2)

    def draw(self, count: int, dim: int, factor: float, stream: torch.Generator) -> Tensor:
        """Ordinary sequences (count, n, d), their tokens of so many usual norms."""
        norm = usual_norm_of(dim) if self.usual_norm is None else self.usual_norm
        return factor * norm * ordinary_sequences(count, self.length, dim, stream)

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        """Fresh questions of the ordinary kind: others are not answered."""
        stream = torch.Generator().manual_seed(self.seed ^ _STREAM)
        norm = usual_norm_of(oracle.dim) if self.usual_norm is None else self.usual_norm
        factors = torch.tensor(_NORMS, dtype=torch.float64).repeat_interleave(_PER_KIND)
        sets: list[tuple[Tensor, Tensor]] = []
        for more in (0, 1, 4):
            # Few dimensions hold few tokens that differ, and longer sequences may be refused.
            with suppress(*((Unsuccessful, Refused) if more else ())):
                units = ordinary_sequences(len(factors), self.length + more, oracle.dim, stream)
                sets.append(within_reach(oracle, norm * factors[:, None, None] * units))
        return Exam(tuple(sets), excused=_COARSE if self.answer_error else NEARLY)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        unknowns = _expect_few(d, _MOST)
        stream = torch.Generator().manual_seed(self.seed)
        X = self.draw(self.expected_queries(d), d, _SHORT, stream)
        if self.answer_error:  # every other one is long
            X[::2] *= LONG / _SHORT
        y = ask_scores(oracle, X)
        if not bool(y.any()):
            raise Unsuccessful(Status.NOT_IDENTIFIABLE, "v = 0: every answer is zero")
        rounding = 4 * _EPSILON * float(y.abs().max())
        error = torch.full_like(y, max(self.answer_error, rounding))
        v = least_squares(X.mean(1), y[:, None])[:, 0]
        head = Head(torch.zeros(d, d, dtype=torch.float64), v)
        head = refined(head, ("W", "v"), [(X, y, error)])
        if float(((head(X) - y) / error).square().mean().sqrt()) > _EXPLAINED:
            raise Unsuccessful(Status.MISMATCH, "no head explains these answers")
        yield Step(head, known=unknowns, unknowns=unknowns)


def _expect_few(dim: int, most: int) -> int:
    """How many unknowns there are, if not too many to be fitted at once."""
    unknowns = dim * dim + dim
    if unknowns > most:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"{unknowns:,} unknowns are more than the {most:,} that are fitted at once",
        )
    return unknowns


_OPENING = 4.0  # labels for each unknown in the first round
_EACH = 2.0  # … and in every other one
_CHOICE = 12  # questions drawn for each one that is asked
_STEPS = 100  # of L-BFGS in a round
_FURTHER = 1.2  # of the usual norm: tokens of the last rounds
_SHARP = 5.0  # the length of v in the first fit, which is how sure it is of its labels
_RIDGE = 1e-9  # on v: labels that are all explained would make it infinite
_TESTED = 400  # fresh labels for the judge
_WRONG = 0.05  # of them: more is no approximation
_DOUBT = 0.1  # of the largest answer: closer to 0 a label may be wrong


@dataclass(frozen=True)
class OrdinaryLabels(OrdinaryQuestions):
    """Extraction of one head from labels (1 or 0) of random tokens of norm `usual_norm`."""

    oversampling: float = setting(_EACH, "questions for each unknown, in a round")
    rounds: int = setting(18, "of asking where the copy so far is in doubt")
    most: int = setting(1200, "unknowns that are fitted; more take hours")

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count("rounds", self.rounds)

    def expected_queries(self, dim: int) -> int:
        unknowns = dim * dim + dim
        return int(_OPENING * unknowns) + (self.rounds - 1) * int(self.oversampling * unknowns)

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        stream = torch.Generator().manual_seed(self.seed ^ _STREAM)
        questions = self.draw(_TESTED, oracle.dim, 1.0, stream)
        return LabelExam(((questions, ask_scores(oracle, questions)),))

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        unknowns = _expect_few(d, self.most)
        stream = torch.Generator().manual_seed(self.seed)
        X = self.draw(int(_OPENING * unknowns), d, _SHORT, stream)
        y = 2 * ask_scores(oracle, X) - 1
        v = (y[:, None] * X.mean(1)).mean(0)
        v = _SHARP * v / v.norm().clamp(min=torch.finfo(torch.float64).tiny)
        model = Head(torch.zeros(d, d, dtype=torch.float64), v)
        for number in range(self.rounds):
            if number:
                count = int(self.oversampling * unknowns)
                factor = _SHORT if 2 * number <= self.rounds else _FURTHER
                pool = self.draw(_CHOICE * count, d, factor, stream)
                asked = pool[model(pool).abs().argsort()[:count]]
                X = torch.cat([X, asked])
                y = torch.cat([y, 2 * ask_scores(oracle, asked) - 1])
            model = _fitted(X, y, model)
            # Labels bring digits little by little: all that are wanted bring all of them.
            known = unknowns * len(y) // self.expected_queries(d)
            yield Step(model, known=known, unknowns=unknowns)


def _fitted(X: Tensor, y: Tensor, start: Head) -> Head:
    """The nearest minimum of the logistic loss, by L-BFGS."""
    W, v = start.W.clone().requires_grad_(), start.v.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [W, v], max_iter=_STEPS, history_size=30, line_search_fn="strong_wolfe",
        tolerance_grad=1e-12, tolerance_change=1e-12,
    )  # fmt: skip

    def loss() -> Tensor:
        search.zero_grad()
        scores = attention.output(X, W.mT, v[:, None], last=True).squeeze(-1)
        total = torch.nn.functional.softplus(-y * scores).mean() + _RIDGE * v.square().sum()
        total.backward()
        return total

    search.step(loss)  # pyright: ignore[reportArgumentType] - its closure gives a tensor
    return Head(W.detach(), v.detach())


@dataclass(frozen=True)
class LabelExam(Exam):
    """Fresh ordinary questions (m, n, d) and their labels: the share that a model gets wrong."""

    def grade(self, model: Oracle) -> Check:
        ((questions, labels),) = self.sets
        wrong = float(((model(questions) > 0) != (labels > 0)).double().mean())
        return Check(wrong, wrong, len(labels))

    def agrees(self, given: Tensor, answers: Tensor, allowed: float) -> bool:  # noqa: ARG002
        clear = given.abs() > _DOUBT * given.abs().max()
        return bool(((given > 0) == (answers > 0))[clear].all())

    def verdict(self, check: Check, step: Step, accepted: float) -> tuple[Status, str]:  # noqa: ARG002
        right = round((1 - check.worst) * check.queries)
        reason = f"{right} of {check.queries} fresh labels are right"
        return (Status.INEXACT if check.worst <= _WRONG else Status.MISMATCH), reason
