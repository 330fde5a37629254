"""Read the first layer of a mixed cache, in a model with rotary positions: whole blocks at once.

`Reader` takes the blocks and the rows of all tokens (`Table`), and returns tokens by
position; `ordered` does so where keys are rounded too far for single tokens.

The equations are those of mixed.py. A side is the keys, or the values, of one head; its
map is M, and in every block a secret row A hides one place from it (block_spans.py).
The rows of every token are known beforehand, so each can be tried at each place of a
block. From tokens that are known, `Reader.read` alternates between solving for the maps
and finding tokens that fit.

If rounding hides the directions of a block's keys, values still show which tokens it
holds, and `ordered` finds their order: that with the least sum of squares over all keys
of the block. It starts with an assignment by each key alone. As long as the squares
fall, it repeats the assignment by what they would be with one token replaced, and then
exchanges pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core.float64 import full, identity, zeros
from keyhole.core.tensors import indices_of, row_numbers
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.layers.block_spans import (
    CAP,
    DEVIATIONS,
    LEFT,
    Blocks,
    Map,
    Side,
    TokenFit,
    accepted,
    directions,
    exchanged,
    fitted,
    lost_with,
    squares,
)
from keyhole.recover.recovery import LOG_ODDS, verifying_margin

SHORTLIST = 4  # candidates of a block, as a multiple of its tokens
_ROUNDS = 6  # of finding tokens and solving for the maps again
_COMPARED = 2048  # tokens that are compared exactly, after an estimate
# standard deviations of the logarithms of q; the best of many has five by chance
_STANDS_OUT = 8.0
_MOVES = 8  # rounds of assignments in a block, and then of exchanges
# exchanges that are compared exactly: neighbours first, then the most promising
_PAIRS = 48
_NEIGHBOURS = 2  # the largest distance of places that are neighbours
_REPEAT_COST = 1e6  # of a token's second place: every token gets one place first
_PASSES = 3  # over the text, with the maps solved for again
# times the expected squares: with more, a row fills the block and is no token's
_FILLED = 2.0
_REPEATED = 4  # repeated tokens of a last block, at most


class Table(NamedTuple):
    """The first layer's rows of all tokens (heads, v, d), without a position."""

    target: Target
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, target: Target) -> Table:
        return target.remembered("first rows", None, lambda: cls._made(target))

    @classmethod
    @torch.no_grad()
    def _made(cls, target: Target) -> Table:
        parts: list[list[Tensor]] = []
        for given in target.exposed(Exposure("kv", 0), target.tokens[:, None]):
            keys = given["keys"]
            start = torch.zeros_like(keys[:, 0, :, 0]).long()
            both = (target.parts.unrotated(0, keys, start), given["values"])
            parts.append([each[:, :, 0].float().cpu() for each in both])
        keys, values = (
            torch.cat(each).transpose(0, 1) for each in zip(*parts, strict=True)
        )
        return cls(target, keys.contiguous(), values.contiguous())

    def rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys (n, d) as they are at positions (n,)."""
        device = self.target.device
        batch = keys[None, None].to(device)
        return self.target.parts.rotated(0, batch, positions[None].to(device))[
            0, 0
        ].cpu()

    def rows(
        self,
        side: Side,
        tokens: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Return the rows (n, d) of tokens (n,) at positions (n,)."""
        if side.keys:
            return self.rotated(self.keys[side.head, tokens], positions)
        return self.values[side.head, tokens]


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads all positions of a first layer at once, by the table of its rows."""

    table: Table
    blocks: Blocks

    def solved(self, tokens: Mapping[int, int]) -> Reader:
        """Return the reader with maps from tokens that are known, by their positions."""
        ids = torch.tensor(list(tokens.values()))
        places = torch.tensor(list(tokens))
        return replace(self, blocks=self.blocks.solved(self.rows(ids, places), places))

    def rows(self, tokens: Tensor, places: Tensor) -> list[Tensor]:
        """Return each side's rows (n, d) of tokens (n,) at places (n,)."""
        return [self.table.rows(side, tokens, places) for side in self.blocks.sides]

    def shortlist(self, number: int) -> Tensor:
        """Return the tokens (c,) that block `number` may hold, by their values, in any place."""
        values = self.table.values
        count = SHORTLIST * self.blocks.size
        # with a turn, `misfits` estimates
        no_turn = identity(values.shape[2])
        rough = self.by_values(values, number, no_turn)
        tokens = rough.argsort(stable=True)[: max(count, _COMPARED)]
        return tokens[
            self.by_values(values[:, tokens], number).argsort(stable=True)[:count]
        ]

    def by_values(
        self,
        values: Tensor,
        number: int,
        turn: Tensor | None = None,
    ) -> Tensor:
        """Return how badly tokens fit (c,) by their values (heads, c, d) in block `number`.

        A head may hide a token, so the head where it fits worst does not count.
        """
        heads = [
            found.misfits(side, values[side.head], number, turn)
            for side, found in self.blocks.pairs
            if not side.keys
        ]
        misfits = torch.stack(heads)
        return misfits.sum(0) - (misfits.amax(0) if len(misfits) > 1 else 0.0)

    def fit(self, tokens: Tensor, places: Sequence[int]) -> TokenFit:
        """Return how well each of tokens (c,) fits at each of places (p,) of one block."""
        rows: list[Tensor] = []
        for side in self.blocks.sides:
            given = [
                self.table.rows(side, tokens, torch.full_like(tokens, place))
                for place in (places if side.keys else places[:1])
            ]
            rows.append(torch.stack(given))
        return self.blocks.fit(rows, places)

    def read(self, known: Mapping[int, int]) -> tuple[Reader, dict[int, int]]:
        """Return all tokens that fit, by their positions, starting from some that are known."""
        reader = self if self.blocks.maps else self.solved(known)
        tokens: dict[int, int] = {}
        for _ in range(_ROUNDS):
            found = reader.fitting()
            if not found or found == tokens:
                break
            again = reader.solved(found)
            if None in again.blocks.maps:
                break
            reader = again
            tokens = found
            if len(found) > max(found):  # no position before the last is open
                break
        return reader, tokens

    def fitting(self) -> dict[int, int]:
        """Return the tokens that fit at a position where no other token does."""
        tokens: dict[int, int] = {}
        blocks = self.blocks
        if all(side.keys for side, _ in blocks.pairs):
            return tokens
        margin = verifying_margin(self.table.values.shape[1])
        for number, start in enumerate(range(0, blocks.length, blocks.size)):
            places = list(range(start, min(start + blocks.size, blocks.length)))
            near = self.shortlist(number)
            fit = self.fit(near, places)
            fits = fit.fits(blocks.level)
            scores, at = fit.score.topk(2, largest=False)
            sure = fits.gather(1, at)[:, 0] & (scores[:, 1] - scores[:, 0] > margin)
            sure &= fit.keys_free.gather(1, at)[:, 0] > 0
            for row in indices_of(sure).tolist():
                tokens[places[row]] = int(near[at[row, 0]])
            # The token of a place whose keys all heads hide is known if only one of the
            # block is left.
            inside = {tokens.get(place) for place in places}
            for row, place in enumerate(places):
                left = [
                    token for token in near[fits[row]].tolist() if token not in inside
                ]
                if fit.keys_free[row].max() == 0 and len(left) == 1:
                    tokens[place] = left[0]
        return tokens

    def whole(self, tokens: Mapping[int, int]) -> list[int]:
        """Return the text up to the last of `tokens`, with the nearest ones at open positions."""
        places = range(max(tokens, default=-1) + 1)
        filled = dict(tokens)
        for place in places:
            if place not in tokens:
                near = self.likely(place)
                filled[place] = int(near[self.fit(near, [place]).score[0].argmin()])
        reader = self
        if len(filled) > len(tokens):
            again = self.solved(filled)
            reader = self if None in again.blocks.maps else again
        ids = reader.spanning([filled[place] for place in places])
        while len(ids) % self.blocks.size > 1 and reader.explained(ids[:-1]):
            if reader.stands_out(ids[-1], len(ids) - 1):
                break
            ids = ids[:-1]  # no token, but a row that fills the last block
        return ids

    def explained(self, ids: list[int]) -> bool:
        """Return whether the tokens of the last block span it."""
        number = max(0, len(ids) - 1) // self.blocks.size
        places = torch.arange(number * self.blocks.size, len(ids))
        rows = self.rows(torch.tensor(ids)[places], places)
        return self.blocks.explained(rows, number)

    def spanning(self, ids: list[int]) -> list[int]:
        """Return the text with tokens replaced by others that span their blocks better.

        A token that is similar to tokens of a block is nearly in its span without being
        one.
        """
        size = self.blocks.size
        for start in range(0, len(ids), size):
            if self.explained(ids[: start + size]):
                continue
            number = start // size
            near = self.shortlist(number)
            places = torch.arange(start, min(start + size, len(ids)))
            for inside, place in enumerate(places.tolist()):
                tokens = torch.tensor(ids[start : start + size])
                spans = self.blocks.spans(self.rows(tokens, places), number)
                if all(each is None or each.left <= LEFT for each in spans):
                    break
                given = self.rows(near, torch.full_like(near, place))
                lost = lost_with(spans, inside, given)
                if lost.min() < 0:
                    ids[place] = int(near[lost.argmin()])
        return ids

    def likely(self, place: int) -> Tensor:
        """Return the tokens (c,) that may be at a position, by their values or by their keys."""
        number, inside = divmod(place, self.blocks.size)
        keys = self.table.keys
        every = torch.eye(keys.shape[-1])
        turn = self.table.rotated(every, torch.full((len(every),), place)).double()
        total = torch.zeros(keys.shape[1])
        for side, found in self.blocks.pairs:
            if side.keys and found.hidden != inside:
                misfits = found.misfits(side, keys[side.head], number, turn)
                total = total + misfits.clamp(max=CAP)
        count = min(SHORTLIST * self.blocks.size, len(total))
        by_keys = total.topk(count, largest=False).indices
        return torch.cat([self.shortlist(number), by_keys]).unique()

    def stands_out(self, token: int, place: int) -> bool:
        """Return whether a token's keys fit at a position far better than those of all others."""
        near = self.shortlist(place // self.blocks.size)
        near = torch.cat([torch.tensor([token]), near[near != token]])
        logs = self.fit(near, [place]).keys[0].log()
        others = logs[1:][logs[1:].isfinite()]
        apart = others.mean() - logs[0]
        return len(others) > 1 and bool(apart > _STANDS_OUT * others.std())


# The order of a block's tokens if rounding hides the directions of its keys.


class SideSquares(NamedTuple):
    """The sum of squares (`cost`) of one side for an arrangement of tokens.

    `seen` are the places that the side shows, `spread` (b, d) the standard deviations
    of the block's numbers, and `free` (k, d) its directions that are no token's.
    """

    side: Side
    found: Map
    seen: Tensor
    spread: Tensor
    cost: float
    free: Tensor


class Order(NamedTuple):
    """An arrangement: tokens (n,) at the first places of a block, with the squares of each side.

    `cost` is the sum of squares and `expected` its expectation. `others` (n, c) says by
    how much the squares of keys rise with each of c candidates in place of a token.
    `free` counts the directions of all sides that are no token's.
    """

    tokens: Tensor
    cost: float
    expected: float
    others: Tensor
    sides: list[SideSquares]

    @property
    def free(self) -> int:
        return sum(len(each.free) for each in self.sides)

    @property
    def fits(self) -> bool:
        return self.cost <= self.expected + DEVIATIONS * (2 * self.expected) ** 0.5

    def follows(self, shorter: Order) -> bool:
        """Return whether the text has this last token: it explains more than chance would."""
        # it takes the place of a direction that was no token's
        if self.free < shorter.free:
            return self.cost < _FILLED * self.expected
        by_chance = shorter.expected - self.expected
        least = by_chance + DEVIATIONS * (2 * by_chance) ** 0.5 + 2 * LOG_ODDS
        return shorter.cost - self.cost > least


class BlockOrders(NamedTuple):
    """Arrangements of tokens in block `number`."""

    reader: Reader
    number: int

    def rows(
        self,
        side: Side,
        tokens: Tensor,
        places: Tensor,
    ) -> Tensor:
        """Return the rows (…, d) of tokens (…) at places (…) of the block."""
        at = places + self.number * self.reader.blocks.size
        at = at.expand_as(tokens).flatten()
        rows = self.reader.table.rows(side, tokens.flatten(), at)
        return rows.double().view(*tokens.shape, -1)

    def order(self, tokens: Tensor, near: Tensor | None = None) -> Order:
        """Return the arrangement of tokens (n,), with candidates `near` (c,) for each place."""
        near = tokens[:0] if near is None else near
        blocks = self.reader.blocks
        count = len(tokens)
        places = row_numbers(tokens)
        added = any(found.hides for _, found in blocks.pairs)  # a row A, in every block
        total = 0.0
        expected = 0.0
        sides: list[SideSquares] = []
        others = zeros(count, len(near))
        for side, found in blocks.pairs:
            seen = places != found.hidden
            plain = self.rows(side, tokens, places)
            block = side.blocks[self.number]
            own = (plain @ found.matrix)[seen]
            own = own if side.keys else own[first_occurrences(tokens[seen])]
            spread = side.spreads(self.number, plain)
            free = found.free(count, blocks.size - count, added)
            if added and not found.hides:  # A hides a place, but it is not known which
                free = 1 + (count < blocks.size)
            rest = directions(block, own, free)
            cost, _, more = fitted(block, spread, own[None], rest)
            sides.append(SideSquares(side, found, seen, spread, float(cost), more[0]))
            total += float(cost)
            expected += (len(block) - free) * (block.shape[1] - len(own) - free)
            if side.keys and len(near) and len(own):
                rows = self.rows(side, near.expand(count, -1), places[:, None])
                rows = (rows @ found.matrix)[seen]
                changed = exchanged(block, spread, own, more[0], rows)
                others[seen] += changed - float(cost)
        return Order(tokens, total, expected, others, sides)

    def increases(self, order: Order, others: Tensor) -> Tensor:
        """Return by how much the squares of other arrangements (h, n) exceed those of `order`."""
        rises = zeros(len(others))
        places = row_numbers(order.tokens)
        for each in order.sides:
            shown = others[:, each.seen]
            own = order.tokens[each.seen]
            if each.side.keys:
                changed = (shown != own).any(-1)
            else:
                # values have no order: they change only with the set of tokens that is
                # shown
                same = shown[..., None] == own
                changed = ~(same.any(1).all(-1) & same.any(2).all(-1))
            if changed.any():
                given = self.rows(each.side, others[changed], places)
                counts = first_occurrences(shown[changed]) | each.side.keys
                given = (given @ each.found.matrix)[:, each.seen] * counts[..., None]
                block = each.side.blocks[self.number]
                costs = squares(block, each.spread, given, each.free)
                rises[changed] += costs - each.cost
        return rises

    def settled(
        self,
        tokens: Tensor,
        near: Tensor,
        fixed: int,
    ) -> Order:
        """Return the arrangement after exchanges that lower the squares.

        The first `fixed` tokens are kept, and `near` (c,) are the candidates for the
        others.
        """
        order = self.order(tokens, near)
        for _ in range(_MOVES):
            better = _assigned(order.others, near, order.tokens[:fixed])
            if (better == order.tokens).all():
                break
            again = self.order(better, near)
            if again.cost >= order.cost:
                break
            order = again
        for _ in range(_MOVES):
            again = self._exchanged(order, near, fixed)
            if again is None or again.cost >= order.cost:
                break
            order = again
        return order

    def _exchanged(
        self,
        order: Order,
        near: Tensor,
        fixed: int,
    ) -> Order | None:
        """Return the arrangement after all exchanges that lower the squares, or after the best."""
        others, where = _exchanges(order, near, fixed)
        rises = self.increases(order, others)
        used: set[int] = set()
        changed = order.tokens.clone()
        for each in rises.argsort().tolist():
            if rises[each] < 0 and used.isdisjoint(where[each]):
                changed[where[each]] = others[each][where[each]]
                used |= set(where[each])
        if not used:
            return None
        again = self.order(changed, near)
        if again.cost >= order.cost:
            again = self.order(others[int(rises.argmin())], near)
        return again

    def margins(self, tokens: Tensor) -> Tensor:
        """Return the least rise of the squares (n,) with another token of the block at a place."""
        near = tokens.unique()
        order = self.order(tokens, near)
        others, where = _exchanges(order, near, 0)
        rises = self.increases(order, others).tolist()
        least = full(torch.inf, *tokens.shape)
        for rise, places in zip(rises, where, strict=True):
            least[places] = least[places].clamp(max=rise)
        return least

    def cut(self, tokens: Tensor) -> Tensor:
        """Return the tokens (n,) of a last block without last ones that chance explains too.

        Then repeated tokens that the block lacks are added: values do not show them.
        """
        own = self.order(tokens)
        while len(own.tokens) > 1:
            shorter = self.order(own.tokens[:-1])
            if own.follows(shorter):
                break
            own = shorter
        while len(own.tokens) < self.reader.blocks.size:
            repeated = own.tokens.unique()[:, None]
            longer = [self.order(torch.cat([own.tokens, each])) for each in repeated]
            best = min(longer, key=lambda order: order.cost)
            if not best.follows(own):
                break
            own = best
        return own.tokens

    def ends(self, tokens: Tensor) -> bool:
        """Return whether these (n,) are known to be all tokens of a last block.

        That is not known if no head's keys show the next place.
        """
        pairs = self.reader.blocks.pairs
        hidden = all(found.hidden == len(tokens) for side, found in pairs if side.keys)
        return torch.equal(self.cut(tokens), tokens) and not hidden

    def inside(self) -> Tensor:
        """Return the tokens (c,) that the block holds, by their values."""
        blocks = self.reader.blocks
        near = self.reader.shortlist(self.number)
        values = [side for side, _ in blocks.pairs if not side.keys]
        count = max(1, len(values) - 1)  # heads that are compared: all but the worst
        misfits = self.reader.by_values(self.reader.table.values[:, near], self.number)
        free = min(float(side.free[self.number]) for side in values)
        return near[misfits / count <= accepted(count * free, blocks.level)]

    def found(self, known: Tensor, last: bool) -> Order | None:
        """Return the block's tokens in their order; some first ones may be known.

        The last block may be filled with rows that are no tokens. There, each further
        token has to lower the squares by more than chance would.
        """
        size = self.reader.blocks.size
        near = torch.cat([self.inside(), known]).unique()
        if not len(near):
            return None
        places = range(self.number * size, (self.number + 1) * size)
        scores = self.reader.fit(near, places).score
        least = max(len(known), min(size, len(near))) if last else size
        best: Order | None = None
        for count in range(least, min(size, least + _REPEATED) + 1):
            first = _assigned(scores[:count], near, known)
            order = self.settled(first, near, len(known))
            if best is not None and not order.follows(best):
                break
            best = order
        return best


def first_occurrences(tokens: Tensor) -> Tensor:
    """Return which of tokens (…, n) are not among those before them: their values count once."""
    return ~(tokens[..., :, None] == tokens[..., None, :]).tril(-1).any(-1)


def _assigned(
    costs: Tensor,
    near: Tensor,
    known: Tensor,
) -> Tensor:
    """Return the best tokens (n,) by costs (n, c); each gets a place before any is repeated."""
    from scipy.optimize import linear_sum_assignment  # on demand: it loads slowly

    costs = costs.double().clone()
    costs[: len(known)].masked_fill_(near == known[:, None], -_REPEAT_COST)
    repeats = -(-len(costs) // len(near)) + 2
    whole = torch.cat([costs + n * _REPEAT_COST for n in range(repeats)], 1)
    tokens = near[torch.as_tensor(linear_sum_assignment(whole.numpy())[1]) % len(near)]
    tokens[: len(known)] = known
    return tokens


def _exchanges(
    order: Order,
    near: Tensor,
    fixed: int,
) -> tuple[Tensor, list[list[int]]]:
    """Return arrangements (h, n) next to `order`, and the places where each differs.

    Two tokens are exchanged, or a repeated token is replaced by one of `near`, which is
    sorted. `order.others` predicts which of these arrangements are worth comparing.
    """
    tokens = order.tokens
    at = torch.searchsorted(near, tokens)
    predicted: list[tuple[float, list[int], Tensor]] = []
    for a, b in combinations(range(fixed, len(tokens)), 2):
        if tokens[a] != tokens[b]:
            rise = -torch.inf  # neighbours are compared in any case
            if b - a > _NEIGHBOURS:
                rise = float(order.others[a, at[b]] + order.others[b, at[a]])
            predicted.append((rise, [a, b], tokens[[b, a]]))
    for place in range(fixed, len(tokens)):
        if (tokens == tokens[place]).sum() > 1:
            for column in indices_of(near != tokens[place]):
                rise = float(order.others[place, column])
                predicted.append((rise, [place], near[column, None]))
    predicted.sort(key=lambda each: each[0])
    chosen = predicted[:_PAIRS]
    others = tokens.repeat(len(chosen), 1)
    for row, (_, places, given) in zip(others, chosen, strict=True):
        row[places] = given
    return others, [places for _, places, _ in chosen]


def ordered(reader: Reader, known: Sequence[int]) -> list[int]:
    """Return the text by a map from its first tokens, and then by the maps from the text itself."""
    size = reader.blocks.size
    last = len(reader.blocks.sides[0].blocks) - 1
    first = torch.tensor(known)
    ids: list[int] = []
    for number in range(last + 1):
        own = first[number * size : (number + 1) * size]
        if len(own) < size:
            order = BlockOrders(reader, number).found(own, number == last)
            if order is None:
                break
            own = order.tokens
        ids += own.tolist()
    for _ in range(_PASSES):
        reader = reader.solved(dict(enumerate(ids)))
        before = ids
        ids = []
        for number, own in enumerate(torch.tensor(before).split(size)):
            orders = BlockOrders(reader, number)
            fixed = min(max(0, len(first) - number * size), size)
            if fixed < len(own):
                own = orders.settled(own, own.unique(), fixed).tokens
            ids += (orders.cut(own) if number == last else own).tolist()
        if ids == before:
            break
    return ids
