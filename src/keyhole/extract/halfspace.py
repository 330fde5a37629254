"""The direction of v from the signs of single tokens: learning a halfspace (Appendix B).

*Provably Learning Attention with Queries* (arXiv 2601.16873) averages signs, and its
error falls with the root of the number of queries (sign_only_as_published.py). Here
every query is a step of a bisection, and gains a bit of one coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from keyhole.core import mismatch, not_applicable, not_identifiable
from keyhole.core.float64 import EPSILON, Stream, ones, zeros
from keyhole.extract.bilinear import ask_scores, lengths, normalized, random_orthogonal
from keyhole.oracle.protocol import Oracle

EPSILON = EPSILON
_LEVELS = 200  # of bisection: a bound, since an oracle may answer anything


def signs(oracle: Oracle, sequences: Tensor) -> Tensor:
    """Return which of the scores are positive."""
    answers = ask_scores(oracle, sequences)
    if not ((answers == 0) | (answers == 1)).all():
        raise not_applicable("the answers are no signs: each must be 1.0 or 0.0")
    return answers == 1


class Ratios:
    """v by bisection of `q_iᵀv / q_kᵀv` in [0, 1], for an orthonormal basis turned towards v."""

    def __init__(self, oracle: Oracle, stream: Stream) -> None:
        self._oracle = oracle
        Q = random_orthogonal(oracle.dim, stream)
        Q = torch.where(self._positive(Q)[:, None], Q, -Q)
        towards = Q.sum(0)  # vᵀ of it is Σ|q_iᵀv| > 0, unless v = 0
        with_v, against_v = self._positive(torch.stack([towards, -towards]))
        if not with_v and not against_v:
            raise not_identifiable("v = 0: no score is positive, whatever W may be")
        if against_v:
            raise mismatch(
                "the signs of single tokens are not those of a linear function"
            )
        largest = self._largest(Q)
        self._top = Q[largest]
        self._Q = torch.cat([Q[:largest], Q[largest + 1 :]])
        self._low = zeros(len(self._Q))
        self._high = ones(len(self._Q))

    @property
    def _raw(self) -> Tensor:
        return self._top + (self._low + self._high) / 2 @ self._Q

    @property
    def v(self) -> Tensor:
        return normalized(self._raw)

    @property
    def error(self) -> float:
        """A bound on ‖v̂ − v‖: the sine of the angle is at most the error over the length."""
        error = float(lengths(self._high - self._low)) / 2
        sine = min(1.0, error / float(lengths(self._raw)))
        return 2 * math.sin(math.asin(sine) / 2) + len(self._top) * EPSILON

    def sharpen(self, error: float) -> None:
        """Bisect until `self.error` is at most `error`."""
        norm = float(lengths(self._raw))
        width = 2 * error * (norm - error) / math.sqrt(max(1, len(self._Q)))
        width = max(width, 4 * EPSILON)

        def above(rows: Tensor, middle: Tensor) -> Tensor:
            return self._positive(self._Q[rows] - middle[rows, None] * self._top)

        for _ in bisect(self._low, self._high, lambda: width, centre, above):
            pass

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return both ends of every bracket: after a wrong label, the truth is outside of one."""
        low = self._Q - self._low[:, None] * self._top  # as in `sharpen`
        high = self._Q - self._high[:, None] * self._top
        tokens = torch.cat([self._top[None], low, high])
        return tokens, torch.arange(len(tokens)) <= len(low)

    def _positive(self, tokens: Tensor) -> Tensor:
        return signs(self._oracle, tokens[:, None])

    def _largest(self, Q: Tensor) -> int:
        """Find the largest q_iᵀv by a tournament: d − 1 queries in log₂ d batches."""
        left = torch.arange(len(Q))
        while len(left) > 1:
            half = len(left) // 2
            a = left[:half]
            b = left[half : 2 * half]
            winners = torch.where(self._positive(Q[a] - Q[b]), a, b)
            left = torch.cat([winners, left[2 * half :]])
        return int(left[0])


def centre(low: Tensor, high: Tensor) -> Tensor:
    return low + (high - low) / 2


def bisect(
    low: Tensor,
    high: Tensor,
    width: Callable[[], Tensor | float],
    split: Callable[[Tensor, Tensor], Tensor],
    above: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[int]:
    """Narrow brackets in place, all at once, until none exceeds `width()`; yield each level."""
    for level in range(_LEVELS):
        rows = (high - low > width()).nonzero()[:, 0]
        if not len(rows):
            return
        middle = split(low, high)
        upper = above(rows, middle)
        low[rows] = torch.where(upper, middle[rows], low[rows])
        high[rows] = torch.where(upper, high[rows], middle[rows])
        yield level
