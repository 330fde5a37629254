"""One head from the labels of ordinary queries (ours).

Bisection (sign_only.py) sends pairs of tokens of any length. Where short sequences and
unusual tokens are refused and answers are labels, there is still a fit, by logistic loss,

    min_{W, v}  Σ_k log(1 + exp(−y_k·f(X_k))),   y_k = ±1, X_k random ordinary tokens.

Random labels teach little: an error ε takes unknowns/ε of them. So the attacker asks where the
copy so far is in doubt: of many random questions those with the smallest |f|, fits again, and so
on; each round lowers the error by a factor, as in active learning of halfspaces. It starts with
tokens as short as is usual, where attention is nearly even and W = 0 nearly true: with longer ones
the fit ends in a wrong minimum. Later rounds ask with longer tokens, which tell more of W. The
length of v cannot be known from labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import expect_count, expect_number
from keyhole.extract.bilinear import ask_scores
from keyhole.extract.extraction import Check, Step, setting
from keyhole.extract.judge import Exam, Method
from keyhole.extract.ordinary_questions import are_ordinary, usual_norm_of
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import Oracle

_STREAM = 0x4C41424C  # keeps the judge's questions apart from the attack's
_SHORT, _LONG = 0.55, 1.2  # of the usual norm: tokens in the first and in the last rounds
_OPENING = 4.0  # labels for each unknown in the first round
_EACH = 2.0  # … and in every other one
_CHOICE = 12  # questions drawn for each one that is asked
_STEPS = 100  # of L-BFGS in a round
_SHARP = 5.0  # the length of v in the first fit, which is how sure it is of its labels
_RIDGE = 1e-9  # on v: labels that are all explained would make it infinite
_TESTED = 400  # fresh labels for the judge
_WRONG = 0.05  # of them: more is no approximation
_DOUBT = 0.1  # of the largest answer: closer to 0 a label may be wrong


@dataclass(frozen=True)
class OrdinaryLabels(Method):
    """Extraction of one head from labels (1 or 0) of random tokens of norm `usual_norm`."""

    usual_norm: float | None = setting(None, "norm of honest clients' tokens; d^(1/4) if not given")
    min_tokens: int = setting(2, "tokens of a sequence, at least 2")
    rounds: int = setting(18, "of asking where the copy so far is in doubt")
    most: int = setting(1200, "unknowns that are fitted; more take hours")
    seed: int = 0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        expect_number("usual_norm", self.usual_norm, above=0)
        expect_count("min_tokens", self.min_tokens)
        expect_count("rounds", self.rounds)

    def expected_queries(self, dim: int) -> int:
        unknowns = dim * dim + dim
        return int(_OPENING * unknowns) + (self.rounds - 1) * int(_EACH * unknowns)

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        stream = torch.Generator().manual_seed(self.seed ^ _STREAM)
        questions = self._draw(_TESTED, oracle.dim, 1.0, stream)
        return LabelExam(((questions, ask_scores(oracle, questions)),))

    def _draw(self, count: int, dim: int, factor: float, stream: torch.Generator) -> Tensor:
        """Ordinary sequences (count, n, d), or as many as a few draws give."""
        norm = usual_norm_of(dim) if self.usual_norm is None else self.usual_norm
        shape = (2 * count, max(self.min_tokens, 2), dim)
        units = torch.randn(shape, generator=stream, dtype=torch.float64)
        units = torch.nn.functional.normalize(units, dim=-1)
        units = units[are_ordinary(units)]
        if not len(units):
            raise Unsuccessful(
                Status.NOT_APPLICABLE,
                f"{dim} dimensions are too few for tokens of which none are alike",
            )
        return factor * norm * units[:count]

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        unknowns = d * d + d
        if unknowns > self.most:
            raise Unsuccessful(
                Status.NOT_APPLICABLE,
                f"{unknowns:,} unknowns are more than the {self.most:,} that are fitted to labels",
            )
        stream = torch.Generator().manual_seed(self.seed)
        X = self._draw(int(_OPENING * unknowns), d, _SHORT, stream)
        y = 2 * ask_scores(oracle, X) - 1
        W = torch.zeros(d, d, dtype=torch.float64)
        v = (y[:, None] * X.mean(1)).mean(0)
        v = _SHARP * v / v.norm().clamp(min=torch.finfo(torch.float64).tiny)
        for number in range(self.rounds):
            if number:
                factor = _SHORT if 2 * number <= self.rounds else _LONG
                asked = self._doubtful(Head(W, v), int(_EACH * unknowns), factor, stream)
                X = torch.cat([X, asked])
                y = torch.cat([y, 2 * ask_scores(oracle, asked) - 1])
            W, v = _fitted(X, y, W, v)
            # Labels bring digits little by little: all that are wanted bring all of them.
            known = unknowns * len(y) // self.expected_queries(d)
            yield Step(Head(W, v), known=known, unknowns=unknowns)

    def _doubtful(self, model: Head, count: int, factor: float, stream: torch.Generator) -> Tensor:
        """Of many questions those that the model is least sure of."""
        pool = self._draw(_CHOICE * count, model.dim, factor, stream)
        return pool[model(pool).abs().argsort()[:count]]


def _fitted(X: Tensor, y: Tensor, W: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest minimum of the logistic loss, by L-BFGS."""
    W, v = W.clone().requires_grad_(), v.clone().requires_grad_()
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
    return W.detach(), v.detach()


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
