"""Is every answer within ±τ? Each question once more, in other words.

The same sequence two and three times over is the same to a head and another question to whoever
blurs the answers. Two answers more than 2τ apart cannot both be within τ of one truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from keyhole.extract.bilinear import batch_rows, scalar
from keyhole.extract.inexact.gauss_newton import Pairs, Singles
from keyhole.oracle.protocol import Oracle, ask

_COPIES = (2, 3)  # of every token: the attention to each of them stays


def asked_again(
    oracle: Oracle, asked: Sequence[Singles | Pairs], tolerance: float, precision: float
) -> tuple[int, int]:
    """How many answers are further off than 2τ (and rounding), of how many."""
    dim, against, count = oracle.dim, 0, 0
    size = batch_rows(2 * max(_COPIES), dim)
    for part in asked:
        rounding = (4 * dim + 16) * precision * part.answers.abs().max()
        for copies, start in product(_COPIES, range(0, len(part.answers), size)):
            rows = slice(start, start + size)
            again = scalar(ask(oracle, part.questions(rows).repeat(1, copies, 1)))
            off = (again - part.answers[rows]).abs()
            against += int((off > 2 * tolerance + rounding).sum())
            count += len(again)
    return against, count
