"""The width behind many answers: where their singular values fall off a cliff, and onto what.

Answers without rounding, as rows of Y (n, m), have rank r: behind r singular values come zeros.
What is printed has errors. Those of rounding to a step s are known, of standard deviation
σ = s/√12, and the singular values of n × m such errors end at about σ·(√n + √m) (Marchenko and
Pastur), so that whatever stands out beyond that is not rounding. Other errors (float32, a server's
own arithmetic) differ from row to row; there the cliff must be steep, and the ground behind it flat
beside it: singular values of answers alone decay smoothly, and have no cliff while n ≤ r. A steep
cliff is looked for first, since answers of six digits may have other errors that are larger.

Subtracting the mean answer tells whether they share a constant: all of them lie on one plane
through the origin, of dimension r, or on one beside it, of dimension r − 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_STEEP = 10.0  # a cliff, where nothing is known of the errors
_STEEP_KNOWN = 1.3  # where they are those of rounding
_BEYOND = 1.1  # of the largest singular value that rounding can have
_BLOCK = 32
_DECIMALS = 6
_FLOAT32 = 2.0**-23


@dataclass(frozen=True)
class Cliff:
    """`rank` singular values stand out: the last of them, and the first of the others.

    `seen` says that the fall between them is a cliff. If not, there are `rank` directions or more.
    `constant` says that the mean answer has one of them to itself. `blocks` come from arithmetic in
    blocks of 32 numbers (oracle/output_matrix.py): one for each, far below the others.
    """

    rank: int
    above: float
    below: float
    seen: bool
    constant: bool = False
    blocks: int = 0


def cliff(answers: Tensor, spare: int, step: float | None = None) -> Cliff:
    """The cliff of answers (n, m), at least `spare` before the last; `step` of their rounding."""
    n, m = answers.shape
    sizes = torch.linalg.svdvals(answers)
    floor = float(sizes[0]) * torch.finfo(sizes.dtype).eps * max(n, m)
    sizes = sizes.clamp(min=max(floor, torch.finfo(sizes.dtype).tiny))
    values: list[float] = sizes.tolist()
    found = _steepest(values, spare)
    if not found.seen and step is not None:
        edge = _BEYOND * step / math.sqrt(12) * (math.sqrt(n) + math.sqrt(m))
        found = _beyond(values, edge, spare)
    if not found.seen:
        return found
    without = torch.linalg.svdvals(answers - answers.mean(0))
    level = math.sqrt(found.above * found.below)
    constant = int((without > level).sum()) < found.rank
    blocks = _blocks(values, found.rank, int(constant))
    return replace(found, constant=constant, blocks=blocks)


def _blocks(values: list[float], rank: int, constant: int) -> int:
    """How many of the directions are one for each 32 of the others, behind a fall of their own."""
    blocks, rest = divmod(rank - constant, _BLOCK + 1)
    width = blocks * _BLOCK + constant
    there = blocks and not rest and values[width - 1] >= _STEEP * values[width]
    return blocks if there else 0


def _steepest(values: list[float], spare: int) -> Cliff:
    """The steepest fall, if the ground behind it is flatter than the fall is steep."""
    ratios = [values[i] / values[i + 1] for i in range(len(values) - spare)]
    falls = [
        (ratio, i + 1)
        for i, ratio in enumerate(ratios)
        if ratio >= _STEEP and (values[i + 1] / values[-1]) ** 2 <= ratio * _STEEP
    ]
    if not falls:
        return Cliff(len(values), values[-1], 0.0, seen=False)
    rank = max(falls)[1]
    return Cliff(rank, values[rank - 1], values[rank], seen=True)


def _beyond(values: list[float], edge: float, spare: int) -> Cliff:
    rank = sum(value > edge for value in values)
    if rank in (0, len(values)):
        return Cliff(rank, values[rank - 1] if rank else 0.0, 0.0, seen=False)
    steep = values[rank - 1] >= _STEEP_KNOWN * values[rank]
    return Cliff(rank, values[rank - 1], values[rank], seen=steep and len(values) - rank >= spare)


def decimals_of(answers: Tensor) -> int | None:
    """To how many digits after the point answers are rounded; None where they are not.

    A number that went through float32 is off its digits by its own rounding.
    """
    for decimals in range(_DECIMALS + 1):
        shifted = answers * 10.0**decimals
        allowed = (shifted.abs() * _FLOAT32).clamp(min=1e-7)
        if float(allowed.max()) > 0.05:  # there anything is nearly a whole number
            return _exact_decimals(answers, decimals)
        if bool(((shifted - shifted.round()).abs() <= allowed).all()):
            return decimals
    return None


def _exact_decimals(answers: Tensor, least: int) -> int | None:
    """The same for numbers that kept float64."""
    for decimals in range(least, _DECIMALS + 1):
        shifted = answers * 10.0**decimals
        if bool(((shifted - shifted.round()).abs() <= 1e-7).all()):
            return decimals
    return None
