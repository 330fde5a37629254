"""The blocks of a mixed cache: their spans, the secret map from known tokens, and what fits.

`Blocks.cut` takes a `MixedCache`, `solved` finds each head's secret map from the rows
of known tokens, and `fit` says how well the rows of other tokens lie in a block.
mixed.py and block_reader.py read texts with these.

The equations are those of mixed.py: x M W = 0 for the rows x of a block's tokens, with
W the projection on what is outside of the span of its stored rows. A side is the keys,
or the values, of one head: each has its own secret M, and its own place in every block
that the secret row A hides.

**By squares.** Rounding may hide some directions of a block (Qwen's keys in bfloat16: a
bias a hundred times as large as what tokens add, and A ten times as large as that).
Then its span is no longer known, and x M W = 0 says little about a single token. But
the rows of all its tokens must still give its numbers,

    Y_ij = Σ_r C_ir (x_r M)_j + Σ_k C_ik z_kj + ε_ij,

with C (b, n + k) free. The few directions z are not the tokens': the row under A, and
the rows that fill the block. The standard deviation s_ij of every number is known from
its exponent, and what was rounded before the mix adds to it. So for the right tokens in
the right order the squares of ε / s sum to a chi-square of (b − k)(d − n − k)
dimensions. The same squares determine M, by alternating between C, z and M, each of
which follows from the others by a linear equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core.numerics import thin_svd
from keyhole.core.tensors import (
    normalized,
    root_mean_square,
    row_numbers,
    seeded,
    squared_norms,
)
from keyhole.recover.layers.precision import precision_of
from keyhole.recover.leaks import MixedCache

NOWHERE = -1  # the place that A hides, if there is none or it is not known
DEVIATIONS = 6.0  # standard deviations of a chi-square that the right token is granted
HIDDEN = 4.0  # the q above which a head may hide a token
# the most that the q of a head adds to a score, because the head may hide the token
CAP = 30.0
# directions above this multiple of rounding belong to tokens that are missing
LEFT = 4.0
_VECTORS = 16  # random vectors whose products estimate a length to a third
_STRETCH = 2.0  # the largest ‖c‖ of a token: S is orthogonal but for scales
_ENOUGH = 1.25  # equations that are needed for each unknown
_HIDES = 0.9  # A hides a place if the level without it falls to this share
_COARSE = 1.5  # the level above which spans may not be enough …
_SEEN = 0.8  # … if fewer than this share of a block's directions are above rounding
_TURNS = (
    2,
    6,
)  # rounds of solving for M: for each place that A may hide, and for the best place
_REPEATED = 1e-5  # a direction below this share of the largest is a repeated row
_RIDGE = 1e-12  # of the diagonal: rows may be zero
_CHUNK = 64  # arrangements of a block in memory at a time
_ROUNDS = 40  # of solving for C and z, at most
_STILL = 0.1  # the fall of the squares that ends these rounds


def accepted(free: Tensor | float, level: float = 1.0) -> Tensor | float:
    """Return the largest q that a chi-square of `free` dimensions accepts for the right token.

    `level` is the q of known tokens, if it is above 1.
    """
    return max(1.0, level) * (1 + DEVIATIONS * (2 / free) ** 0.5)


def noise_of(block: Tensor) -> float:
    """Return the largest direction that rounding makes in a block (b, d) of unit deviation."""
    return sum(size**0.5 for size in block.shape)


def outside(block: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lengths and directions of what orthonormal columns (d, r) leave of a block."""
    rest = block - block @ base @ base.mT
    return thin_svd(rest)[1:]


def planes(rows: Tensor) -> Tensor:
    """Return rows (…, d) as complex numbers (…, d/2), one for each plane that M rotates."""
    return torch.complex(*rows.unflatten(-1, (2, -1)).unbind(-2))


@dataclass(frozen=True, eq=False)
class Side:
    """The keys, or the values, of one head: its `blocks` (b, d), each row divided by its σ.

    `rows` are the σ (b, 1) of each block, and `spread` (b, d) the standard deviation of
    each number after the division. The tokens' own rows were rounded before they were
    mixed; `fine` is that error as a share of them.
    """

    keys: bool
    head: int
    blocks: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    spread: tuple[Tensor, ...]
    fine: float

    @cached_property
    def sigma(self) -> list[float]:
        """The root mean square of σ in each block."""
        return [float(root_mean_square(each)) for each in self.rows]

    def spreads(self, number: int, rows: Tensor) -> Tensor:
        """Return the deviation (b, d) of a block's numbers, with the rounding of tokens' rows."""
        sizes = planes(rows.double()).abs().square().mean(0).sqrt().repeat(2)
        before = self.fine * sizes / self.rows[number]
        return (self.spread[number].square() + before.square()).sqrt()

    @cached_property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """The singular values (b,) and right singular vectors (b, d) of each block."""
        return [thin_svd(rows)[1:] for rows in self.blocks]

    @cached_property
    def bases(self) -> list[Tensor]:
        """Orthonormal rows (r, d) that span each block, without directions that rounding makes."""
        noise = noise_of(self.blocks[0])
        return [v[sizes > noise] for sizes, v in self.parts]

    @cached_property
    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """W^½ (d, d) and C^½ (d, b) of each block: ‖x W^½‖² is outside of it, and x C^½ is c."""
        made: list[tuple[Tensor, Tensor]] = []
        for sizes, v in self.parts:
            left = 1 / (sizes.square() + 1)
            whole = torch.eye(v.shape[1]).to(v) + (v.mT * (left.sqrt() - 1)) @ v
            made.append((whole, v.mT * (sizes * left)))
        return made

    @cached_property
    def forms(self) -> tuple[Tensor, Tensor]:
        """W and C, each (blocks, d, d)."""
        outer, inner = zip(*self.roots, strict=True)
        squares = [
            torch.stack([root @ root.mT for root in each]) for each in (outer, inner)
        ]
        return squares[0], squares[1]

    @cached_property
    def free(self) -> Tensor:
        """tr W (blocks,): the number of dimensions outside of each block."""
        return self.forms[0].diagonal(dim1=1, dim2=2).sum(-1)


@dataclass(frozen=True, eq=False)
class Map:
    """The solution of one side: M (d, d), and the place of every block that A hides, or NOWHERE.

    `level` is the mean q of the tokens that it was solved from. The map is `coarse` if
    their q are too large for spans, so that it was solved for by squares.
    """

    matrix: Tensor
    hidden: int
    level: float
    coarse: bool = False

    @property
    def hides(self) -> bool:
        """Whether the place that A hides is known."""
        return self.hidden != NOWHERE

    @property
    def start(self) -> tuple[int, Tensor]:
        """The place and M as complex numbers (d/2,), from which it can be solved for again."""
        real = self.matrix.diagonal().chunk(2)[0]
        imaginary = self.matrix.diagonal(len(real))
        return self.hidden, torch.complex(real, imaginary)

    def free(
        self,
        count: int,
        fill: int,
        added: bool,
    ) -> int:
        """Return how many directions of a block with `count` tokens and `fill` rows are no token's.

        `added` says that a row A is added to the blocks of this leak.
        """
        if not fill:
            return int(self.hides)
        # A is on a token, or on a row that fills the block. Is it the only such row?
        return 1 + (added and (NOWHERE < self.hidden < count or fill > 1))

    def misfits(
        self,
        side: Side,
        rows: Tensor,
        number: int,
        turn: Tensor | None = None,
    ) -> Tensor:
        """Return q (c,) of rows (c, d) in block `number`.

        A `turn` (d, d) rotates all rows to a position. It is used for many rows, so
        what is outside is then estimated from products with a few random vectors.
        """
        matrix = self.matrix
        outer, inner = side.roots[number]
        if turn is not None:
            shape = (len(outer), _VECTORS)
            vectors = torch.randn(shape, generator=seeded(number), dtype=outer.dtype)
            matrix = turn @ matrix
            outer = outer @ vectors / _VECTORS**0.5
        lengths, error = (
            squared_norms(rows @ (matrix @ root).to(rows)) for root in (outer, inner)
        )
        # S may stretch rows, but not much: a token of large ‖c‖ is in no block.
        error = error.clamp(max=(_STRETCH * side.sigma[number]) ** 2)
        return lengths / error / float(side.free[number])


def products(rows: Tensor) -> Tensor:
    """Return J (n, d, d) with x M = θ J(x), θ = (α, β)."""
    x, y = torch.diag_embed(rows.double().unflatten(-1, (2, -1))).unbind(1)
    return torch.cat([torch.cat([x, y], -1), torch.cat([-y, x], -1)], -2)


Turn = tuple[
    float, int, Tensor
]  # the mean square that is left, the place that A hides, M


def solved(
    side: Side,
    rows: Tensor,
    places: Tensor,
    block: int,
) -> Map | None:
    """Return M from rows (n, d) of tokens known at `places` (n,).

    None if there are too few tokens, or if rounding leaves fewer directions of their
    blocks than half of their number: where M is not seen in Y (a large A, few bits), it
    fits any tokens. If spans do not do, M is solved for by squares, provided that whole
    blocks are known.
    """
    numbers = places // block
    size = rows.shape[1]
    classes = places % block
    ranks = {number: len(side.bases[number]) for number in numbers.unique().tolist()}
    if 2 * sum(ranks.values()) < len(places.unique()):
        return None
    jacobians = products(rows)
    lengths, errors = (jacobians @ form[numbers] @ jacobians.mT for form in side.forms)
    equations = side.free[numbers]

    def fit(hidden: int, rounds: int = 2) -> Turn | None:
        shown = (classes != hidden).double()
        given = float(equations @ shown)
        if given < _ENOUGH * size:
            return None
        error = errors.diagonal(dim1=1, dim2=2).mean(-1)
        theta = lengths.new_zeros(size)
        for _ in range(rounds):
            sums = torch.einsum("n,nij->ij", shown / error, lengths)
            theta = torch.linalg.eigh(sums)[1][:, 0]
            error = theta @ errors @ theta
        return float((shown / error) @ (theta @ lengths @ theta)) / given, hidden, theta

    whole = fit(NOWHERE)
    if whole is None:
        return None
    theta = whole[2]
    misfits = (theta @ lengths @ theta) / (theta @ errors @ theta)
    means = {
        each: float(misfits[classes == each].mean())
        for each in classes.unique().tolist()
    }
    worst = sorted(means, key=means.__getitem__, reverse=True)
    best = whole
    for tried in (worst[:2], worst[2:]):
        without = [found for each in tried if (found := fit(each)) is not None]
        best = min([best, *without], key=lambda found: found[0])
        if best[0] <= _COARSE:
            break
    if best[0] >= _HIDES * whole[0]:
        best = whole
    level, hidden, theta = best
    found = Map(products((theta * (size / 2) ** 0.5)[None])[0], hidden, level)
    known = [ranks[number] for number in whole_blocks(places, block)]
    if level > _COARSE and min(known, default=block) < _SEEN * block:
        tried = [fit(each, 1) for each in (NOWHERE, *range(block))]
        starts = [(each[1], planes(each[2])) for each in tried if each is not None]
        return by_squares(side, rows, places, block, starts) or found
    return found


def whole_blocks(places: Tensor, block: int) -> list[int]:
    """Return the blocks whose places are all among `places`."""
    numbers = places // block
    return [n for n in numbers.unique().tolist() if (numbers == n).sum() == block]


def by_squares(
    side: Side,
    rows: Tensor,
    places: Tensor,
    block: int,
    starts: Sequence[tuple[int, Tensor]],
) -> Map | None:
    """Return the map by the squares of all whole blocks, from places that A may hide with an M."""
    numbers = whole_blocks(places, block)
    if not numbers or not starts:
        return None
    spreads = {n: side.spreads(n, rows[places // block == n]) for n in numbers}

    def shown(number: int, hidden: int) -> Tensor:
        """Return the rows of a block's tokens that are not at the hidden place."""
        return rows[(places // block == number) & (places % block != hidden)].double()

    def turn(
        hidden: int,
        start: Tensor,
        rounds: int,
        where: list[int],
    ) -> Turn:
        # A may hide a repeated token, whose place the values do not show.
        free = int(hidden != NOWHERE or len(starts) == 1)
        blocks = [
            (side.blocks[n], spreads[n], shown(n, hidden).unique(dim=0)) for n in where
        ]
        found, left = turned(blocks, free, start, rounds)
        return left, hidden, found

    hidden, start = starts[0]
    if len(starts) > 1:
        tried = [turn(*each, _TURNS[0], numbers[:1]) for each in starts]
        _, hidden, start = min(tried, key=lambda each: each[0])
    left, hidden, found = turn(hidden, start, _TURNS[1], numbers)
    if not left < _COARSE:
        return None
    made = Map(products(_real(found)[None])[0], hidden, 1.0, True)
    misfits = [made.misfits(side, shown(n, hidden), n) for n in numbers]
    return replace(made, level=float(torch.cat(misfits).mean()))


class TokenFit(NamedTuple):
    """How well tokens (p, c) lie in their blocks: q by `keys` alone, and by all sides (`whole`).

    `score` compares tokens: minus twice a log-likelihood. `keys_free` and `free` (p, c)
    count the dimensions of the two, 0 if every head hides the position.
    """

    keys: Tensor
    whole: Tensor
    score: Tensor
    keys_free: Tensor
    free: Tensor

    def fits(self, level: float) -> Tensor:
        """Return which tokens (p, c) a chi-square accepts, with known tokens at q = `level`."""
        keys = self.keys <= accepted(self.keys_free, level)
        keys = keys | (self.keys_free == 0)
        return keys & (self.whole <= accepted(self.free, level))


@dataclass(frozen=True, eq=False)
class Blocks:
    """A leak cut into blocks of one size, with the maps that are solved for."""

    leak: MixedCache
    size: int
    sides: Sequence[Side]
    maps: Sequence[Map | None] = ()

    @classmethod
    def cut(cls, leak: MixedCache, sizes: Sequence[int]) -> list[Blocks]:
        """Return the leak in blocks of each of these sizes."""
        heads: list[tuple[bool, int, Tensor, Tensor]] = []
        for name, tensor in leak.tensors.items():
            # Keys and values by themselves: either may be a thousand times as large as
            # the other.
            precision = precision_of(replace(leak, keys=tensor, values=tensor))
            sigmas = precision.sigma.unflatten(-1, (len(tensor), 2, -1))[:, :, 0]
            for head, rows in enumerate(tensor.double()):
                heads.append((name == "keys", head, rows, sigmas[:, head].double()))
        return [
            cls(leak, size, [_side(*head, size) for head in heads]) for size in sizes
        ]

    @property
    def length(self) -> int:
        """The number of positions, with the rows that fill the last block."""
        return self.leak.keys.shape[1]

    @property
    def pairs(self) -> list[tuple[Side, Map]]:
        """The sides whose maps are solved for."""
        pairs = zip(self.sides, self.maps, strict=True)
        return [(side, found) for side, found in pairs if found is not None]

    @property
    def level(self) -> float:
        levels = [each.level for each in self.maps if each is not None]
        return float(torch.tensor(levels or [torch.inf]).median())

    @property
    def silent(self) -> bool:
        """Whether no head's keys have a map, so that no order can be found."""
        return not any(side.keys for side, _ in self.pairs)

    @property
    def coarse(self) -> bool:
        """Whether rounding hides directions of keys but not of values.

        Then values identify the tokens, and squares have to order them.
        """
        coarse = {(side.keys, found.coarse) for side, found in self.pairs}
        return {(True, True), (False, False)} <= coarse

    def fine(self) -> Blocks:
        """Return the blocks without the sides that are coarse."""
        pairs = zip(self.sides, self.maps, strict=True)
        kept = [(side, each) for side, each in pairs if each is None or not each.coarse]
        sides, maps = zip(*kept, strict=True)
        return replace(self, sides=sides, maps=maps)

    def solved(self, rows: Sequence[Tensor], places: Tensor) -> Blocks:
        """Return the blocks with maps from each side's rows (n, d) at `places` (n,)."""

        def again(
            side: Side,
            given: Tensor,
            found: Map | None,
            coarse: bool,
        ) -> Map | None:
            if found is None or found.coarse != coarse:
                return None
            made = by_squares(side, given, places, self.size, [found.start])
            return None if made is None else replace(made, coarse=coarse)

        before = self.maps or [None] * len(self.sides)
        maps = [
            again(side, given, found, True) or solved(side, given, places, self.size)
            for side, given, found in zip(self.sides, rows, before, strict=True)
        ]
        # then all by squares
        if any(found is not None and found.coarse for found in maps):
            each = zip(self.sides, rows, maps, strict=True)
            maps = [again(*one, False) or one[2] for one in each]
        return replace(self, maps=maps)

    def fit(self, rows: Sequence[Tensor], places: Sequence[int]) -> TokenFit:
        """Return how well each side's rows (p, c, d) fit at `places` (p,) of one block.

        Rows (c, d) are the same at all places. Keys count twice in the score, because
        they depend on the place of a token. If the hidden places of sides are not
        known, one side of keys may hide a place, and any of values.
        """
        number = places[0] // self.size
        inside = torch.tensor([place % self.size for place in places])
        level = max(1.0, self.level)
        each: list[Tensor] = []
        dimensions: list[Tensor] = []
        for side, found, given in zip(self.sides, self.maps, rows, strict=True):
            if found is None:
                continue
            # coarse rounding of one side says nothing about the others
            q = found.misfits(side, given, number) * level / max(1.0, found.level)
            each.append(q.expand(len(places), -1))
            shown = (inside != found.hidden) * float(side.free[number])
            dimensions.append(shown[:, None])
        misfits = torch.stack(each)  # (s, p, c)
        free = torch.stack(dimensions).expand_as(misfits)
        keys = torch.tensor([side.keys for side, _ in self.pairs])[:, None, None]
        sure = torch.tensor([found.hides for _, found in self.pairs])[:, None, None]
        score = ((1 + keys.to(free)) * free * misfits.clamp(max=CAP)).sum(0)
        hides = (misfits > HIDDEN) & ~sure & (free > 0)
        if keys.sum() > 1:
            worst = torch.where(keys, misfits, 0.0).argmax(0, keepdim=True)
            is_worst = torch.zeros_like(hides).scatter(0, worst, value=True)
            free = free.masked_fill(hides & (is_worst | ~keys), 0.0)
        own = free * keys
        keys_free = own.sum(0)
        whole_free = free.sum(0)
        by_keys = (own * misfits).sum(0) / keys_free
        by_all = (free * misfits).sum(0) / whole_free
        return TokenFit(by_keys, by_all, score, keys_free, whole_free)

    def explained(self, rows: Sequence[Tensor], number: int) -> bool:
        """Return whether each side's tokens (n, d), the first of a block, span it."""
        spans = self.spans(rows, number)
        return all(each is not None and each.left <= LEFT for each in spans)

    def spans(self, rows: Sequence[Tensor], number: int) -> list[Spans | None]:
        """Return what each side's tokens (n, d), the first of a block, explain of it."""
        added = any(found.hides for _, found in self.pairs)
        return [
            found and Spans.of(side.blocks[number], found, given, added)
            for side, found, given in zip(self.sides, self.maps, rows, strict=True)
        ]


def _side(
    keys: bool,
    head: int,
    rows: Tensor,
    error: Tensor,
    size: int,
) -> Side:
    """Return a head's rows (n, d) with their errors (n, d) in blocks of one size."""
    sigma = error.square().mean(-1, keepdim=True).sqrt()
    fine = float((error / rows.abs().clamp(min=1e-30)).median())
    blocks, spread = ((part / sigma).split(size) for part in (rows, error))
    return Side(keys, head, blocks, sigma.split(size), spread, fine)


def _spanned(rows: Tensor) -> Tensor:
    """Return orthonormal columns (d, r) that span rows (n, d), some of which may be repeated."""
    _, sizes, v = thin_svd(rows)
    return v[sizes > _REPEATED * sizes.amax()].mT if len(rows) else v.mT


class Spans(NamedTuple):
    """A block (b, d) and its tokens' rows x M (n, d), which may span it.

    `shown` (n,) are the tokens that A does not hide. `more` (k, d) are the largest
    directions that they leave: the row under A has one, and rows that fill a block,
    which are all equal, another. `left` is the largest direction that nothing spans, as
    a multiple of rounding.
    """

    block: Tensor
    rows: Tensor
    shown: Tensor
    more: Tensor
    matrix: Tensor
    left: float

    @classmethod
    def of(
        cls,
        block: Tensor,
        found: Map,
        rows: Tensor,
        added: bool,
    ) -> Spans:
        made = rows.double() @ found.matrix
        shown = row_numbers(rows) != found.hidden
        sizes, directions = outside(block, _spanned(made[shown]))
        free = found.free(len(rows), len(block) - len(rows), added)
        left = float(sizes[free]) / noise_of(block) if len(sizes) > free else 0.0
        return cls(block, made, shown, directions[:free], found.matrix, left)

    def losses(self, place: int, others: Tensor) -> Tensor:
        """Return the loss of likelihood (c,) of the block with other rows (c, d) at a place."""
        if not self.shown[place]:
            return torch.zeros(len(others), dtype=self.block.dtype)
        kept = self.shown.clone()
        kept[place] = False
        more = self.more * self.rows.norm(dim=-1).mean()
        base = _spanned(torch.cat([self.rows[kept], more]))
        left = self.block - self.block @ base @ base.mT

        def explained(rows: Tensor) -> Tensor:
            apart = normalized(rows - rows @ base @ base.mT)
            return squared_norms(apart @ left.mT)

        own = explained(self.rows[place][None])
        return own - explained(others.double() @ self.matrix)


def lost_with(
    spans: Sequence[Spans | None],
    inside: int,
    given: Sequence[Tensor],
) -> Tensor:
    """Return the loss of likelihood (c,) of all sides with other rows (c, d) at a block's place."""
    pairs = zip(spans, given, strict=True)
    lost = [each.losses(inside, rows) for each, rows in pairs if each is not None]
    return torch.stack(lost).sum(0)


# Squares: a block against all of its tokens at once.


def _real(numbers: Tensor) -> Tensor:
    return torch.cat([numbers.real, numbers.imag], -1)


def _coefficients(
    block: Tensor,
    weights: Tensor,
    rows: Tensor,
) -> Tensor:
    """Return C (h, b, n): a block (b, d) by rows (h, n, d), with a weight for each number."""
    weighted = rows[:, None] * weights[:, None]
    gram = weighted @ rows[:, None].mT
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += _RIDGE * (diagonal + diagonal.mean(-1, keepdim=True))
    return torch.linalg.solve(gram, weighted @ block[..., None])[..., 0]


def directions(
    block: Tensor,
    rows: Tensor,
    count: int,
) -> Tensor:
    """Return the largest directions (k, d) of a block that rows (n, d) do not span."""
    return outside(block, torch.linalg.qr(rows.mT)[0])[1][:count]


def fitted(
    block: Tensor,
    spread: Tensor,
    rows: Tensor,
    free: Tensor,
    rounds: int = _ROUNDS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of squares (h,) of a block (b, d) by tokens' rows x M (h, n, d), C and z.

    `free` are directions z (k, d) to start from. C determines z only up to the tokens'
    rows. The returned z makes the columns of C orthogonal, as S has them, so that it
    suits other tokens too.
    """
    weights = spread.square().reciprocal()
    free = free.expand(len(rows), -1, -1)
    sizes = [rows.shape[1], free.shape[1]]
    before = torch.inf
    while True:
        every = torch.cat([rows, free], 1)
        found = _coefficients(block, weights, every)
        own, other = found.split(sizes, -1)
        cost = ((block - found @ every).square() * weights).sum((1, 2))
        total = float(cost.sum())
        if not sizes[1] or not rounds or before - total < _STILL * len(rows):
            break
        before = total
        rounds -= 1
        left = (block - own @ rows) * weights
        gram = (other.mT[:, :, None] * other.mT[:, None]) @ weights  # (h, k, k, d)
        aim = (other.mT @ left).mT[..., None]
        free = torch.linalg.solve(gram.movedim(-1, 1), aim)[..., 0].mT
    along = torch.linalg.lstsq(other, own).solution if sizes[1] else other.mT @ own
    return cost, found, free + along @ rows


def squares(
    block: Tensor,
    spread: Tensor,
    rows: Tensor,
    free: Tensor,
) -> Tensor:
    """Return the sums of squares (h,) for rows (h, n, d) of arrangements near the one of z."""
    parts = rows.split(_CHUNK)
    return torch.cat([fitted(block, spread, part, free, 1)[0] for part in parts])


def exchanged(
    block: Tensor,
    spread: Tensor,
    rows: Tensor,
    free: Tensor,
    others: Tensor,
) -> Tensor:
    """Return sums of squares (n, c), each of rows (n, d) replaced by each of others (n, c, d)."""
    weights = spread.square().reciprocal()
    every = torch.cat([rows, free])
    found = _coefficients(block, weights, every[None])[0]
    left = block - found @ every
    every = normalized(every)
    weighted = every * weights[:, None]  # (b, n + k, d)
    gram = weighted @ every.mT
    costs: list[Tensor] = []
    for place, given in enumerate(others):
        kept = row_numbers(every) != place
        # what the other rows do not explain
        aim = left + found[:, place, None] * rows[place]
        right = weighted[:, kept] @ aim[..., None]
        inside = weighted[:, kept] @ given.mT
        both = torch.cat([right, inside], -1)
        solution = torch.linalg.solve(gram[:, kept][:, :, kept], both)
        mine, theirs = solution.split([1, len(given)], -1)  # (b, n + k - 1, c)
        least = (aim.square() * weights).sum() - (mine * right).sum()
        length = weights @ given.square().mT - (inside * theirs).sum(1)
        along = (weights * aim) @ given.mT - (inside * mine).sum(1)
        costs.append(least - (along.square() / length.clamp(min=1e-9)).sum(0))
    return torch.stack(costs)


def turned(
    blocks: Sequence[tuple[Tensor, Tensor, Tensor]],
    free: int,
    start: Tensor,
    rounds: int,
) -> tuple[Tensor, float]:
    """Return M as complex numbers (d/2,) of length 1, from `start`, and the mean square it leaves.

    Each block (b, d) comes with its deviations and the rows (n, d) of all tokens that
    show. It has `free` other directions.
    """
    found = torch.sgn(start)
    left = 0.0
    count = 0
    for _ in range(rounds):
        over = torch.zeros_like(start)
        under = torch.zeros(len(start))
        left = 0.0
        count = 0
        for block, spread, given in blocks:
            made = _real(planes(given) * found)
            other = directions(block, made, free)
            cost, mix, _ = fitted(block, spread, made[None], other, 1)
            left += float(cost)
            count += (len(block) - free) * (made.shape[1] - mix.shape[2])
            own, other = mix[0].to(found.dtype).split([len(given), free], -1)
            deviation = planes(spread).abs()  # of both numbers of a plane
            base = (other / deviation.mT[..., None]) if free else None
            tokens = own @ planes(given) / deviation
            whole = planes(block) / deviation
            if base is not None:
                base = torch.linalg.qr(base)[0]  # (d/2, b, k)
                tokens, whole = (_apart(each, base) for each in (tokens, whole))
            over = over + (tokens.conj() * whole).sum(0)
            under = under + tokens.abs().square().sum(0)
        found = torch.sgn(over / under)
    return found, left / count


def _apart(numbers: Tensor, base: Tensor) -> Tensor:
    """Return numbers (b, d/2) without their part along bases (d/2, b, k)."""
    columns = numbers.mT[..., None]
    return (columns - base @ (base.mH @ columns))[..., 0].mT
