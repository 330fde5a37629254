"""All kinks of a piecewise linear function on one half circle.

A function that is linear between hyperplanes through the origin is, along
`x(θ) = a cos θ + b sin θ`, a piece `p cos θ + q sin θ` between kinks. A generic line crosses every
hyperplane once, possibly far out; on the half circle, its projective form, nothing is at infinity.
An even function has E(θ + π) = E(θ), so the half circle closes and has no ends to treat apart.

The search asks one batch a level. Three neighbouring answers that fit one piece settle the two
arcs between them. Where an arc stays open between two settled ones, their pieces meet in it at
some angle: the kink, if there is only one. The next questions stand just before and just after
that angle; if each still fits its piece, the arc between them is the kink, known to rounding
without a long bisection. The meeting point itself would be a poor witness: two kinks of opposite
sign can lie both on the same side of it, and then it fits both pieces. Other open arcs are halved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful

_FIRST = 16  # points of the first level
_LEVELS = 64
_FINEST = 1e-10  # arcs shorter than this are not divided: what is in them counts as one kink
_REACH = 0.05  # an arc is settled by a neighbour at least this long in comparison
_LONGER = 4.0
_CLEAR = 1e3  # how far beside a kink to ask: there its two pieces differ by so many tolerances


@dataclass(frozen=True)
class Pieces:
    """Kinks in rising order; piece j runs from kink j to the next, the last to kinks[0] + π.

    `planar` (m, 2) holds p and q of each piece, for angles between kinks[0] and kinks[0] + π.
    """

    kinks: Tensor
    planar: Tensor

    @property
    def widths(self) -> Tensor:
        return torch.cat([self.kinks[1:], self.kinks[:1] + math.pi]) - self.kinks


def find_pieces(
    values: Callable[[Tensor], Tensor], tolerance: Callable[[Tensor], float], limit: int
) -> Pieces:
    """Every kink of `values`, a function of angles with period π.

    `tolerance` says, for the answers so far, how far from a piece they may lie and be on it. More
    than `limit` kinks end the search.
    """
    t = (torch.arange(_FIRST, dtype=torch.float64) + 0.5) * (math.pi / _FIRST)
    y = values(t)
    for _ in range(_LEVELS):
        search = _Search(t, y, tolerance(y))
        t_new = search.next_points()
        if not len(t_new):
            return search.pieces()
        if len(t_new) > 4 * limit + _FIRST:
            break
        t, order = torch.cat([t, t_new]).sort()
        y = torch.cat([y, values(t_new)])[order]
    raise Unsuccessful(
        Status.MISMATCH, f"the answers bend in more than {limit:,} places of a half circle"
    )


class _Search:
    """What the answers so far say: which arcs are settled, and where to ask next.

    Arc i runs from point i to the next, the last one round to the first.
    """

    def __init__(self, t: Tensor, y: Tensor, tolerance: float) -> None:
        self._t, self._y, self._tolerance = t, y, tolerance
        self._arcs = (t.roll(-1) - t).remainder(math.pi)
        before, after = self._arcs.roll(1), self._arcs
        chord = (y.roll(1) * after.sin() + y.roll(-1) * before.sin()) / (before + after).sin()
        self._straight = (y - chord).abs() <= tolerance
        by_left = self._straight & (before >= _REACH * after)
        by_right = self._straight.roll(-1) & (after.roll(-1) >= _REACH * after)
        self._settled = by_left | by_right
        between = self._settled.roll(1) & self._settled.roll(-1) & ~self._settled
        meeting, self._bend = self._meetings()
        # Short neighbours say too little about their pieces to tell a kink from rounding.
        doubt = 4 * tolerance * (1 / before + 1 / after.roll(-1))
        self._meets = between & (meeting > 0) & (meeting < after) & (self._bend > doubt)
        self._meeting = torch.where(self._meets, meeting, after / 2)
        sharp = self._meets & (self._bend * after <= 4 * _CLEAR * tolerance)
        self._bridge = ~self._settled & (sharp | (after <= _FINEST))

    def _meetings(self) -> tuple[Tensor, Tensor]:
        """How far past point i the pieces before and after arc i meet, and how they differ."""
        # With angles counted from point i, both pieces are `p cos + q sin`.
        p, back, turn = self._y, self._arcs.roll(1), self._arcs
        q = (p * back.cos() - p.roll(1)) / back.sin()
        value, on = self._y.roll(-1), self._arcs.roll(-1)
        slope = (self._y.roll(-2) - value * on.cos()) / on.sin()
        p_far = value * turn.cos() - slope * turn.sin()
        q_far = value * turn.sin() + slope * turn.cos()
        angle = torch.atan2(p_far - p, q - q_far).remainder(math.pi)
        return angle, torch.hypot(p_far - p, q_far - q)

    def next_points(self) -> Tensor:
        """Two points beside each meeting, and the middle of every other open arc."""
        meets = self._meets & ~self._bridge
        halved = ~(self._settled | self._bridge | self._meets | self._waiting())
        start, at, length = self._t[meets], self._meeting[meets], self._arcs[meets]
        aside = _CLEAR * self._tolerance / self._bend[meets]
        left = torch.maximum(at - 2 * aside, at / 2)  # uneven: half way must not be the kink
        right = torch.minimum(at + aside, (at + length) / 2)
        middles = self._t[halved] + self._arcs[halved] / 2
        return torch.cat([start + left, start + right, middles]).remainder(math.pi)

    def _waiting(self) -> Tensor:
        """Open arcs beside a much longer open one, which once divided may settle them."""
        open_arcs = torch.where(self._settled, 0.0, self._arcs)
        return torch.maximum(open_arcs.roll(1), open_arcs.roll(-1)) > _LONGER * self._arcs

    def pieces(self) -> Pieces:
        # A kink may also have hit a point: both arcs beside it are settled, yet it is no bridge.
        hit = ~self._straight & ~self._bridge & ~self._bridge.roll(1)
        (i,) = (hit | self._bridge).nonzero(as_tuple=True)
        kinks = self._t[i] + torch.where(hit, 0.0, self._meeting)[i]
        if not len(i):
            return Pieces(kinks, kinks.reshape(0, 2))
        kinks = kinks[0] + (kinks - kinks[0]).remainder(math.pi)
        t = kinks[0] + (self._t - kinks[0]).remainder(math.pi)
        return Pieces(kinks, _fit(kinks, t, self._y))


def _fit(kinks: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """Least squares for each piece on its points."""
    m = len(kinks)
    ends = torch.cat([kinks[1:], kinks[:1] + math.pi])
    middles, reach = (kinks + ends) / 2, torch.sin((ends - kinks) / 2)
    piece = torch.searchsorted(kinks, t, right=True) - 1
    # Counted from the middle and in units of the width, the two unknowns hardly mix.
    angle = t - middles[piece]
    rows = torch.stack([angle.cos(), angle.sin() / reach[piece]], 1)
    normal = torch.zeros(m, 2, 2, dtype=torch.float64)
    normal.index_add_(0, piece, rows.unsqueeze(2) * rows.unsqueeze(1))
    moment = torch.zeros(m, 2, dtype=torch.float64).index_add_(0, piece, rows * y.unsqueeze(1))
    p, q = (torch.linalg.pinv(normal) @ moment.unsqueeze(2)).squeeze(2).unbind(1)
    c, s, q = middles.cos(), middles.sin(), q / reach
    return torch.stack([c * p - s * q, s * p + c * q], 1)
