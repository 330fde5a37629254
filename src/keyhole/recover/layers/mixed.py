"""Text from a KV cache whose tokens are mixed within blocks under a secret (KV-Cloak).

*Shadow in the Cache* (NDSS 2026, arXiv 2508.09442; code SiO-2/kvcloak) stores, for each layer, head
and block of b positions, of keys and of values alike,

    X' = S P (X M + A)      S (b, b) invertible, P a permutation, drawn anew for every block,
                            M (d, d) one rotation with a scale in each plane (j, j + d/2),
                            A zero but for one secret row a, in one place of every block

and keeps S, M, A and the place secret, each head's own. S P is invertible, so it changes the rows
of a block and not the space that they span. With W the projection on what is outside of it,

    x_i M W = 0             for every token i of the block but the one under A.

**M.** In plane j it multiplies by one complex number α_j + iβ_j, so x_i M = θ J(x_i) is linear in
the d numbers θ = (α, β), and known tokens give θ as the eigenvector of Σ_i J W Jᵀ of least
eigenvalue, up to a factor that membership does not need. A token gives d − b equations for d
unknowns: two tokens are enough up to b = d/2, about d/(d − b) beyond. The place under A is the one
without which the least eigenvalue falls; it is the same in all blocks. A general M has d² unknowns
and needs d²/(d − b) known tokens: 86 for d = 64, b = 16.

**Tokens.** In the first layer of a model with rotary positions, the rows of token v at position p
are known before anything leaks: R_p k_v and u_v. ‖u_v M W‖ finds the tokens of a block (values have
no position), ‖R_p k_v M W‖ their places. In deeper layers, and with a table of positions, rows
depend on the prefix: tokens are tried behind it, left to right, in the order of the model's own
prediction. The place under A differs between heads, so what one hides others show.

**Rounding.** Stored rows are Y = X' + E, row i of E of deviation σ_i; with each row divided by its
σ_i, E has unit deviation. A token's row is c (Y − E), so what of it is outside of Y is −cE: ‖c‖² in
each of d − b dimensions, c = x M Y⁺. So q = ‖x M W‖² / (d − b) ‖c‖² is 1 ± √(2/(d − b))
for the right token, whatever S, M and the rounding are: a chi-square, whose sums over heads, keys
and values compare tokens. W = (YᵀY + 1)⁻¹ and Y⁺ are soft, so that directions which are no larger
than the rounding count as outside.

**No token known.** The tokens of a text are common ones. For token v in block B, θ lies in the
b-dimensional space B / v (the block's rows divided plane by plane by the token's), and two right
guesses have a line in common, while spaces of b < d/2 dimensions have none by chance. Values are
solved first, because tokens need no position there: one frequent token against all of some hundred
in every block. Then the block's tokens are known but for their order, and the same is done with
keys for each place that a token may have. (Positions all shifted by one are M turned, so the
places that fit best over all blocks decide.)

**What it does not read.** Where the rows of a block span all of a head (b ≥ d, if the text is as
long), W = 0: nothing is outside. Encryption is what protects a cache at rest.

A text is verified as all others are, by running the model (`judge_mixed`): M is solved for again
from the whole text; each token must lie in its block in the heads that show it, and none of the
vocabulary may do as well; and the tokens must span their blocks, but for one row (A) and the
padding, so that nothing is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, takewhile
from math import log
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embeddings.counts import SHIPPED
from keyhole.recover.judge import ODDS, Mark, Verdict
from keyhole.recover.layers.inverse_map import most_similar, random_texts
from keyhole.recover.layers.precision import precision_of
from keyhole.recover.leaks import KeyValues, Leak, MixedCache

_BLOCKS = (8, 16, 32, 64)  # positions: of two sizes that fit, one a multiple, the smaller is right
_DEVIATIONS = 6.0  # of a chi-square, that the right token is granted
_HIDDEN = 4.0  # q from which on a head may be thought to hide a token
_CAP = 30.0  # q that one head may add: it may hide the token
_STRETCH = 2.0  # ‖c‖ of a token, at most: S is orthogonal but for scales
_ENOUGH = 1.25  # equations for each unknown
_HIDES = 0.9  # of the level: what is left of it without the place that A hides
_OPENS = 3.0  # level of the tokens that are taken to open a text, at most
_ROUNDS = 6  # of reading and solving again
_LIST = 4  # times as many tokens as a block has are looked at again
_COMMON, _FIRST = 768, 24  # tokens that are common, and most so
_SQUARED = 5  # times that a product of projections is squared to find its largest eigenvalue
_NEAR = 6  # pairs of guesses that are looked at, for each token that is most common
_FAN = 256  # tokens tried at once behind a prefix, until one fits
_LEFT = 4.0  # times what rounding makes: larger directions of a block are tokens that are missing
_CLAIMED = 4.0  # level, at most, of a text that is verified
_NEARLY = 8.0  # q of a token in its block by a map that two tokens gave
_EVEN = 0.5  # of the planes, at least, that a map must not leave at nothing
_SHIFTS = 4  # of positions, that are read to the end
_LOOKED = 8  # positions that show whether a cache is mixed
_STRANGE = 0.5  # of a row: one that is so far from all tokens' is of none
_TWICE = 1e-5  # of the largest direction: what is smaller, arithmetic made
_AGAIN = 8  # tokens after which M is solved for again


@dataclass(frozen=True, eq=False)
class Side:
    """The keys, or the values, of one head: its blocks (b, d), each row divided by its σ."""

    keys: bool
    head: int
    blocks: tuple[Tensor, ...]
    sigma: tuple[float, ...]  # of each block, as a root mean square

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


def sides_of(leak: MixedCache, block: int) -> list[Side]:
    """All keys and values of a leak, head by head, cut into blocks."""
    errors = precision_of(leak).sigma.view(leak.keys.shape[1], len(leak.keys), -1)
    parts = errors.split([leak.keys.shape[-1], leak.values.shape[-1]], -1)
    made: list[Side] = []
    for (name, tensor), error in zip(leak.tensors.items(), parts, strict=True):
        for head, rows in enumerate(tensor.double()):
            sigma = error[:, head].double().square().mean(-1, keepdim=True).sqrt()
            sizes = tuple(float(each.square().mean().sqrt()) for each in sigma.split(block))
            made.append(Side(name == "keys", head, (rows / sigma).split(block), sizes))
    return made


@dataclass(frozen=True, eq=False)
class Map:
    """What is solved of one side: M (d, d), and the place of a block that A hides, if any.

    `level` is the mean q of the tokens that it was solved from.
    """

    matrix: Tensor
    hidden: int | None
    level: float

    def shows(self, place: int) -> bool:
        return self.hidden != place

    def misfits(self, side: Side, rows: Tensor, number: int) -> Tensor:
        """q (c,) of rows (c, d) in block `number`."""
        outside, error = (
            (rows @ (self.matrix @ root).to(rows)).square().sum(-1) for root in side.roots[number]
        )
        # S may stretch rows, but not much: a token of large ‖c‖ is in no block.
        error = error.clamp(max=(_STRETCH * side.sigma[number]) ** 2)
        return outside / error / float(side.free[number])


def _products(rows: Tensor) -> Tensor:
    """J (n, d, d) with x M = θ J(x), θ = (α, β)."""
    x, y = torch.diag_embed(rows.double().unflatten(-1, (2, -1))).unbind(1)
    return torch.cat([torch.cat([x, y], -1), torch.cat([-y, x], -1)], -2)


def solved(side: Side, rows: Tensor, places: Tensor, block: int) -> Map | None:
    """M from rows (n, d) of tokens known to stand at `places` (n,); None if they are too few."""
    numbers, size, classes = places // block, rows.shape[1], places % block
    products = _products(rows)
    outside, errors = (products @ form[numbers] @ products.mT for form in side.forms)
    equations = side.free[numbers]

    def fit(hidden: int | None) -> tuple[float, int | None, Tensor] | None:
        seen = (classes != (-1 if hidden is None else hidden)).double()
        given = float(equations @ seen)
        if given < _ENOUGH * size:
            return None
        error, theta = errors.diagonal(dim1=1, dim2=2).mean(-1), outside.new_zeros(size)
        for _ in range(2):
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
    return Map(_products((theta * (size / 2) ** 0.5)[None])[0], hidden, level)


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
        score = (weights * free * misfits.clamp(max=_CAP)).sum(0)
        hides = (misfits > _HIDDEN) & ~sure[:, None, None] & (free > 0)
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
        keys = self.keys <= most * (1 + _DEVIATIONS * (2 / self.keys_free).sqrt())
        whole = self.whole <= most * (1 + _DEVIATIONS * (2 / self.free).sqrt())
        return whole & (keys | (self.keys_free == 0))


@dataclass(frozen=True, eq=False)
class Blocks:
    """A leak cut into blocks of one size, with the maps that are solved for."""

    leak: MixedCache
    size: int
    sides: Sequence[Side]
    maps: Sequence[Map | None] = ()

    @classmethod
    def of(cls, leak: MixedCache, size: int) -> Blocks:
        return cls(leak, size, sides_of(leak, size))

    @property
    def length(self) -> int:
        """Positions, with those that fill up the last block."""
        return self.leak.keys.shape[1]

    @property
    def level(self) -> float:
        levels = [each.level for each in self.maps if each is not None]
        return float(torch.tensor(levels or [torch.inf]).median())

    def solved(self, rows: Sequence[Tensor], places: Tensor) -> Blocks:
        """With maps from each side's rows (n, d) at `places` (n,)."""
        maps = [
            solved(side, each, places, self.size)
            for side, each in zip(self.sides, rows, strict=True)
        ]
        return replace(self, maps=maps)

    def fit(self, rows: Sequence[Tensor], places: Sequence[int]) -> Fit:
        """How well rows (p, c, d) of each side fit at places (p,) of one block; (c, d): at all."""
        number, inside = places[0] // self.size, torch.tensor([p % self.size for p in places])
        misfits, free, keys, sure = list[Tensor](), list[Tensor](), list[bool](), list[bool]()
        for side, each, given in zip(self.sides, self.maps, rows, strict=True):
            if each is None:
                continue
            q = each.misfits(side, given, number)
            misfits.append(q.expand(len(places), -1) if q.ndim == 1 else q)
            shown = inside != (-1 if each.hidden is None else each.hidden)
            free.append(shown * float(side.free[number]))
            keys.append(side.keys)
            sure.append(each.hidden is not None)
        return Fit.of(
            torch.stack(misfits), torch.stack(free), torch.tensor(keys), torch.tensor(sure)
        )

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
        free = int(added) + (len(rows) < len(block))
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


@dataclass(frozen=True, eq=False)
class Table:
    """The first layer's rows of all tokens (heads, v, d), as they are at no position."""

    target: Target
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, target: Target) -> Table:
        return target.remembered("first rows", None, lambda: cls._made(target))

    @classmethod
    @torch.no_grad()
    def _made(cls, target: Target) -> Table:
        parts, made = target.parts, list[tuple[Tensor, Tensor]]()
        for tokens in torch.arange(target.vocabulary, device=parts.device).split(4096):
            given = capture(target.model, Exposure("kv", 0), ids=tokens[:, None])
            keys = parts.unrotated(0, given["keys"], torch.zeros_like(tokens)[:, None])
            made.append((keys[:, :, 0].float().cpu(), given["values"][:, :, 0].float().cpu()))
        keys, values = (
            torch.cat(each).transpose(0, 1).contiguous() for each in zip(*made, strict=True)
        )
        return cls(target, keys, values)

    def rows(self, side: Side, tokens: Tensor, positions: Tensor) -> Tensor:
        """Rows (n, d) of tokens (n,) at positions (n,)."""
        if not side.keys:
            return self.values[side.head, tokens]
        keys, device = self.keys[side.head, tokens], self.target.parts.device
        turned = self.target.parts.rotated(
            0, keys[None, None].to(device), positions[None].to(device)
        )
        return turned[0, 0].cpu()


@dataclass(frozen=True, eq=False)
class Reader:
    """A first layer with rotary positions: all positions at once, by the table of its rows."""

    table: Table
    blocks: Blocks

    def solved(self, tokens: dict[int, int]) -> Reader:
        """With maps from tokens that are known, by their positions."""
        ids, places = torch.tensor(list(tokens.values())), torch.tensor(list(tokens))
        rows = [self.table.rows(side, ids, places) for side in self.blocks.sides]
        return replace(self, blocks=self.blocks.solved(rows, places))

    def shortlist(self, number: int, count: int) -> Tensor:
        """The tokens (c,) that may stand in a block, by their values, in whatever place.

        One head may hide a token.
        """
        blocks = self.blocks
        misfits = torch.stack([
            float(side.free[number]) * each.misfits(side, self.table.values[side.head], number)
            for side, each in zip(blocks.sides, blocks.maps, strict=True)
            if not side.keys and each is not None
        ])  # fmt: skip
        total = misfits.sum(0) - (misfits.amax(0) if len(misfits) > 1 else 0.0)
        return total.topk(min(count, len(total)), largest=False).indices

    def fit(self, tokens: Tensor, places: Sequence[int]) -> Fit:
        """How well each of tokens (c,) fits at each of places (p,) of one block."""
        each = tokens.repeat(len(places))
        at = torch.tensor(places).repeat_interleave(len(tokens))
        rows = [
            self.table.rows(side, each, at).unflatten(0, (len(places), -1)) if side.keys
            else self.table.rows(side, tokens, at)
            for side in self.blocks.sides
        ]  # fmt: skip
        return self.blocks.fit(rows, places)

    def read(self, known: dict[int, int]) -> tuple[Reader, dict[int, int]]:
        """All tokens that fit, by their positions, from some that are known."""
        reader, tokens = self.solved(known), dict[int, int]()
        for _ in range(_ROUNDS):
            found = reader.once()
            again = reader.solved(found) if found and found != tokens else reader
            if again is reader or None in again.blocks.maps:
                break
            reader, tokens = again, found
            if len(found) > max(found):
                break
        return reader, tokens

    def once(self) -> dict[int, int]:
        """The tokens that fit, each where no other does."""
        tokens: dict[int, int] = {}
        if not any(
            each is not None and not side.keys
            for side, each in zip(self.blocks.sides, self.blocks.maps, strict=True)
        ):
            return tokens
        size, odds = self.blocks.size, 2 * (log(self.table.values.shape[1]) + ODDS)
        for number, start in enumerate(range(0, self.blocks.length, size)):
            places = list(range(start, min(start + size, self.blocks.length)))
            near = self.shortlist(number, _LIST * size)
            fit = self.fit(near, places)
            scores, at = fit.score.topk(2, largest=False)
            right = fit.fits(self.blocks.level).gather(1, at)[:, 0]
            right &= (scores[:, 1] - scores[:, 0] > odds) & (fit.keys_free.gather(1, at)[:, 0] > 0)
            each = zip(places, at[:, 0].tolist(), right.tolist(), strict=True)
            tokens |= {place: int(near[k]) for place, k, sure in each if sure}
            self._placed(tokens, near, fit, places)
        return tokens

    def _placed(
        self, tokens: dict[int, int], near: Tensor, fit: Fit, places: Sequence[int]
    ) -> None:
        """Where every head hides the keys: the token of the block that stands nowhere else."""
        inside = {tokens.get(place) for place in places}
        fits = fit.fits(self.blocks.level)
        for row, place in enumerate(places):
            left = [token for token in near[fits[row]].tolist() if token not in inside]
            if float(fit.keys_free[row].max()) == 0 and len(left) == 1:
                tokens[place] = left[0]

    def whole(self, tokens: dict[int, int]) -> list[int]:
        """The text to the last token that fits; where none does, the one that comes nearest."""
        ids: list[int] = []
        for place in range(max(tokens, default=-1) + 1):
            if place not in tokens:
                near = torch.cat([self.shortlist(place // self.blocks.size, _NEAR),
                                  self._by_keys(place)]).unique()  # fmt: skip
                tokens[place] = int(near[self.fit(near, [place]).score[0].argmin()])
            ids.append(tokens[place])
        return self._spanning(ids)

    def _spanning(self, ids: list[int]) -> list[int]:
        """The text with tokens exchanged for others with which they span their blocks better.

        A token between two of its like is nearly in a block without standing there.
        """
        size, table = self.blocks.size, self.table
        for start in range(0, len(ids), size):
            number, places = start // size, torch.arange(start, min(start + size, len(ids)))
            near = self.shortlist(number, _LIST * size)
            for place in places.tolist():
                tokens = torch.tensor(ids[start : start + size])
                rows = [table.rows(side, tokens, places) for side in self.blocks.sides]
                spans = self.blocks.spans(rows, number)
                if all(each is None or each.left <= _LEFT for each in spans):
                    break
                at = torch.full_like(near, place)
                given = [table.rows(side, near, at) for side in self.blocks.sides]
                lost = _lost(spans, place - start, given)
                if float(lost.min()) < 0:
                    ids[place] = int(near[lost.argmin()])
        return ids

    def _by_keys(self, place: int) -> Tensor:
        """The tokens whose keys fit best at a position: their values may be hidden."""
        number, inside = divmod(place, self.blocks.size)
        every = torch.arange(self.table.keys.shape[1])
        total = torch.zeros(len(every))
        for side, each in zip(self.blocks.sides, self.blocks.maps, strict=True):
            if side.keys and each is not None and each.hidden != inside:
                rows = self.table.rows(side, every, torch.full_like(every, place))
                total = total + each.misfits(side, rows, number).clamp(max=_CAP)
        return total.topk(min(_NEAR, len(total)), largest=False).indices


@dataclass(frozen=True)
class MixedKeys:
    """Row spaces of blocks: M from the first tokens, if they are known or usual; then the text."""

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        for number, leak in enumerate(leaks):
            if not isinstance(leak, MixedCache):
                raise Unsuccessful(Status.NOT_APPLICABLE, "this attack reads mixed caches")
            target.count.begin([number])
            yield number, _read(target, leak)


def _read(target: Target, leak: MixedCache) -> Proposal:
    sizes = sizes_of(leak)
    cut = [Blocks.of(leak, size) for size in sizes]
    if all(float(side.free.max()) < 1 for blocks in cut for side in blocks.sides):
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"blocks of {sizes[0]} positions span all {leak.keys.shape[-1]} dimensions of a head: "
            "no token is outside of one",
        )
    known = [leak.known] if leak.known is not None else openings(target)
    known = [ids[: leak.keys.shape[1]] for ids in known if len(ids)]
    if not first_and_rotary(target, leak):
        return _left_to_right(target, cut, known)
    table = Table.of(target)
    best: tuple[int, list[int], str] = (0, [], "")
    for blocks, ids in product(cut, known):
        reader = Reader(table, blocks).solved(dict(enumerate(ids)))
        if reader.blocks.level <= _OPENS:
            reader, tokens = reader.read(dict(enumerate(ids)))
            note = f"blocks of {blocks.size}, {len(ids)} first tokens known"
            best = max(best, (len(tokens), reader.whole(tokens), note))
            if len(tokens) > len(ids):
                break
    if best[0] * 2 < leak.keys.shape[1] - sizes[0] or not best[1]:
        for blocks in cut:
            found = guessed(Reader(table, blocks))
            if found is not None:
                reader, tokens = found
                note = f"blocks of {blocks.size}, no token known"
                best = max(best, (len(tokens), reader.whole(tokens), note))
                break
    if not best[1]:
        raise Unsuccessful(Status.UNSOLVED, "no tokens are known that would give the secret map")
    return Proposal(best[1], fitting=target.vocabulary, note=best[2])


@torch.no_grad()
def unmixed(target: Target, leak: KeyValues) -> MixedCache | None:
    """Keys and values that are no token's, as a mixed cache; None where they may be as they were.

    The values of a first layer are those of a token, whatever its position; A makes numbers many
    times as large as any of the layer's own.
    """
    parts, number = target.parts, leak.exposure.block(target.parts)
    if not parts.causal or leak.mask is not None or bool(leak.keys.isnan().any()):
        return None
    length = min(leak.keys.shape[1], parts.max_length)
    ids = random_texts(target, 1, length, torch.Generator().manual_seed(0)).to(parts.device)
    usual = capture(target.model, leak.exposure, ids=ids)["values"].abs().max()
    strange = bool(leak.values.square().mean().sqrt() > usual.cpu())
    mixed = MixedCache(leak.keys, leak.values, number, precision=leak.precision, noise=leak.noise)
    if not strange and first_and_rotary(target, mixed):
        rows = leak.values[:, :_LOOKED].transpose(0, 1).flatten(1)
        table = Table.of(target).values.transpose(0, 1).flatten(1)
        far = torch.stack([(table - row).norm(dim=-1).min() / row.norm() for row in rows])
        strange = bool(far.median() > _STRANGE)
    return mixed if strange else None


def sizes_of(leak: MixedCache) -> list[int]:
    """The sizes that blocks may have: rows fill whole ones, where the size is not known."""
    if leak.block is not None:
        return [leak.block]
    length = leak.keys.shape[1]
    return [size for size in _BLOCKS if length % size == 0] or [min(length, _BLOCKS[0])]


def openings(target: Target) -> list[list[int]]:
    """What texts for this model usually begin with, the longest first."""
    found: list[list[int]] = []
    for roles in (("user",), ("system", "user")):
        made: list[list[int]] = []
        for text in ("a", "The 1", target.decode([target.vocabulary // 2])):
            talk = [{"role": role, "content": text} for role in roles]
            try:
                ids = target.tokenizer.apply_chat_template(talk, tokenize=True, return_dict=True)
            except (AttributeError, ImportError, TypeError, ValueError):  # it has no template
                return [target.frame()[0]]
            except Exception as error:  # templates refuse what they do not know, as they like
                if type(error).__module__.partition(".")[0] != "jinja2":
                    raise
                break
            made.append(list(ids["input_ids"]))
        else:
            same = takewhile(lambda column: len(set(column)) == 1, zip(*made, strict=False))
            found.append([column[0] for column in same])
    return sorted([*found, target.frame()[0]], key=len, reverse=True)


def judge_mixed(target: Target, leak: MixedCache, ids: list[int]) -> Verdict:
    """Is this the text? Its rows must lie in their blocks, span them, and no other token may."""
    text = torch.tensor([ids], device=target.parts.device)
    with torch.no_grad():
        given = capture(target.model, leak.exposure, ids=text)
    places = torch.arange(len(ids))
    best: Blocks | None = None
    rows: list[Tensor] = []
    for size in sizes_of(leak):
        if len(ids) > leak.keys.shape[1]:
            break
        blocks = Blocks.of(leak, size)
        rows = [given["keys" if side.keys else "values"][0, side.head].float().cpu()
                for side in blocks.sides]  # fmt: skip
        blocks = blocks.solved(rows, places)
        if best is None or blocks.level < best.level:
            best = blocks
        if best.level <= _OPENS:
            break
    if best is None or best.level == torch.inf:
        reason = "the text has too few tokens for the map to be solved from them"
        return Verdict.without_fit(Status.UNSOLVED, reason, len(ids))
    return _verdict(target, best, rows, ids)


def _verdict(target: Target, blocks: Blocks, rows: Sequence[Tensor], ids: list[int]) -> Verdict:
    level, size, others = max(1.0, blocks.level), blocks.size, _others(target, blocks, ids)
    margins, fitting, left = list[float](), list[bool](), 0.0
    for start in range(0, blocks.length, size):
        number, own = start // size, [each[start : start + size] for each in rows]
        spans = blocks.spans(own, number)
        left = max([left, *(torch.inf if each is None else each.left for each in spans)])
        tokens = ids[start : start + size]
        for inside, token in enumerate(tokens):
            fit = blocks.fit([each[inside][None, None] for each in own], [start + inside])
            fitting.append(bool(fit.fits(level)))
            near, given = others(start + inside)
            lost = _lost(spans, inside, given)
            same = near == token
            if not float(fit.keys_free) and tokens.count(token) == 1:
                # Another one of the block cannot stand here as well: this one would be missing.
                same |= torch.isin(near, torch.tensor(tokens))
            margins.append(float(lost.masked_fill(same, torch.inf).min()) / level)
    whole = left <= _LEFT and all(fitting) and level <= _CLAIMED
    odds = 2 * (log(target.vocabulary) + ODDS)
    marks = tuple(
        Mark.VERIFIED if whole and margin > odds
        else Mark.LIKELY if fits and margin > 2 * ODDS and level <= _CLAIMED
        else Mark.UNKNOWN
        for fits, margin in zip(fitting, margins, strict=True)
    )  # fmt: skip
    certain, likely = marks.count(Mark.VERIFIED), marks.count(Mark.LIKELY)
    status = Status.INEXACT if certain + likely else Status.UNSOLVED
    status = Status.RECOVERED if certain == len(marks) else status
    off = blocks.level**0.5
    reason = (
        f"behind a secret mix of {size} positions, in whose span the tokens lie to {off:.2g} of "
        "its rounding"
    )
    if status is not Status.RECOVERED:
        reason += f"; of {len(marks)} tokens {certain} verified, {likely} likely"
        reason += "" if left <= _LEFT else "; they do not span their blocks"
    return Verdict(status, reason, status is Status.RECOVERED, off, 1.0, marks)


def _lost(spans: Sequence[Spans | None], inside: int, given: Sequence[Tensor]) -> Tensor:
    """What all sides lose in likelihood (c,) with other rows (c, d) at a place of a block."""
    pairs = zip(spans, given, strict=True)
    return torch.stack([each.losses(inside, rows) for each, rows in pairs if each is not None]).sum(
        0
    )


Others = Callable[[int], tuple[Tensor, Sequence[Tensor]]]


def _others(target: Target, blocks: Blocks, ids: list[int]) -> Others:
    """For each position the tokens (c,) that might stand there as well, and each side's rows."""
    if first_and_rotary(target, blocks.leak):
        reader, lists = Reader(Table.of(target), blocks), dict[int, Tensor]()

        def by_table(place: int) -> tuple[Tensor, Sequence[Tensor]]:
            number = place // blocks.size
            if number not in lists:
                lists[number] = reader.shortlist(number, _LIST * blocks.size)
            at = torch.full_like(lists[number], place)
            rows = [reader.table.rows(side, lists[number], at) for side in blocks.sides]
            return lists[number], rows

        return by_table
    behind = Behind(target, blocks, ids)
    near = most_similar(target.parts.table.float(), torch.tensor(ids, device=target.parts.device))
    return lambda place: (near[:, place].cpu(), behind.rows(near[:, place], place))


def first_and_rotary(target: Target, leak: MixedCache) -> bool:
    """Are the rows of a token the same behind every prefix, but for a rotation?"""
    return leak.layer == 1 and bool(target.parts.rotary)


# Rows that depend on the prefix: left to right.


class Behind:
    """The rows of tokens behind the beginning of a text, for each side of a leak."""

    def __init__(self, target: Target, blocks: Blocks, ids: Sequence[int]) -> None:
        self.sides, self.exposure = blocks.sides, blocks.leak.exposure
        self.device = target.parts.device
        self.branches = Branches(target.model, torch.zeros(1, dtype=torch.long, device=self.device))
        self.own = self.go_on(ids)

    @torch.no_grad()
    def go_on(self, ids: Sequence[int]) -> list[Tensor]:
        """Take tokens to be right, and return their rows (n, d)."""
        one = torch.zeros(1, dtype=torch.long, device=self.device)
        text = torch.tensor([list(ids)], device=self.device)
        given = self.branches.expose(self.exposure, one == 0, ids=text)
        self.branches.accept(one, one + len(ids), one)
        return self._of(given)

    @torch.no_grad()
    def rows(self, tokens: Tensor, length: int) -> list[Tensor]:
        """Rows (c, d) of tokens (c,), each alone behind the first `length` tokens."""
        return self._of(self.branches.each(self.exposure, 0, length, tokens.to(self.device))[0])

    def _of(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        return [
            given["keys" if side.keys else "values"][0, side.head].float().cpu()
            for side in self.sides
        ]


def _left_to_right(
    target: Target, cut: Sequence[Blocks], known: Sequence[Sequence[int]]
) -> Proposal:
    """Token by token, from some that are known."""
    for blocks, first in product(cut, known):
        behind = Behind(target, blocks, first)
        blocks = blocks.solved(behind.own, torch.arange(len(first)))
        if blocks.level <= _OPENS:
            break
    else:
        raise Unsuccessful(
            Status.UNSOLVED, "no first tokens are known, or too few, that would give the secret map"
        )
    ids, rows, tested = list(first), behind.own, 0
    odds = 2 * (log(target.vocabulary) + ODDS)
    while len(ids) < blocks.length:
        number = len(ids) // blocks.size
        inside = [each[number * blocks.size :] for each in rows]
        last = (number + 1) * blocks.size >= blocks.length and len(inside[0]) > 0
        spans = blocks.spans(inside, number) if last else []
        if last and all(each is not None and each.left <= _LEFT for each in spans):
            break
        found, order, most = None, _predicted(target, ids), behind.branches.at_once(len(ids))
        while len(order):
            tokens, order = order.split([fan := min(_FAN, most, len(order)), len(order) - fan])
            fit = blocks.fit([each[None] for each in behind.rows(tokens, len(ids))], [len(ids)])
            tested += len(tokens)
            scores, at = fit.score[0].topk(min(2, len(tokens)), largest=False)
            apart = len(scores) < 2 or float(scores[1] - scores[0]) > odds
            if bool(fit.fits(blocks.level)[0, at[0]]) and apart:
                found = int(tokens[at[0]])
                break
        if found is None:
            break
        ids.append(found)
        more = behind.go_on([found])
        rows = [torch.cat(pair) for pair in zip(rows, more, strict=True)]
        if len(ids) % _AGAIN == 0:
            blocks = blocks.solved(rows, torch.arange(len(ids)))
    note = f"blocks of {blocks.size}, {len(first)} first tokens known, {tested} tokens tested"
    return Proposal(ids, len(ids), len(ids), note=note, tested=tested)


@torch.no_grad()
def _predicted(target: Target, ids: Sequence[int]) -> Tensor:
    """The tokens that the model itself expects next, the likeliest first."""
    base = cast("Any", target.parts.base)
    states = base(input_ids=torch.tensor([list(ids)], device=target.parts.device))[0]
    return (target.parts.table @ states[0, -1]).argsort(descending=True)


# No token known: lines that the spaces of two guesses have in common.


def _spaces(base: Tensor, rows: Tensor, size: int) -> Tensor:
    """Orthonormal bases (t, d, size) of the maps θ that put each of rows (t, d) into a block."""
    whole, part = (
        torch.complex(*each.double().unflatten(-1, (2, -1)).unbind(-2)) for each in (base, rows)
    )
    lines = whole[None] / part[:, None]
    made = torch.linalg.qr(torch.cat([lines.real, lines.imag], -1).mT)[0]
    return torch.nn.functional.pad(made, (0, size - made.shape[-1])).float()


def _in_common(one: Tensor, others: Tensor) -> Tensor:
    """How near (n,) spaces (n, d, r) come to a line in common with one (d, r); 1: they have it."""
    cosines = others.mT @ one
    products = cosines @ cosines.mT
    for _ in range(_SQUARED):
        products = products @ products
    return products.diagonal(dim1=1, dim2=2).sum(-1) ** 0.5**_SQUARED


def common_tokens(target: Target) -> Tensor:
    """The tokens of plain English by how often they occur in the corpus that ships."""
    lines = SHIPPED.read_text("utf-8").splitlines()
    counts = Counter(
        token for line in lines for text in (line, f" {line}")
        for token in target.tokenizer(text, add_special_tokens=False)["input_ids"]
    )  # fmt: skip
    return torch.tensor([token for token, _ in counts.most_common(_COMMON)])


def guessed(reader: Reader) -> tuple[Reader, dict[int, int]] | None:
    """The text where nothing is known: values first, then keys."""
    blocks = reader.blocks
    size = blocks.sides[0].blocks[0].shape[1]
    if 2 * max(len(base) for base in blocks.sides[0].bases) > size:
        return None  # two guesses always have lines in common
    common = reader.table.target.remembered(
        "common tokens", None, lambda: common_tokens(reader.table.target)
    )
    for side in blocks.sides:
        if side.keys:
            continue
        bags = _bags(reader.table, side, common)
        if bags is None:
            continue
        for keys in blocks.sides:
            found = _in_order(reader, keys, bags) if keys.keys else None
            if found is not None:
                return found
    return None


def _pair(side: Side, rows: Tensor, numbers: Tensor, tokens: Tensor, most: int) -> Iterator[Tensor]:
    """Maps θ (d,) for pairs of guesses, rows (n, d) of tokens in blocks, that have one in common.

    The first `most` guesses are each compared with all others that are of another token.
    """
    width = max(len(base) for base in side.bases)
    spaces = torch.cat([
        _spaces(base, rows[numbers == number], width) for number, base in enumerate(side.bases)
    ])  # fmt: skip
    order = torch.cat([(numbers == n).nonzero().flatten() for n in range(len(side.bases))])
    spaces = spaces[order.argsort()]
    for one in range(min(most, len(rows))):
        near = _in_common(spaces[one], spaces).masked_fill(tokens == tokens[one], 0.0)
        for other in near.topk(min(_NEAR, len(near))).indices.tolist():
            both = torch.tensor([one, other])
            products = _products(rows[both])
            outside, errors = (products @ form[numbers[both]] @ products.mT for form in side.forms)
            weights = 1 / errors.diagonal(dim1=1, dim2=2).mean(-1)
            theta = torch.linalg.eigh((outside * weights[:, None, None]).sum(0))[1][:, 0]
            sizes = theta.unflatten(0, (2, -1)).square().sum(0)
            if float(sizes.sum() ** 2 / sizes.square().sum()) > _EVEN * len(sizes):
                yield theta
                yield theta / sizes.sqrt().repeat(2)  # as it is where M has no scales


def _map(theta: Tensor) -> Map:
    return Map(_products((theta / theta.norm() * (len(theta) / 2) ** 0.5)[None])[0], None, 1.0)


def _unplaced(side: Side, rows: Tensor, numbers: Tensor) -> Map | None:
    """The map from rows (n, d) of tokens that are in blocks `numbers` (n,), in whatever place."""
    inside = torch.arange(len(rows))  # a place of its own for each, of which A hides one at most
    found = solved(side, rows, numbers * len(rows) + inside, len(rows))
    return None if found is None else replace(found, hidden=None)


def _bags(table: Table, side: Side, common: Tensor) -> list[Tensor] | None:
    """The tokens of each block, by their values: one frequent token against all common ones."""
    count, vocabulary = len(side.blocks), table.values[side.head]
    tokens = common.repeat_interleave(count)  # the most frequent first, in every block
    numbers = torch.arange(count).repeat(len(common))
    rows = vocabulary[tokens]
    whole = sum(len(each) for each in side.blocks)
    best: tuple[int, Map | None] = (0, None)
    for theta in _pair(side, rows, numbers, tokens, _FIRST * count):
        found = _map(theta)
        misfits = torch.cat([found.misfits(side, vocabulary[common], n) for n in range(count)])
        fits = int((misfits < _NEARLY).sum())
        if fits > whole:  # more than stand there: a map that puts anything into a block
            continue
        best = max(best, (fits, found), key=lambda pair: pair[0])
        if fits >= 5 * count:
            break
    found, most, bags = best[1], _NEARLY, list[Tensor]()
    for _ in range(3):
        if found is None:
            return None
        bags = [
            (found.misfits(side, vocabulary, n) < most).nonzero().flatten() for n in range(count)
        ]
        numbers = torch.cat([torch.full_like(bag, n) for n, bag in enumerate(bags)])
        every = torch.cat(bags)
        if not 2 * count < len(every) <= 4 * whole:
            return None
        found, most = _unplaced(side, vocabulary[every], numbers), _HIDDEN
    return bags


def _in_order(
    reader: Reader, side: Side, bags: Sequence[Tensor]
) -> tuple[Reader, dict[int, int]] | None:
    """The tokens of blocks put into their places by one head's keys."""
    size, table = reader.blocks.size, reader.table
    number = max(range(len(bags)), key=lambda n: len(bags[n]) if len(side.blocks[n]) == size else 0)
    places = torch.arange(number * size, (number + 1) * size)
    tokens = bags[number].repeat(size)
    at = places.repeat_interleave(len(bags[number]))
    rows = table.rows(side, tokens, at)
    numbers = torch.full_like(tokens, number)
    for theta in _pair(side, rows, numbers, tokens, len(tokens)):
        found = _map(theta)
        if int((found.misfits(side, rows, number) < _NEARLY).sum()) < size // 2:
            continue
        shifted = [_shifted(reader, side, found, bags, shift) for shift in range(-size, size + 1)]
        likely = sorted(shifted, key=len, reverse=True)[:_SHIFTS]
        read = max((reader.read(known) for known in likely if known), key=lambda read: len(read[1]))
        if len(read[1]) >= size // 2:
            return read
    return None


def _shifted(
    reader: Reader, side: Side, found: Map, bags: Sequence[Tensor], shift: int
) -> dict[int, int]:
    """The tokens that fit, with all positions shifted."""
    known: dict[int, int] = {}
    for number, bag in enumerate(bags):
        start = number * reader.blocks.size
        here = torch.arange(start, start + len(side.blocks[number]))
        here = here[here + shift >= 0]
        if not len(here) or not len(bag):
            continue
        at = (here + shift).repeat_interleave(len(bag))
        misfits = found.misfits(side, reader.table.rows(side, bag.repeat(len(here)), at), number)
        least, which = misfits.unflatten(0, (len(here), -1)).min(1)
        kept = least < _NEARLY
        known |= dict(zip(here[kept].tolist(), bag[which[kept]].tolist(), strict=True))
    return known
