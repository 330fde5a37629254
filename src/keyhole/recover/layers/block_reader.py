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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from keyhole.models.capture import Exposure, capture
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


@dataclass(frozen=True, eq=False)
class Table:
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
        parts = target.parts
        made = list[tuple[Tensor, Tensor]]()
        for tokens in torch.arange(target.vocabulary, device=parts.device).split(4096):
            given = capture(target.model, Exposure("kv", 0), ids=tokens[:, None])
            keys = parts.unrotated(0, given["keys"], torch.zeros_like(tokens)[:, None])
            made.append(
                (keys[:, :, 0].float().cpu(), given["values"][:, :, 0].float().cpu())
            )
        keys, values = (
            torch.cat(each).transpose(0, 1).contiguous()
            for each in zip(*made, strict=True)
        )
        return cls(target, keys, values)

    def turn(self, position: int) -> Tensor:
        """Return the rotation (d, d) of keys at a position."""
        parts = self.target.parts
        size = self.keys.shape[-1]
        whole = torch.eye(size, device=parts.device)[None, None]
        at = torch.full((1, size), position, device=parts.device)
        return parts.rotated(0, whole, at)[0, 0].double().cpu()

    def rows(self, side: Side, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the rows (n, d) of tokens (n,) at positions (n,)."""
        if not side.keys:
            return self.values[side.head, tokens]
        keys = self.keys[side.head, tokens]
        device = self.target.parts.device
        turned = self.target.parts.rotated(
            0, keys[None, None].to(device), positions[None].to(device)
        )
        return turned[0, 0].cpu()


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads all positions of a first layer at once, by the table of its rows."""

    table: Table
    blocks: Blocks

    def solved(self, tokens: dict[int, int]) -> Reader:
        """Return the reader with maps from tokens that are known, by their positions."""
        ids = torch.tensor(list(tokens.values()))
        places = torch.tensor(list(tokens))
        return replace(self, blocks=self.blocks.solved(self.rows(ids, places), places))

    def rows(self, tokens: Tensor, places: Tensor) -> list[Tensor]:
        """Return each side's rows (n, d) of tokens (n,) at places (n,)."""
        return [self.table.rows(side, tokens, places) for side in self.blocks.sides]

    def shortlist(self, number: int) -> Tensor:
        """Return the tokens (c,) that block `number` may hold, by their values, in any place."""

        def nearest(values: Tensor, count: int, turn: Tensor | None) -> Tensor:
            total = self.by_values(values, number, turn)
            return total.topk(min(count, len(total)), largest=False).indices

        values = self.table.values
        count = SHORTLIST * self.blocks.size
        no_turn = torch.eye(
            values.shape[2], dtype=torch.float64
        )  # with it, `misfits` estimates
        tokens = nearest(values, max(count, _COMPARED), no_turn)
        return tokens[nearest(values[:, tokens], count, None)]

    def by_values(
        self, values: Tensor, number: int, turn: Tensor | None = None
    ) -> Tensor:
        """Return how badly tokens fit (c,) by their values (heads, c, d) in block `number`.

        A head may hide a token, so the head where it fits worst does not count.
        """
        misfits = torch.stack(
            [
                found.misfits(side, values[side.head], number, turn)
                for side, found in self.blocks.pairs
                if not side.keys
            ]
        )
        return misfits.sum(0) - (misfits.amax(0) if len(misfits) > 1 else 0.0)

    def fit(self, tokens: Tensor, places: Sequence[int]) -> TokenFit:
        """Return how well each of tokens (c,) fits at each of places (p,) of one block."""
        each = tokens.repeat(len(places))
        at = torch.tensor(places).repeat_interleave(len(tokens))
        rows = [
            self.table.rows(side, each, at).unflatten(0, (len(places), -1))
            if side.keys
            else self.table.rows(side, tokens, at)
            for side in self.blocks.sides
        ]
        return self.blocks.fit(rows, places)

    def read(self, known: dict[int, int]) -> tuple[Reader, dict[int, int]]:
        """Return all tokens that fit, by their positions, starting from some that are known."""
        reader = self if self.blocks.maps else self.solved(known)
        tokens = dict[int, int]()
        for _ in range(_ROUNDS):
            found = reader.fitting()
            again = reader.solved(found) if found and found != tokens else reader
            if again is reader or None in again.blocks.maps:
                break
            reader = again
            tokens = found
            if len(found) > max(found):  # no position before the last is open
                break
        return reader, tokens

    def fitting(self) -> dict[int, int]:
        """Return the tokens that fit at a position where no other token does."""
        tokens: dict[int, int] = {}
        if all(side.keys for side, _ in self.blocks.pairs):
            return tokens
        size = self.blocks.size
        margin = verifying_margin(self.table.values.shape[1])
        for number, start in enumerate(range(0, self.blocks.length, size)):
            places = list(range(start, min(start + size, self.blocks.length)))
            near = self.shortlist(number)
            fit = self.fit(near, places)
            scores, at = fit.score.topk(2, largest=False)
            right = fit.fits(self.blocks.level).gather(1, at)[:, 0]
            right &= scores[:, 1] - scores[:, 0] > margin
            right &= fit.keys_free.gather(1, at)[:, 0] > 0
            each = zip(places, at[:, 0].tolist(), right.tolist(), strict=True)
            tokens |= {place: int(near[k]) for place, k, sure in each if sure}
            self._add_hidden(tokens, near, fit, places)
        return tokens

    def _add_hidden(
        self, tokens: dict[int, int], near: Tensor, fit: TokenFit, places: Sequence[int]
    ) -> None:
        """Add the token of a place whose keys all heads hide, if only one of the block is left."""
        inside = {tokens.get(place) for place in places}
        fits = fit.fits(self.blocks.level)
        for row, place in enumerate(places):
            left = [token for token in near[fits[row]].tolist() if token not in inside]
            if float(fit.keys_free[row].max()) == 0 and len(left) == 1:
                tokens[place] = left[0]

    def whole(self, tokens: dict[int, int]) -> list[int]:
        """Return the text up to the last of `tokens`, with the nearest ones at open positions."""
        places = range(max(tokens, default=-1) + 1)
        filled = dict(tokens)
        for place in places:
            if place not in tokens:
                near = self.likely(place)
                filled[place] = int(near[self.fit(near, [place]).score[0].argmin()])
        again = self.solved(filled) if len(filled) > len(tokens) else self
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
        tokens = torch.tensor(ids, dtype=torch.long)[places]
        return self.blocks.explained(self.rows(tokens, places), number)

    def spanning(self, ids: list[int]) -> list[int]:
        """Return the text with tokens replaced by others that span their blocks better.

        A token that is similar to tokens of a block is nearly in its span without being
        one.
        """
        size = self.blocks.size
        for start in range(0, len(ids), size):
            number = start // size
            places = torch.arange(start, min(start + size, len(ids)))
            if self.explained(ids[: start + size]):
                continue
            near = self.shortlist(number)
            for place in places.tolist():
                tokens = torch.tensor(ids[start : start + size])
                spans = self.blocks.spans(self.rows(tokens, places), number)
                if all(each is None or each.left <= LEFT for each in spans):
                    break
                given = self.rows(near, torch.full_like(near, place))
                lost = lost_with(spans, place - start, given)
                if float(lost.min()) < 0:
                    ids[place] = int(near[lost.argmin()])
        return ids

    def likely(self, place: int) -> Tensor:
        """Return the tokens (c,) that may be at a position, by their values or by their keys."""
        number, inside = divmod(place, self.blocks.size)
        turn = self.table.turn(place)
        total = torch.zeros(self.table.keys.shape[1])
        for side, found in self.blocks.pairs:
            if side.keys and found.hidden != inside:
                rows = self.table.keys[side.head]
                total = total + found.misfits(side, rows, number, turn).clamp(max=CAP)
        count = min(SHORTLIST * self.blocks.size, len(total))
        by_keys = total.topk(count, largest=False).indices
        return torch.cat([self.shortlist(number), by_keys]).unique()

    def stands_out(self, token: int, place: int) -> bool:
        """Return whether a token's keys fit at a position far better than those of all others."""
        near = self.shortlist(place // self.blocks.size)
        near = torch.cat([torch.tensor([token]), near[near != token]])
        fit = self.fit(near, [place])
        own = fit.keys[0, 0].log()
        others = fit.keys[0, 1:].log()
        others = others[others.isfinite()]
        return len(others) > 1 and bool(
            others.mean() - own > _STANDS_OUT * others.std()
        )


# The order of a block's tokens if rounding hides the directions of its keys.


@dataclass(frozen=True, eq=False)
class SideSquares:
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


@dataclass(frozen=True, eq=False)
class Order:
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


@dataclass(frozen=True, eq=False)
class BlockOrders:
    """Arrangements of tokens in block `number`."""

    reader: Reader
    number: int

    def rows(self, side: Side, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the rows (…, d) of tokens (…) at places (…) of the block."""
        at = (
            (places + self.number * self.reader.blocks.size).expand_as(tokens).flatten()
        )
        return (
            self.reader.table.rows(side, tokens.flatten(), at)
            .double()
            .view(*tokens.shape, -1)
        )

    def order(self, tokens: Tensor, near: Tensor | None = None) -> Order:
        """Return the arrangement of tokens (n,), with candidates `near` (c,) for each place."""
        near = tokens[:0] if near is None else near
        blocks = self.reader.blocks
        count = len(tokens)
        places = torch.arange(len(tokens))
        added = any(found.hides for _, found in blocks.pairs)  # a row A, in every block
        total = 0.0
        expected = 0.0
        sides = list[SideSquares]()
        others = torch.zeros(count, len(near), dtype=torch.float64)
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
            cost, _, more = fitted(
                block, spread, own[None], directions(block, own, free)
            )
            sides.append(SideSquares(side, found, seen, spread, float(cost), more[0]))
            total += float(cost)
            expected += (len(block) - free) * (block.shape[1] - len(own) - free)
            if side.keys and len(near) and len(own):
                rows = (
                    self.rows(side, near.expand(count, -1), places[:, None])
                    @ found.matrix
                )
                others[seen] += exchanged(
                    block, spread, own, more[0], rows[seen]
                ) - float(cost)
        return Order(tokens, total, expected, others, sides)

    def increases(self, order: Order, others: Tensor) -> Tensor:
        """Return by how much the squares of other arrangements (h, n) exceed those of `order`."""
        tokens = order.tokens
        rises = torch.zeros(len(others), dtype=torch.float64)
        places = torch.arange(len(tokens))
        for each in order.sides:
            shown = others[:, each.seen]
            own = tokens[each.seen]
            if each.side.keys:
                changed = (shown != own).any(-1)
            else:
                # values have no order: they change only with the set of tokens that is
                # shown
                changed = ~(shown[..., None] == own).any(1).all(-1)
                changed |= ~(shown[..., None] == own).any(2).all(-1)
            if bool(changed.any()):
                given = (
                    self.rows(each.side, others[changed], places) @ each.found.matrix
                )
                counts = first_occurrences(shown[changed]) | each.side.keys
                given = given[:, each.seen] * counts[..., None]
                block = each.side.blocks[self.number]
                rises[changed] += (
                    squares(block, each.spread, given, each.free) - each.cost
                )
        return rises

    def settled(self, tokens: Tensor, near: Tensor, fixed: int) -> Order:
        """Return the arrangement after exchanges that lower the squares.

        The first `fixed` tokens are kept, and `near` (c,) are the candidates for the
        others.
        """
        order = self.order(tokens, near)
        for _ in range(_MOVES):
            better = _assigned(order.others, near, order.tokens[:fixed])
            if bool((better == order.tokens).all()):
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

    def _exchanged(self, order: Order, near: Tensor, fixed: int) -> Order | None:
        """Return the arrangement after all exchanges that lower the squares, or after the best."""
        others, where = _exchanges(order, near, fixed)
        rises = self.increases(order, others)
        used = set[int]()
        changed = order.tokens.clone()
        for each in rises.argsort().tolist():
            if float(rises[each]) < 0 and used.isdisjoint(where[each]):
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
        least = torch.full((len(tokens),), torch.inf, dtype=torch.float64)
        for rise, places in zip(
            self.increases(order, others).tolist(), where, strict=True
        ):
            least[places] = least[places].clamp(max=rise)
        return least

    def cut(self, tokens: Tensor) -> Tensor:
        """Return the tokens (n,) of a last block without last ones that chance explains too.

        Then repeated tokens that the block lacks are added: values do not show them.
        """
        own = self.order(tokens)
        while len(tokens) > 1 and not own.follows(shorter := self.order(tokens[:-1])):
            tokens = tokens[:-1]
            own = shorter
        while len(tokens) < self.reader.blocks.size:
            longer = [
                self.order(torch.cat([tokens, each[None]])) for each in tokens.unique()
            ]
            best = min(longer, key=lambda order: order.cost)
            if not best.follows(own):
                break
            tokens = best.tokens
            own = best
        return tokens

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
        free = [
            float(side.free[self.number]) for side, _ in blocks.pairs if not side.keys
        ]
        count = max(1, len(free) - 1)  # heads that are compared: all but the worst
        misfits = (
            self.reader.by_values(self.reader.table.values[:, near], self.number)
            / count
        )
        return near[misfits <= accepted(count * min(free), blocks.level)]

    def found(self, known: Tensor, last: bool) -> Order | None:
        """Return the block's tokens in their order; some first ones may be known.

        The last block may be filled with rows that are no tokens. There, each further
        token has to lower the squares by more than chance would.
        """
        size = self.reader.blocks.size
        near = torch.cat([self.inside(), known]).unique()
        if not len(near):
            return None
        places = list(range(self.number * size, (self.number + 1) * size))
        scores = self.reader.fit(near, places).score
        best: Order | None = None
        least = max(len(known), min(size, len(near))) if last else size
        for count in range(least, min(size, least + _REPEATED) + 1):
            order = self.settled(
                _assigned(scores[:count], near, known), near, len(known)
            )
            if best is not None and not order.follows(best):
                break
            best = order
        return best


def first_occurrences(tokens: Tensor) -> Tensor:
    """Return which of tokens (…, n) are not among those before them: their values count once."""
    return ~(tokens[..., :, None] == tokens[..., None, :]).tril(-1).any(-1)


def _assigned(costs: Tensor, near: Tensor, known: Tensor) -> Tensor:
    """Return the best tokens (n,) by costs (n, c); each gets a place before any is repeated."""
    from scipy.optimize import linear_sum_assignment  # on demand: it loads slowly

    costs = costs.double().clone()
    for place, token in enumerate(known.tolist()):
        costs[place] = torch.where(near == token, -_REPEAT_COST, costs[place])
    repeats = -(-len(costs) // len(near)) + 2
    whole = torch.cat([costs + n * _REPEAT_COST for n in range(repeats)], 1)
    tokens = near[torch.as_tensor(linear_sum_assignment(whole.numpy())[1]) % len(near)]
    tokens[: len(known)] = known
    return tokens


def _exchanges(
    order: Order, near: Tensor, fixed: int
) -> tuple[Tensor, list[list[int]]]:
    """Return arrangements (h, n) next to `order`, and the places where each differs.

    Two tokens are exchanged, or a repeated token is replaced by one of `near`, which is
    sorted. `order.others` predicts which of these arrangements are worth comparing.
    """
    tokens = order.tokens
    at = torch.searchsorted(near, order.tokens)
    predicted: list[tuple[float, list[int], Tensor]] = []
    for a, b in combinations(range(fixed, len(tokens)), 2):
        if tokens[a] != tokens[b]:
            rise = -torch.inf  # neighbours are compared in any case
            if b - a > _NEIGHBOURS:
                rise = float(order.others[a, at[b]] + order.others[b, at[a]])
            predicted.append((rise, [a, b], tokens[[b, a]]))
    for place in range(fixed, len(tokens)):
        if int((tokens == tokens[place]).sum()) > 1:
            for column, other in enumerate(near):
                if other != tokens[place]:
                    predicted.append(
                        (float(order.others[place, column]), [place], other[None])
                    )
    predicted.sort(key=lambda each: each[0])
    others = tokens.repeat(min(_PAIRS, len(predicted)), 1)
    where = list[list[int]]()
    for row, (_, places, given) in zip(others, predicted, strict=False):
        row[places] = given
        where.append(places)
    return others, where


def ordered(reader: Reader, known: Sequence[int]) -> list[int]:
    """Return the text by a map from its first tokens, and then by the maps from the text itself."""
    size = reader.blocks.size
    count = len(reader.blocks.sides[0].blocks)
    first = torch.tensor(known)
    ids = list[int]()
    for number in range(count):
        own = first[number * size : (number + 1) * size]
        if len(own) < size:
            order = BlockOrders(reader, number).found(own, number == count - 1)
            if order is None:
                break
            own = order.tokens
        ids += own.tolist()
    for _ in range(_PASSES):
        reader = reader.solved(dict(enumerate(ids)))
        before = list(ids)
        text = torch.tensor(ids)
        for number, own in enumerate(text.split(size)):
            fixed = min(max(0, len(first) - number * size), size)
            if fixed < len(own):
                order = BlockOrders(reader, number).settled(own, own.unique(), fixed)
                ids[number * size : (number + 1) * size] = order.tokens.tolist()
        if len(ids) > (last := count * size - size):
            ids[last:] = (
                BlockOrders(reader, count - 1).cut(torch.tensor(ids[last:])).tolist()
            )
        if ids == before:
            break
    return ids
