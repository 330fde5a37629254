"""The blocks of a mixed cache: what they span, the secret map from known tokens, what fits.

The equations are those of mixed.py: x M W = 0 for the rows x of a block's tokens, with W what is
outside of the span of its stored rows.

**By squares.** Where the rounding of a block hides some of its directions (Qwen's keys in bfloat16:
a bias a hundred times as large as what tokens add, and A ten times as large as that), its span is
no longer known and x M W = 0 says little of one token. The rows of all its tokens together still
have to give its numbers,

    Y_ij = Σ_r C_ir (x_r M)_j + Σ_k C_ik z_kj + ε_ij,

with C (b, n + k) free and z the few directions that are not the tokens': the row under A, and those
that fill the block up. Every number's own deviation s_ij is known, from its exponent, and what was
rounded before the mix adds to it: so the squares of ε / s sum to a chi-square of (b − k)(d − n − k)
dimensions for the right tokens in the right order. M is solved for by the same squares, alternating
between C, z and M, each of which the others give by a linear equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from keyhole.recover.layers.precision import precision_of
from keyhole.recover.leaks import MixedCache

NOWHERE = -1  # the place that A hides, where that is none or not known
DEVIATIONS = 6.0  # of a chi-square, that the right token is granted
HIDDEN = 4.0  # q from which on a head may be thought to hide a token
CAP = 30.0  # q that one head may add: it may hide the token
_VECTORS = 16  # random ones: their products are as long as what is outside, to a third
_STRETCH = 2.0  # ‖c‖ of a token, at most: S is orthogonal but for scales
_ENOUGH = 1.25  # equations for each unknown
_HIDES = 0.9  # of the level: what is left of it without the place that A hides
LEFT = 4.0  # times what rounding makes: larger directions of a block are tokens that are missing
_COARSE = 1.5  # level from which on spans are not enough, if …
_SEEN = 0.8  # … fewer of a block's directions are above rounding
_TURNS = (2, 6)  # rounds for each place that A may hide, and for the best of them
_TWICE = 1e-5  # of the largest direction: what is smaller, arithmetic made
_RIDGE = 1e-12  # of the diagonal: rows may be zero
_AT_ONCE = 64  # arrangements of a block, for memory's sake
_ROUNDS = 40  # of solving for C and z, at most …
_STILL = 0.1  # … until the squares fall by less


def planes(rows: Tensor) -> Tensor:
    """Rows (…, d) as complex numbers (…, d/2), one for each plane that M turns."""
    return torch.complex(*rows.unflatten(-1, (2, -1)).unbind(-2))


@dataclass(frozen=True, eq=False)
class Side:
    """The keys, or the values, of one head: its blocks (b, d), each row divided by its σ.

    `spread` (b, d) is the deviation of each number after that; `fine` that of the tokens' own rows
    as a share of them, which were rounded before they were mixed, in the units of `rows`.
    """

    keys: bool
    head: int
    blocks: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]  # σ (b, 1) of each block's
    spread: tuple[Tensor, ...]
    fine: float

    @cached_property
    def sigma(self) -> list[float]:
        """σ of each block, as a root mean square."""
        return [float(each.square().mean().sqrt()) for each in self.rows]

    def spreads(self, number: int, rows: Tensor) -> Tensor:
        """The deviation (b, d) of a block's numbers, with what tokens' rows were rounded by."""
        before = self.fine * planes(rows.double()).abs().square().mean(0).sqrt().repeat(2)
        return (self.spread[number].square() + (before / self.rows[number]).square()).sqrt()

    @cached_property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """The singular values (b,) and right singular vectors (b, d) of each block."""
        return [torch.linalg.svd(rows, full_matrices=False)[1:] for rows in self.blocks]

    @cached_property
    def bases(self) -> list[Tensor]:
        """Orthonormal rows (r, d) that span each block, but for what rounding may have made."""
        noise = sum(size**0.5 for size in self.blocks[0].shape)
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
        """W and C (blocks, d, d)."""
        outside, errors = (torch.stack([each @ each.mT for each in roots])
                           for roots in zip(*self.roots, strict=True))  # fmt: skip
        return outside, errors

    @cached_property
    def free(self) -> Tensor:
        """tr W (blocks,): how many dimensions are outside."""
        return self.forms[0].diagonal(dim1=1, dim2=2).sum(-1)


def sides_of(leak: MixedCache, block: int, errors: Sequence[Tensor]) -> list[Side]:
    """All keys and values of a leak, head by head, cut into blocks; `errors` are their σ."""
    made: list[Side] = []
    for (name, tensor), each in zip(leak.tensors.items(), errors, strict=True):
        for head, (rows, error) in enumerate(zip(tensor.double(), each, strict=True)):
            sigma = error.square().mean(-1, keepdim=True).sqrt()
            fine = float((error / rows.abs().clamp(min=1e-30)).median())
            blocks, spread = ((part / sigma).split(block) for part in (rows, error))
            made.append(Side(name == "keys", head, blocks, sigma.split(block), spread, fine))
    return made


def _errors(leak: MixedCache, tensor: Tensor) -> Tensor:
    """σ (heads, n, d) of keys or values by themselves: those may be a thousand times as large."""
    alone = precision_of(replace(leak, keys=tensor, values=tensor)).sigma
    return alone.view(tensor.shape[1], len(tensor), 2, -1)[:, :, 0].transpose(0, 1).double()


@dataclass(frozen=True, eq=False)
class Map:
    """What is solved of one side: M (d, d), and the place of a block that A hides, or NOWHERE.

    `level` is the mean q of the tokens that it was solved from. It is `coarse` if their q are too
    large for spans and it was solved for by squares.
    """

    matrix: Tensor
    hidden: int
    level: float
    coarse: bool = False

    @property
    def hides(self) -> bool:
        """Is it known which place A hides?"""
        return self.hidden != NOWHERE

    @property
    def start(self) -> tuple[int, Tensor]:
        """The place and M, as complex numbers (d/2,), to solve for it again from."""
        half = len(self.matrix) // 2
        return self.hidden, torch.complex(self.matrix.diagonal()[:half], self.matrix.diagonal(half))

    def free(self, count: int, fill: int, added: bool) -> int:
        """How many directions of a block are of no token: of `count` and `fill` other rows."""
        if not fill:
            return int(self.hides)
        # A is on a token, or on a row that fills the block up: is it the only one?
        return 1 + (added and (NOWHERE < self.hidden < count or fill > 1))

    def misfits(self, side: Side, rows: Tensor, number: int, turn: Tensor | None = None) -> Tensor:
        """q (c,) of rows (c, d) in block `number`.

        With a `turn` (d, d) of all rows by a position it is of many rows, and what is outside is
        estimated from its products with a few random vectors.
        """
        matrix, (root, errors) = self.matrix, side.roots[number]
        if turn is not None:
            stream = torch.Generator().manual_seed(number)
            vectors = torch.randn(len(root), _VECTORS, generator=stream, dtype=root.dtype)
            matrix, root = turn @ matrix, root @ vectors / _VECTORS**0.5
        outside, error = (
            (rows @ (matrix @ each).to(rows)).square().sum(-1) for each in (root, errors)
        )
        # S may stretch rows, but not much: a token of large ‖c‖ is in no block.
        error = error.clamp(max=(_STRETCH * side.sigma[number]) ** 2)
        return outside / error / float(side.free[number])


def products(rows: Tensor) -> Tensor:
    """J (n, d, d) with x M = θ J(x), θ = (α, β)."""
    x, y = torch.diag_embed(rows.double().unflatten(-1, (2, -1))).unbind(1)
    return torch.cat([torch.cat([x, y], -1), torch.cat([-y, x], -1)], -2)


Turn = tuple[float, int, Tensor]  # the mean square that is left, the place that A hides, M


def solved(side: Side, rows: Tensor, places: Tensor, block: int) -> Map | None:
    """M from rows (n, d) of tokens known to stand at `places` (n,).

    None if they are too few, or if rounding leaves fewer directions of their blocks than half of
    them have: where M is not seen in Y (a large A, in few bits), it fits whatever it is given.
    Where spans do not do, it is solved for by squares if blocks are known whole.
    """
    numbers, size, classes = places // block, rows.shape[1], places % block
    if 2 * sum(len(side.bases[n]) for n in numbers.unique().tolist()) < len(places.unique()):
        return None
    jacobians = products(rows)
    outside, errors = (jacobians @ form[numbers] @ jacobians.mT for form in side.forms)
    equations = side.free[numbers]

    def fit(hidden: int, rounds: int = 2) -> Turn | None:
        seen = (classes != hidden).double()
        given = float(equations @ seen)
        if given < _ENOUGH * size:
            return None
        error, theta = errors.diagonal(dim1=1, dim2=2).mean(-1), outside.new_zeros(size)
        for _ in range(rounds):
            sums = torch.einsum("n,nij->ij", seen / error, outside)
            theta = torch.linalg.eigh(sums)[1][:, 0]
            error = theta @ errors @ theta
        return float((seen / error) @ (theta @ outside @ theta)) / given, hidden, theta

    whole = fit(NOWHERE)
    if whole is None:
        return None
    theta = whole[2]
    misfits = (theta @ outside @ theta) / (theta @ errors @ theta)
    means = {int(each): -float(misfits[classes == each].mean()) for each in classes.unique()}
    worst = sorted(means, key=means.__getitem__)[:2]
    without = [found for each in worst if (found := fit(each)) is not None]
    best = min(without, key=lambda found: found[0], default=whole)
    level, hidden, theta = best if best[0] < _HIDES * whole[0] else whole
    found = Map(products((theta * (size / 2) ** 0.5)[None])[0], hidden, level)
    ranks = [len(side.bases[n]) for n in whole_blocks(places, block)]
    if level > _COARSE and min(ranks, default=block) < _SEEN * block:
        tried = [fit(each, 1) for each in (NOWHERE, *range(block))]
        starts = [(each[1], planes(each[2])) for each in tried if each is not None]
        return by_squares(side, rows, places, block, starts) or found
    return found


def whole_blocks(places: Tensor, block: int) -> list[int]:
    """The blocks all of whose places are among `places`."""
    numbers = places // block
    return [n for n in numbers.unique().tolist() if int((numbers == n).sum()) == block]


def by_squares(
    side: Side,
    rows: Tensor,
    places: Tensor,
    block: int,
    starts: Sequence[tuple[int, Tensor]],
) -> Map | None:
    """The map by all squares of blocks that are known whole, from places that A may hide and M."""
    numbers, inside = whole_blocks(places, block), places % block
    given = {n: rows[places // block == n].double() for n in numbers}
    spreads = {n: side.spreads(n, each) for n, each in given.items()}

    def turn(hidden: int, start: Tensor, rounds: int, where: list[int]) -> Turn:
        kept = inside != hidden
        shown = [given[n][kept[places // block == n]].unique(dim=0) for n in where]
        # A may hide a token that is there twice, so that values do not tell its place.
        free = int(hidden != NOWHERE or len(starts) == 1)
        blocks, each = [side.blocks[n] for n in where], [spreads[n] for n in where]
        found, left = turned(blocks, each, shown, free, start, rounds)
        return left, hidden, found

    if not numbers or not starts:
        return None
    hidden, start = starts[0]
    if len(starts) > 1:
        tried = [turn(*each, _TURNS[0], numbers[:1]) for each in starts]
        _, hidden, start = min(tried, key=lambda each: each[0])
    left, hidden, found = turn(hidden, start, _TURNS[1], numbers)
    if not left < _COARSE:
        return None
    made = Map(products(torch.cat([found.real, found.imag])[None])[0], hidden, 1.0, True)
    kept = inside != hidden
    misfits = torch.cat([
        made.misfits(side, rows[kept & (places // block == n)].double(), n) for n in numbers
    ])  # fmt: skip
    return replace(made, level=float(misfits.mean()))


@dataclass(frozen=True, eq=False)
class Fit:
    """How well tokens (p, c) lie in their blocks: q by keys alone, and by all that shows them.

    `score` is what tokens are compared by, minus twice a log-likelihood. The numbers of dimensions
    (p, c) that speak are `keys_free` (0 where every head hides the position) and `free`.
    """

    keys: Tensor
    whole: Tensor
    score: Tensor
    keys_free: Tensor
    free: Tensor

    @classmethod
    def of(cls, misfits: Tensor, free: Tensor, keys: Tensor, sure: Tensor) -> Fit:
        """From q (s, p, c) of each side, of `free` (s, p) dimensions, which are of `keys` (s,).

        Of sides of which nobody knows which place they hide (not `sure`), one of keys may hide this
        one, and any of values: keys, which count twice, say where a token stands.
        """
        free = free[..., None].expand_as(misfits)
        weights = (1 + keys.to(free))[:, None, None]
        score = (weights * free * misfits.clamp(max=CAP)).sum(0)
        hides = (misfits > HIDDEN) & ~sure[:, None, None] & (free > 0)
        if int(keys.sum()) > 1:
            worst = torch.where(keys[:, None, None], misfits, 0.0).argmax(0, keepdim=True)
            one = torch.zeros_like(hides).scatter(0, worst, value=True)
            free = free.masked_fill(hides & (one | ~keys[:, None, None]), 0.0)
        own = free * keys[:, None, None]
        keys_free, whole_free = own.sum(0), free.sum(0)
        return cls(
            (own * misfits).sum(0) / keys_free, (free * misfits).sum(0) / whole_free,
            score, keys_free, whole_free,
        )  # fmt: skip

    def fits(self, level: float) -> Tensor:
        """Which tokens (p, c) a chi-square accepts, rounding being `level` times as expected."""
        most = max(1.0, level)
        keys = self.keys <= most * (1 + DEVIATIONS * (2 / self.keys_free).sqrt())
        whole = self.whole <= most * (1 + DEVIATIONS * (2 / self.free).sqrt())
        return whole & (keys | (self.keys_free == 0))


@dataclass(frozen=True, eq=False)
class Blocks:
    """A leak cut into blocks of one size, with the maps that are solved for."""

    leak: MixedCache
    size: int
    sides: Sequence[Side]
    maps: Sequence[Map | None] = ()

    @classmethod
    def cut(cls, leak: MixedCache, sizes: Sequence[int]) -> list[Blocks]:
        """The leak in blocks of each of the sizes that they may have."""
        errors = [_errors(leak, tensor) for tensor in leak.tensors.values()]
        return [cls(leak, size, sides_of(leak, size, errors)) for size in sizes]

    @property
    def length(self) -> int:
        """Positions, with those that fill up the last block."""
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
        """Does no head's keys say anything, so that no order can be found?"""
        return not any(side.keys for side, _ in self.pairs)

    def solved(self, rows: Sequence[Tensor], places: Tensor) -> Blocks:
        """With maps from each side's rows (n, d) at `places` (n,)."""
        before = self.maps or [None] * len(self.sides)

        def again(side: Side, given: Tensor, found: Map | None, coarse: bool) -> Map | None:
            if found is None or found.coarse != coarse:
                return None
            made = by_squares(side, given, places, self.size, [found.start])
            return None if made is None else replace(made, coarse=coarse)

        maps = [
            again(side, each, found, coarse=True) or solved(side, each, places, self.size)
            for side, each, found in zip(self.sides, rows, before, strict=True)
        ]
        if any(found is not None and found.coarse for found in maps):  # then all by squares
            maps = [
                again(side, each, found, coarse=False) or found
                for side, each, found in zip(self.sides, rows, maps, strict=True)
            ]
        return replace(self, maps=maps)

    def fit(self, rows: Sequence[Tensor], places: Sequence[int]) -> Fit:
        """How well rows (p, c, d) of each side fit at places (p,) of one block; (c, d): at all."""
        number, inside = places[0] // self.size, torch.tensor([p % self.size for p in places])
        misfits, free, keys, sure = list[Tensor](), list[Tensor](), list[bool](), list[bool]()
        for side, each, given in zip(self.sides, self.maps, rows, strict=True):
            if each is None:
                continue
            # Rounding that is coarser than thought in one side says nothing about the others.
            q = each.misfits(side, given, number) * max(1.0, self.level) / max(1.0, each.level)
            misfits.append(q.expand(len(places), -1) if q.ndim == 1 else q)
            free.append((inside != each.hidden) * float(side.free[number]))
            keys.append(side.keys)
            sure.append(each.hides)
        return Fit.of(
            torch.stack(misfits), torch.stack(free), torch.tensor(keys), torch.tensor(sure)
        )

    def explained(self, rows: Sequence[Tensor], number: int) -> bool:
        """Do each side's tokens (n, d), the first ones of a block, span it?"""
        spans = self.spans(rows, number)
        return all(each is not None and each.left <= LEFT for each in spans)

    @property
    def coarse(self) -> bool:
        """Does rounding hide directions of keys, so that squares have to order what values tell?"""
        coarse = {(side.keys, found.coarse) for side, found in self.pairs}
        return {(True, True), (False, False)} <= coarse

    def fine(self) -> Blocks:
        """Without the sides that are coarse."""
        pairs = zip(self.sides, self.maps, strict=True)
        kept = [(side, each) for side, each in pairs if each is None or not each.coarse]
        return replace(self, sides=[side for side, _ in kept], maps=[each for _, each in kept])

    def spans(self, rows: Sequence[Tensor], number: int) -> list[Spans | None]:
        """What each side's tokens (n, d), the first ones of a block, explain of it."""
        start, added = number * self.size, any(found.hides for _, found in self.pairs)
        made: list[Spans | None] = []
        for side, each, given in zip(self.sides, self.maps, rows, strict=True):
            inside = torch.arange(start, start + len(given)) % self.size
            made.append(
                None if each is None else Spans.of(side.blocks[number], each, given, inside, added)
            )
        return made


def _spanned(rows: Tensor) -> Tensor:
    """Orthonormal columns (d, r) that span rows (n, d); a token's values may be there twice."""
    _, sizes, v = torch.linalg.svd(rows, full_matrices=False)
    return v[sizes > _TWICE * sizes.amax()].mT if len(rows) else v.mT


@dataclass(frozen=True, eq=False)
class Spans:
    """A block (b, d) and its tokens' rows x M (n, d): do they span it?

    `shown` (n,) are those that A leaves as they are. `more` (k, d) are the largest directions that
    are left: the row under A has one, and rows that fill a block up, all of them the same, another.
    """

    block: Tensor
    rows: Tensor
    shown: Tensor
    more: Tensor
    matrix: Tensor
    left: float  # the largest direction that nothing spans, in what rounding makes

    @classmethod
    def of(cls, block: Tensor, found: Map, rows: Tensor, inside: Tensor, added: bool) -> Spans:
        made = rows.double() @ found.matrix
        shown = inside != found.hidden
        base = _spanned(made[shown])
        _, sizes, v = torch.linalg.svd(block - block @ base @ base.mT, full_matrices=False)
        free = found.free(len(rows), len(block) - len(rows), added)
        noise = sum(size**0.5 for size in block.shape)
        left = float(sizes[free]) / noise if len(sizes) > free else 0.0
        return cls(block, made, shown, v[:free], found.matrix, left)

    def losses(self, place: int, others: Tensor) -> Tensor:
        """What the block loses in likelihood (c,) with rows of others (c, d) at a place instead."""
        if not bool(self.shown[place]):
            return torch.zeros(len(others), dtype=self.block.dtype)
        kept = self.shown.clone()
        kept[place] = False
        base = _spanned(torch.cat([self.rows[kept], self.more * self.rows.norm(dim=-1).mean()]))
        left = self.block - self.block @ base @ base.mT

        def explained(rows: Tensor) -> Tensor:
            apart = rows - rows @ base @ base.mT
            return (torch.nn.functional.normalize(apart, dim=-1) @ left.mT).square().sum(-1)

        return explained(self.rows[place][None]) - explained(others.double() @ self.matrix)


def lost_with(spans: Sequence[Spans | None], inside: int, given: Sequence[Tensor]) -> Tensor:
    """What all sides lose in likelihood (c,) with other rows (c, d) at a place of a block."""
    pairs = zip(spans, given, strict=True)
    lost = [each.losses(inside, rows) for each, rows in pairs if each is not None]
    return torch.stack(lost).sum(0)


# Squares: a block against all of its tokens at once.


def _real(numbers: Tensor) -> Tensor:
    return torch.cat([numbers.real, numbers.imag], -1)


def _coefficients(block: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """C (h, b, n): a block (b, d) by rows (h, n, d), each number of it with its own weight."""
    weighted = rows[:, None] * weights[:, None]
    gram = weighted @ rows[:, None].mT
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += _RIDGE * (diagonal + diagonal.mean(-1, keepdim=True))
    return torch.linalg.solve(gram, weighted @ block[..., None])[..., 0]


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
