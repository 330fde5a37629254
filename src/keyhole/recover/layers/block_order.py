"""The order of a block's tokens where rounding hides the directions of its keys.

Values still tell which tokens a block holds. Which stands where is a question to all of them at
once (block_squares.py): first an assignment by what single keys say; then, for as long as the
squares fall, one by what they would be with one token exchanged; then exchanges of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from keyhole.recover.layers.block_reader import LIST, Reader
from keyhole.recover.layers.block_spans import DEVIATIONS, Map, Side
from keyhole.recover.layers.block_squares import directions, exchanged, fitted, squares
from keyhole.recover.recovery import ODDS

_MOVES = 8  # rounds of exchanges in a block, of each kind
_PAIRS, _NEAR = 48, 2  # exchanges that are compared exactly: of near places, and that promise most
_AGAIN = 1e6  # what a token's second place costs in an assignment: first come those not yet placed
_PASSES = 3  # over the text, with the map solved for again
_NOT_FILLED = 2.0  # times what is expected: rows that fill a block up are far larger than tokens
_LONGER = 4  # tokens of a last block, at most, that are there twice


@dataclass(frozen=True, eq=False)
class Order:
    """Tokens (n,) at the first places of a block: their squares, and how many are expected.

    `free` counts the directions of all sides that are no token's.
    """

    tokens: Tensor
    cost: float
    expected: float
    free: int

    @property
    def fits(self) -> bool:
        return self.cost <= self.expected + DEVIATIONS * (2 * self.expected) ** 0.5

    def follows(self, shorter: Order) -> bool:
        """Is the last token there? It has to explain more than chance, or what else is free."""
        if self.free < shorter.free:
            return self.cost < _NOT_FILLED * self.expected
        fewer = shorter.expected - self.expected
        least = fewer + DEVIATIONS * (2 * fewer) ** 0.5 + 2 * ODDS
        return shorter.cost - self.cost > least


@dataclass(frozen=True, eq=False)
class Orders:
    """One block, and arrangements of tokens in it."""

    reader: Reader
    number: int

    def sides(self) -> list[tuple[Side, Map]]:
        pairs = zip(self.reader.blocks.sides, self.reader.blocks.maps, strict=True)
        return [(side, found) for side, found in pairs if found is not None]

    def rows(self, side: Side, tokens: Tensor, places: Tensor) -> Tensor:
        """Rows (…, d) of tokens (…) at places (…) of the block."""
        at = (places + self.number * self.reader.blocks.size).expand_as(tokens).flatten()
        return self.reader.table.rows(side, tokens.flatten(), at).double().view(*tokens.shape, -1)

    def fit(self, tokens: Tensor, near: Tensor) -> tuple[float, float, Tensor, list[Fitted]]:
        """Squares of an arrangement (n,), how many there are, and (n, c) with others by keys."""
        blocks, count, places = self.reader.blocks, len(tokens), torch.arange(len(tokens))
        added = any(found.hidden is not None for _, found in self.sides())
        total, expected, made = 0.0, 0.0, list[Fitted]()
        rest = torch.zeros(count, len(near), dtype=torch.float64)
        for side, found in self.sides():
            seen = places != (-1 if found.hidden is None else found.hidden)
            plain, block = self.rows(side, tokens, places), side.blocks[self.number]
            own = (plain @ found.matrix)[seen]
            own = own if side.keys else own[once(tokens[seen])]
            spread = side.spreads(self.number, plain)
            free = found.free(count, blocks.size - count, added)
            if added and found.hidden is None:
                free = 1 + (count < blocks.size)
            cost, _, more = fitted(block, spread, own[None], directions(block, own, free))
            made.append(Fitted(side, found, seen, spread, float(cost), more[0]))
            total += float(cost)
            expected += (len(block) - free) * (block.shape[1] - len(own) - free)
            if side.keys and len(near) and len(own):
                others = self.rows(side, near.expand(count, -1), places[:, None]) @ found.matrix
                rest[seen] += exchanged(block, spread, own, more[0], others[seen]) - float(cost)
        return total, expected, rest, made

    def exact(self, made: list[Fitted], tokens: Tensor, others: Tensor) -> Tensor:
        """By how much other arrangements (h, n) have larger squares (h,)."""
        rises, places = torch.zeros(len(others), dtype=torch.float64), torch.arange(len(tokens))
        for each in made:
            shown, own = others[:, each.seen], tokens[each.seen]
            if each.side.keys:
                which = (shown != own).any(-1)
            else:  # those matter that come to be hidden, or no longer are
                which = ~(shown[..., None] == own).any(1).all(-1)
                which |= ~(shown[..., None] == own).any(2).all(-1)
            if bool(which.any()):
                given = self.rows(each.side, others[which], places) @ each.found.matrix
                given = given[:, each.seen] * (once(shown[which]) | each.side.keys)[..., None]
                block = each.side.blocks[self.number]
                rises[which] += squares(block, each.spread, given, each.free) - each.cost
        return rises

    def settled(self, tokens: Tensor, near: Tensor, fixed: int) -> Order:
        """The arrangement after exchanges; the first `fixed` tokens stay."""
        cost, expected, rest, made = self.fit(tokens, near)
        for _ in range(_MOVES):
            better = _assigned(rest, near, tokens[:fixed])
            if bool((better == tokens).all()):
                break
            again = self.fit(better, near)
            if again[0] >= cost:
                break
            tokens, (cost, expected, rest, made) = better, again
        for _ in range(_MOVES):
            others, where = _exchanges(tokens, near, rest, fixed)
            rises = self.exact(made, tokens, others)
            used, changed = set[int](), tokens.clone()
            for each in rises.argsort().tolist():
                if float(rises[each]) < 0 and used.isdisjoint(where[each]):
                    changed[where[each]] = others[each][where[each]]
                    used |= set(where[each])
            if not used:
                break
            again = self.fit(changed, near)
            if again[0] >= cost:  # not all of them go together
                each = int(rises.argmin())
                changed, again = others[each], self.fit(others[each], near)
                if again[0] >= cost:
                    break
            tokens, (cost, expected, rest, made) = changed, again
        return Order(tokens, cost, expected, sum(len(each.free) for each in made))

    def as_it_is(self, tokens: Tensor) -> Order:
        cost, expected, _, made = self.fit(tokens, tokens[:0])
        return Order(tokens, cost, expected, sum(len(each.free) for each in made))

    def margins(self, tokens: Tensor) -> Tensor:
        """What the squares rise by (n,), at least, if another one of the block is at a place."""
        near = tokens.unique()
        _, _, rest, made = self.fit(tokens, near)
        others, where = _exchanges(tokens, near, rest, 0)
        least = torch.full((len(tokens),), torch.inf, dtype=torch.float64)
        for rise, places in zip(self.exact(made, tokens, others).tolist(), where, strict=True):
            least[places] = least[places].clamp(max=rise)
        return least

    def cut(self, tokens: Tensor) -> Tensor:
        """The tokens (n,) of a last block less those that chance explains, or with what lacks."""
        own = self.as_it_is(tokens)
        while len(tokens) > 1 and not own.follows(shorter := self.as_it_is(tokens[:-1])):
            tokens, own = tokens[:-1], shorter
        while len(tokens) < self.reader.blocks.size:
            longer = [self.as_it_is(torch.cat([tokens, each[None]])) for each in tokens.unique()]
            best = min(longer, key=lambda order: order.cost)
            if not best.follows(own):
                break
            tokens, own = best.tokens, best
        return tokens

    def ends(self, tokens: Tensor) -> bool:
        """Are these (n,) all tokens of a last block? One that no keys show may follow them."""
        hidden = all(found.hidden == len(tokens) for side, found in self.sides() if side.keys)
        return torch.equal(self.cut(tokens), tokens) and not hidden

    def inside(self) -> Tensor:
        """The tokens (c,) that the block holds, by their values; one head may hide one."""
        blocks, table = self.reader.blocks, self.reader.table
        near = self.reader.shortlist(self.number, LIST * blocks.size)
        pairs = [(side, found) for side, found in self.sides() if not side.keys]
        misfits = torch.stack([
            found.misfits(side, table.values[side.head, near], self.number) for side, found in pairs
        ])  # fmt: skip
        count = max(1, len(pairs) - 1)
        total = (misfits.sum(0) - (misfits.amax(0) if len(pairs) > 1 else 0.0)) / count
        free = count * min(float(side.free[self.number]) for side, _ in pairs)
        return near[total <= max(1.0, blocks.level) * (1 + DEVIATIONS * (2 / free) ** 0.5)]

    def found(self, known: Tensor, last: bool) -> Order | None:
        """The block's tokens in their order, of which some first ones may be known.

        A last block may be filled up: a token more has to lower the squares by more than chance.
        """
        size, near = self.reader.blocks.size, self.inside()
        near = torch.cat([near, known]).unique()
        places = list(range(self.number * size, (self.number + 1) * size))
        scores = self.reader.fit(near, places).score if len(near) else torch.zeros(size, 0)
        best: Order | None = None
        least = max(len(known), min(size, len(near))) if last else size
        for count in range(least, min(size, least + _LONGER) + 1) if len(near) else ():
            order = self.settled(_assigned(scores[:count], near, known), near, len(known))
            if best is not None and not order.follows(best):
                break
            best = order
        return best


@dataclass(frozen=True, eq=False)
class Fitted:
    """One side's squares for an arrangement."""

    side: Side
    found: Map
    seen: Tensor
    spread: Tensor
    cost: float
    free: Tensor


def once(tokens: Tensor) -> Tensor:
    """Which of tokens (…, n) are not there before: their values count once."""
    return ~(tokens[..., :, None] == tokens[..., None, :]).tril(-1).any(-1)


def _assigned(costs: Tensor, near: Tensor, known: Tensor) -> Tensor:
    """The tokens (n,) by costs (n, c), each of them somewhere before one is there twice."""
    from scipy.optimize import linear_sum_assignment  # on demand: seldom needed

    costs = costs.double().clone()
    for place, token in enumerate(known.tolist()):
        costs[place] = torch.where(near == token, -_AGAIN, costs[place])
    again = -(-len(costs) // len(near)) + 2
    whole = torch.cat([costs + n * _AGAIN for n in range(again)], 1)
    tokens = near[torch.as_tensor(linear_sum_assignment(whole.numpy())[1]) % len(near)]
    tokens[: len(known)] = known
    return tokens


def _exchanges(
    tokens: Tensor, near: Tensor, rest: Tensor, fixed: int
) -> tuple[Tensor, list[list[int]]]:
    """Arrangements (h, n) next to one: two tokens exchanged, or one for another that is there."""
    at = torch.searchsorted(near, tokens)  # `near` is sorted
    promised: list[tuple[float, list[int], Tensor]] = []
    for a, b in combinations(range(fixed, len(tokens)), 2):
        if tokens[a] != tokens[b]:
            promise = float(rest[a, at[b]] + rest[b, at[a]]) if b - a > _NEAR else -torch.inf
            promised.append((promise, [a, b], tokens[[b, a]]))
    for place in range(fixed, len(tokens)):
        if int((tokens == tokens[place]).sum()) > 1:
            for other in near[near != tokens[place]]:
                column = int(torch.searchsorted(near, other))
                promised.append((float(rest[place, column]), [place], other[None]))
    promised.sort(key=lambda each: each[0])
    others, where = tokens.repeat(min(_PAIRS, len(promised)), 1), list[list[int]]()
    for row, (_, places, given) in zip(others, promised, strict=False):
        row[places] = given
        where.append(places)
    return others, where


def ordered(reader: Reader, known: Sequence[int]) -> list[int]:
    """The text by a map that its first tokens gave, and again by those that the text gives."""
    size, count = reader.blocks.size, len(reader.blocks.sides[0].blocks)
    first, ids = torch.tensor(known), list[int]()
    for number in range(count):
        own = first[number * size : (number + 1) * size]
        order = None if len(own) == size else Orders(reader, number).found(own, number == count - 1)
        if order is None and len(own) < size:
            break
        ids += own.tolist() if order is None else order.tokens.tolist()
    for _ in range(_PASSES):
        reader = reader.solved(dict(enumerate(ids)))
        before, text = list(ids), torch.tensor(ids)
        for number, own in enumerate(text.split(size)):
            fixed = min(max(0, len(first) - number * size), size)
            if fixed < len(own):
                order = Orders(reader, number).settled(own, own.unique(), fixed)
                ids[number * size : (number + 1) * size] = order.tokens.tolist()
        if len(ids) > (last := count * size - size):
            ids[last:] = Orders(reader, count - 1).cut(torch.tensor(ids[last:])).tolist()
        if ids == before:
            break
    return ids
