"""The blocks of a mixed cache: what they span, the secret map from known tokens, what fits.

The equations are those of mixed.py: x M W = 0 for the rows x of a block's tokens, with W what is
outside of the span of its stored rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from keyhole.recover.layers.block_squares import planes, turned
from keyhole.recover.layers.precision import precision_of
from keyhole.recover.leaks import MixedCache

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
    """What is solved of one side: M (d, d), and the place of a block that A hides, if any.

    `level` is the mean q of the tokens that it was solved from. It is `coarse` if their q are too
    large for spans and it was solved for by squares (block_squares.py).
    """

    matrix: Tensor
    hidden: int | None
    level: float
    coarse: bool = False

    @property
    def start(self) -> tuple[int | None, Tensor]:
        """The place and M, as complex numbers (d/2,), to solve for it again from."""
        half = len(self.matrix) // 2
        return self.hidden, torch.complex(self.matrix.diagonal()[:half], self.matrix.diagonal(half))

    def free(self, count: int, fill: int, added: bool) -> int:
        """How many directions of a block are of no token: of `count` and `fill` other rows."""
        if not fill:
            return int(self.hidden is not None)
        # A is on a token, or on a row that fills the block up: is it the only one?
        on_token = self.hidden is not None and self.hidden < count
        return 1 + (added and (on_token or fill > 1))

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

    def fit(hidden: int | None, rounds: int = 2) -> tuple[float, int | None, Tensor] | None:
        seen = (classes != (-1 if hidden is None else hidden)).double()
        given = float(equations @ seen)
        if given < _ENOUGH * size:
            return None
        error, theta = errors.diagonal(dim1=1, dim2=2).mean(-1), outside.new_zeros(size)
        for _ in range(rounds):
            sums = torch.einsum("n,nij->ij", seen / error, outside)
            theta = torch.linalg.eigh(sums)[1][:, 0]
            error = theta @ errors @ theta
        return float((seen / error) @ (theta @ outside @ theta)) / given, hidden, theta

    whole = fit(None)
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
        tried = [fit(each, 1) for each in (None, *range(block))]
        starts = [(each[1], planes(each[2])) for each in tried if each is not None]
        return by_squares(side, rows, places, block, starts) or found
    return found


def whole_blocks(places: Tensor, block: int) -> list[int]:
    """The blocks all of whose places are among `places`."""
    numbers = places // block
    return [n for n in numbers.unique().tolist() if int((numbers == n).sum()) == block]


Turn = tuple[float, int | None, Tensor]  # the mean square that is left, the place that A hides, M


def by_squares(
    side: Side,
    rows: Tensor,
    places: Tensor,
    block: int,
    starts: Sequence[tuple[int | None, Tensor]],
) -> Map | None:
    """The map by all squares of blocks that are known whole, from places that A may hide and M."""
    numbers, inside = whole_blocks(places, block), places % block
    given = {n: rows[places // block == n].double() for n in numbers}
    spreads = {n: side.spreads(n, each) for n, each in given.items()}

    def turn(hidden: int | None, start: Tensor, rounds: int, where: list[int]) -> Turn:
        kept = inside != (-1 if hidden is None else hidden)
        shown = [given[n][kept[places // block == n]].unique(dim=0) for n in where]
        # A may hide a token that is there twice, so that values do not tell its place.
        free = int(hidden is not None or len(starts) == 1)
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
    kept = inside != (-1 if hidden is None else hidden)
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
    def level(self) -> float:
        levels = [each.level for each in self.maps if each is not None]
        return float(torch.tensor(levels or [torch.inf]).median())

    @property
    def silent(self) -> bool:
        """Does no head's keys say anything, so that no order can be found?"""
        each = zip(self.sides, self.maps, strict=True)
        return all(found is None for side, found in each if side.keys)

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
            shown = inside != (-1 if each.hidden is None else each.hidden)
            free.append(shown * float(side.free[number]))
            keys.append(side.keys)
            sure.append(each.hidden is not None)
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
        pairs = [each for each in zip(self.sides, self.maps, strict=True) if each[1] is not None]
        return any(side.keys and found.coarse for side, found in pairs if found) and any(
            not side.keys and not found.coarse for side, found in pairs if found
        )

    def fine(self) -> Blocks:
        """Without the sides that are coarse."""
        pairs = zip(self.sides, self.maps, strict=True)
        kept = [(side, each) for side, each in pairs if each is None or not each.coarse]
        return replace(self, sides=[side for side, _ in kept], maps=[each for _, each in kept])

    def spans(self, rows: Sequence[Tensor], number: int) -> list[Spans | None]:
        """What each side's tokens (n, d), the first ones of a block, explain of it."""
        start, added = number * self.size, False
        made: list[Spans | None] = []
        for each in self.maps:
            added |= each is not None and each.hidden is not None
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
        shown = inside != (-1 if found.hidden is None else found.hidden)
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
    return torch.stack([each.losses(inside, rows) for each, rows in pairs if each is not None]).sum(
        0
    )
