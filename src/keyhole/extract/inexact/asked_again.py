"""What a proof rests on, asked once more in other words: answers within ±τ, labels that are right.

The same sequence two and three times over, or a token twice as long where only its sign counts, is
the same to a head and another question to whoever blurs the answers or flips the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from keyhole.extract.bilinear import batch_rows, scalar
from keyhole.extract.inexact.gauss_newton import Pairs, Singles
from keyhole.extract.inexact.halfspace import signs
from keyhole.oracle.protocol import Oracle, ask

_COPIES = (2, 3)  # of every token: the attention to each of them stays
_FACTORS = (0.5, 2.0)  # of a token: the sign of its score stays, without rounding
_ARRANGEMENTS = ([0, 0, 1, 1], [1, 0, 0, 1])  # of a pair: the attention to each token stays


def asked_again(
    oracle: Oracle, asked: Sequence[Singles | Pairs], tolerance: float, precision: float
) -> tuple[int, int]:
    """How many answers are further off than 2τ (and rounding), of how many.

    Two answers more than 2τ apart cannot both be within τ of one truth.
    """
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


def labels_again(
    oracle: Oracle, tokens: Tensor, positive: Tensor, pairs: Tensor, above: Tensor
) -> tuple[int, int]:
    """How many labels differ, of how many: of single tokens (m, d) and of pairs (k, 2, d)."""
    singles = [signs(oracle, factor * tokens.unsqueeze(1)) != positive for factor in _FACTORS]
    doubles = [signs(oracle, pairs[:, order]) != above for order in _ARRANGEMENTS]
    differ = torch.cat([*singles, *doubles])
    return int(differ.sum()), len(differ)
