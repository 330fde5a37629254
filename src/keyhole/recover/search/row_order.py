"""Which position a row of hidden states belongs to, where rows leaked in no order.

A position leaves its mark on a row, whatever stands there. The attacker runs random texts through
the model; with μ_p the mean of the rows at position p and C the covariance of rows around the mean
of their position, a row h is at p with likelihood N(h; μ_p, C) (Fisher's linear discriminant), and
the order is the assignment of rows to positions of least total

    D(i, p) = (h_i − μ_p)ᵀ C⁻¹ (h_i − μ_p).

C⁻¹ looks past the directions in which tokens differ. Once there are tokens for an order, the model
itself says what a row would be but for its position: with f_i what it gives for row i's token at
the position q_i that the row was put to,

    D(i, p) = r ᵀ R⁻¹ r,   r = (h_i − μ_p) − (f_i − μ_{q_i}),

where the token is gone from the difference. R is the covariance of such r between random texts and
the same with tokens exchanged, and a small part of C for tokens that are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.numerics import with_ridge
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.search.inverse_map import random_texts

_RIDGE = 1e-5
_AT_ONCE = 2048  # tokens in one pass
_INSIDE = 4  # tokens of the shortest random text between what opens and what closes it
_SHORTER = 16  # random texts of each of three lengths
_EXCHANGED = 0.3  # of the tokens of a random text change places with one that is near
_WRONG = 0.01  # of C that is added to R


@dataclass(frozen=True, eq=False)
class Places:
    """`means` (n, d) of the rows at each position, `plain` C⁻¹ and `corrected` R⁻¹ (d, d).

    `ends` is what the special tokens that close a text add to the mean of their positions.
    """

    means: Tensor
    ends: Tensor
    plain: Tensor
    corrected: Tensor
    passes: int

    def order(self, rows: Tensor) -> Tensor:
        """The row (n,) at each position, from the rows (n, d) alone."""
        means = self.means[: len(rows)].clone()
        means[len(means) - len(self.ends) :] += self.ends[-len(means) :]
        return assigned(_distances(rows, means, self.plain))

    def reordered(self, rows: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """The same for `rows` in a tried order, of which the model gives `given` (n, d) there.

        With it by how much the distance rises (n − 1,) if a row and the next one change places.
        """
        means = self.means[: len(rows)]
        costs = _distances(rows.double() - given + means, means, self.corrected)
        here, after = costs.diagonal(), costs.diagonal(1) + costs.diagonal(-1)
        return assigned(costs), (after - here[1:] - here[:-1]).nan_to_num(torch.inf)


def _distances(rows: Tensor, means: Tensor, precision: Tensor) -> Tensor:
    """D (rows, positions), up to a constant for each row."""
    pull = means @ precision
    return (pull * means).sum(-1) - 2 * rows.to(means) @ pull.T


def assigned(costs: Tensor) -> Tensor:
    """The row (n,) at each position for costs (rows, positions); rows of NaN fill what is left."""
    seen = costs.isfinite().all(-1).cpu()
    from scipy.optimize import linear_sum_assignment  # on demand: no other attack needs it

    rows = seen.nonzero().flatten()
    chosen, places = linear_sum_assignment(costs.cpu()[rows].numpy())
    order = torch.full((len(costs),), -1)
    order[torch.as_tensor(places)] = rows[torch.as_tensor(chosen)]
    order[order < 0] = (~seen).nonzero().flatten()
    return order


@torch.no_grad()
def places(target: Target, exposure: Exposure, length: int, samples: int, seed: int) -> Places:
    """Fit positions up to `length`, from about `samples` random tokens.

    Most of them in texts of that length, a few in shorter ones, for what closes a text.
    """
    stream = torch.Generator().manual_seed(seed)
    opening, closing = (len(side) for side in target.frame())
    least = opening + closing + _INSIDE
    # So long that any token may stand at every position of a text, its last ones too.
    longest = min(max(length, least) + closing, target.parts.max_length)
    lengths = sorted({least + (longest - least) * part // 4 for part in (1, 2, 3)} - {longest})
    few = [random_texts(target, _SHORTER, shorter, stream) for shorter in lengths]
    ids = random_texts(target, max(8, -(-samples // longest)), longest, stream)
    rows = _run(target, exposure, ids)
    means = rows.mean(0)
    around = (rows - means)[:, opening : longest - closing].flatten(0, 1)
    ends = _ends(target, exposure, few, means, closing)
    spread = around.T @ around / len(around)
    left = _left_over(target, exposure, ids, rows, means, stream)
    between = left.T @ left / len(left) + _WRONG * spread
    passes = 2 * len(ids) + _SHORTER * len(few)
    return Places(means, ends, _inverse(spread), _inverse(between), passes)


def _run(target: Target, exposure: Exposure, ids: Tensor) -> Tensor:
    """Rows (b, n, d) of random texts."""
    device, size = target.parts.device, max(1, _AT_ONCE // ids.shape[1])
    return torch.cat([
        capture(target.model, exposure, ids=part.to(device))["values"].double()
        for part in ids.split(size)
    ])  # fmt: skip


def _ends(
    target: Target, exposure: Exposure, texts: list[Tensor], means: Tensor, closing: int
) -> Tensor:
    """What (closing, d) the last tokens of texts add to what others give at their positions."""
    added = means.new_zeros(closing, means.shape[1])
    for ids in texts:
        last = slice(ids.shape[1] - closing, ids.shape[1])
        added += (_run(target, exposure, ids)[:, last].mean(0) - means[last]) / len(texts)
    return added


def _left_over(
    target: Target, exposure: Exposure, ids: Tensor, rows: Tensor, means: Tensor,
    stream: torch.Generator,
) -> Tensor:  # fmt: skip
    """What (m, d) a row differs by from its token's in the same text with tokens exchanged."""
    opening, closing = (len(side) for side in target.frame())
    moved = _exchanged(len(ids), ids.shape[1], opening, closing, stream)
    other = _run(target, exposure, ids.gather(1, moved)) - means
    places = moved.to(rows.device)[..., None].expand_as(rows)
    own = (rows - means).gather(1, places)  # of the token that came to stand here
    return (other - own)[:, opening : len(means) - closing].flatten(0, 1)


def _inverse(covariance: Tensor) -> Tensor:
    return torch.linalg.inv(with_ridge(covariance, _RIDGE))


def _exchanged(
    count: int, length: int, opening: int, closing: int, stream: torch.Generator
) -> Tensor:
    """Orders (count, length) in which some tokens changed places with one of the next three."""
    orders = torch.arange(length).repeat(count, 1)
    each = torch.arange(count)
    for place in range(opening, length - closing - 3):
        swap = torch.rand(count, generator=stream) < _EXCHANGED / 2
        other = place + 1 + torch.randint(3, (count,), generator=stream)
        here, there = orders[each, place].clone(), orders[each, other].clone()
        orders[each, place] = torch.where(swap, there, here)
        orders[each, other] = torch.where(swap, here, there)
    return orders
