"""Answers to `[a ; C]` for many first tokens a beside the same others C, and to C alone.

With u = Wb for the last token b, and A the attention of each token,

    f = Σ_i A_i·vᵀx_i,   ∂f/∂(x_iᵀu) = A_i·(vᵀx_i − f),   ∂f/∂(vᵀx_i) = A_i,

which is what least squares on all answers (inexact/gauss_newton.py) needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.numerics import least_squares
from keyhole.extract.inexact.gauss_newton import Linear, Theta

_STEPS = 200


@dataclass(frozen=True)
class Beside:
    """First tokens (s, m, d) beside others (s, k, d), of which the last is b, in s sets.

    `answers` (s, m + 1) are those to `[a ; C]`, and in the end of a row the one to C alone.
    """

    tokens: Tensor
    others: Tensor
    answers: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Beside]) -> Beside:
        """Several of the same sizes as one."""
        columns = zip(*((p.tokens, p.others, p.answers) for p in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))

    def residual(self, theta: Theta) -> Tensor:
        first, rest = self._attention(theta)
        return self._answer(theta, first, rest) - self.answers

    def at(self, theta: Theta) -> Linear:
        v, _ = theta
        first, rest = self._attention(theta)
        answer = self._answer(theta, first, rest)
        firsts, others, last = self._firsts, self.others, self.others[:, -1]
        on_first = first * (firsts @ v - answer)
        on_rest = rest * ((others @ v)[:, None] - answer[..., None])

        def push(change: Theta) -> Tensor:
            dv, dW = change
            du = (last @ dW.mT)[..., None]
            moved = on_first * (firsts @ du)[..., 0] + (on_rest @ (others @ du))[..., 0]
            return moved + first * (firsts @ dv) + (rest @ (others @ dv)[..., None])[..., 0]

        def pull(r: Tensor) -> Theta:
            each = r[..., None]
            du = firsts.mT @ (on_first[..., None] * each) + others.mT @ (on_rest.mT @ each)
            dv = firsts.mT @ (first[..., None] * each) + others.mT @ (rest.mT @ each)
            return dv[..., 0].sum(0), du[..., 0].mT @ last

        return Linear(answer - self.answers, push, pull)

    @property
    def _firsts(self) -> Tensor:
        """The first tokens, and a zero where there is none."""
        return torch.cat([self.tokens, torch.zeros_like(self.tokens[:, :1])], 1)

    def _attention(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """A of the first tokens (s, m + 1), 0 where there is none; of the others (s, m + 1, k)."""
        u = (self.others[:, -1] @ theta[1].mT)[..., None]
        none = torch.full_like(self.answers[:, :1], -math.inf)
        scores = torch.cat([(self.tokens @ u)[..., 0], none], 1)
        beside = (self.others @ u).mT.expand(-1, scores.shape[1], -1)
        A = torch.cat([scores[..., None], beside], -1).softmax(-1)
        return A[..., 0], A[..., 1:]

    def _answer(self, theta: Theta, first: Tensor, rest: Tensor) -> Tensor:
        v = theta[0]
        return first * (self._firsts @ v) + (rest @ (self.others @ v)[..., None])[..., 0]


def fit_values(asked: Beside) -> tuple[Tensor, float]:
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

    damping = 1e-2
    residual, J = at(theta)
    for _ in range(_STEPS):
        square, pull = J.mT @ J, J.mT @ residual
        step = torch.linalg.solve(square + damping * torch.diag(square.diagonal()), pull)
        ahead, slopes = at(theta - step)
        if float(ahead @ ahead) < float(residual @ residual):
            theta, residual, J, damping = theta - step, ahead, slopes, max(damping / 8, 1e-15)
        else:
            damping *= 4
        if damping > 1e12 or float(step.norm()) <= 1e-14 * float(theta.norm()):
            break
    return theta[d:-1], float(residual.square().mean().sqrt())
