"""A block of a mixed cache against all of its tokens at once: least squares, for coarse rounding.

The equations are those of mixed.py. Where the rounding of a block hides some of its directions
(Qwen's keys in bfloat16: a bias a hundred times as large as what tokens add, and A ten times as
large as that), its span is no longer known and x M W = 0 says little of one token. The rows of all
its tokens together still have to give its numbers,

    Y_ij = Σ_r C_ir (x_r M)_j + Σ_k C_ik z_kj + ε_ij,

with C (b, n + k) free and z the few directions that are not the tokens': the row under A, and those
that fill the block up. Every number's own deviation s_ij is known, from its exponent, and what was
rounded before the mix adds to it: so the squares of ε / s sum to a chi-square of (b − k)(d − n − k)
dimensions for the right tokens in the right order. M is solved for by the same squares, alternating
between C, z and M, each of which the others give by a linear equation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_RIDGE = 1e-12  # of the diagonal: rows may be zero
_AT_ONCE = 64  # arrangements of a block, for memory's sake
_ROUNDS = 40  # of solving for C and z, at most …
_STILL = 0.1  # … until the squares fall by less


def planes(rows: Tensor) -> Tensor:
    """Rows (…, d) as complex numbers (…, d/2), one for each plane that M turns."""
    return torch.complex(*rows.unflatten(-1, (2, -1)).unbind(-2))


def _real(numbers: Tensor) -> Tensor:
    return torch.cat([numbers.real, numbers.imag], -1)


def _coefficients(block: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """C (h, b, n): a block (b, d) by rows (h, n, d), each number of it with its own weight."""
    weighted = rows[:, None] * weights[:, None]
    gram = weighted @ rows[:, None].mT
    _ridge(gram)
    return torch.linalg.solve(gram, weighted @ block[..., None])[..., 0]


def _ridge(gram: Tensor) -> None:
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += _RIDGE * (diagonal + diagonal.mean(-1, keepdim=True))


def directions(block: Tensor, rows: Tensor, count: int) -> Tensor:
    """The largest directions (k, d) of a block that rows (n, d) do not span."""
    base = torch.linalg.qr(rows.mT)[0]
    return torch.linalg.svd(block - block @ base @ base.mT, full_matrices=False)[2][:count]


def fitted(
    block: Tensor, spread: Tensor, rows: Tensor, free: Tensor, rounds: int = _ROUNDS
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of squares (h,) of a block (b, d) by tokens' rows x M (h, n, d); C and z as well.

    It starts from directions z (k, d). What z has of the tokens' rows is up to C: it is returned
    as it is if the columns of C are orthogonal, as S has them, so that it is good for other tokens.
    """
    weights = spread.square().reciprocal()
    free, cost = free.expand(len(rows), -1, -1), torch.inf
    for _ in range(rounds if free.shape[1] else 0):
        every = torch.cat([rows, free], 1)
        found = _coefficients(block, weights, every)
        before, cost = cost, float(((block - found @ every).square() * weights).sum())
        if before - cost < _STILL * len(rows):
            break
        own, other = found.split([rows.shape[1], free.shape[1]], -1)
        left = (block - own @ rows) * weights
        gram = (other.mT[:, :, None] * other.mT[:, None]) @ weights  # (h, k, k, d)
        free = torch.linalg.solve(gram.movedim(-1, 1), (other.mT @ left).mT[..., None])[..., 0].mT
    every = torch.cat([rows, free], 1)
    found = _coefficients(block, weights, every)
    own, other = found.split([rows.shape[1], free.shape[1]], -1)
    along = torch.linalg.lstsq(other, own).solution if free.shape[1] else other.mT @ own
    cost = ((block - found @ every).square() * weights).sum((1, 2))
    return cost, found, free + along @ rows


def squares(block: Tensor, spread: Tensor, rows: Tensor, free: Tensor) -> Tensor:
    """The sums of squares (h,) for many arrangements' rows (h, n, d), near one that gave z."""
    each = [fitted(block, spread, part, free, 1)[0] for part in rows.split(_AT_ONCE)]
    return torch.cat(each)


def exchanged(block: Tensor, spread: Tensor, rows: Tensor, free: Tensor, others: Tensor) -> Tensor:
    """Sums of squares (n, c), each of rows (n, d) exchanged for each of its others (n, c, d)."""
    weights, every = spread.square().reciprocal(), torch.cat([rows, free])
    found = _coefficients(block, weights, every[None])[0]
    left = block - found @ every
    every = torch.nn.functional.normalize(every, dim=-1)
    weighted = every * weights[:, None]  # (b, n + k, d)
    gram, made = weighted @ every.mT, list[Tensor]()
    for place, given in enumerate(others):
        kept = torch.arange(len(every)) != place
        aim = left + found[:, place, None] * rows[place]  # what the others do not explain
        right, inside = weighted[:, kept] @ aim[..., None], weighted[:, kept] @ given.mT
        solution = torch.linalg.solve(gram[:, kept][:, :, kept], torch.cat([right, inside], -1))
        mine, theirs = solution.split([1, len(given)], -1)  # (b, n + k - 1, c)
        least = (aim.square() * weights).sum() - (mine * right).sum()
        length = weights @ given.square().mT - (inside * theirs).sum(1)
        along = (weights * aim) @ given.mT - (inside * mine).sum(1)
        made.append(least - (along.square() / length.clamp(min=1e-9)).sum(0))
    return torch.stack(made)


def turned(
    blocks: Sequence[Tensor], spreads: Sequence[Tensor], rows: Sequence[Tensor], free: int,
    start: Tensor, rounds: int,
) -> tuple[Tensor, float]:  # fmt: skip
    """M as complex numbers (d/2,), all of length 1, from `start`, and the mean square it leaves.

    Of each block (b, d) all tokens that show are given by their rows (n, d), and how many
    directions are free.
    """
    found, left, count = torch.sgn(start), 0.0, 0
    for _ in range(rounds):
        over, under, left, count = torch.zeros_like(start), torch.zeros(len(start)), 0.0, 0
        for block, spread, given in zip(blocks, spreads, rows, strict=True):
            made = _real(planes(given) * found)
            cost, mix, _ = fitted(block, spread, made[None], directions(block, made, free), 1)
            left += float(cost)
            count += (len(block) - free) * (made.shape[1] - mix.shape[2])
            own, other = mix[0].to(found.dtype).split([len(given), free], -1)
            weights = planes(spread).abs().square().reciprocal()  # of both numbers of a plane
            base = other[None] * weights.sqrt().mT[..., None]  # (d/2, b, k)
            base = torch.linalg.qr(base)[0] if free else base

            def apart(numbers: Tensor, base: Tensor = base, weights: Tensor = weights) -> Tensor:
                weighted = (numbers * weights.sqrt()).mT[..., None]
                return (weighted - base @ (base.mH @ weighted))[..., 0]

            one, whole = apart(own @ planes(given)), apart(planes(block))
            over = over + (one.conj() * whole).sum(-1)
            under = under + one.abs().square().sum(-1)
        found = torch.sgn(over / under)
    return found, left / count
