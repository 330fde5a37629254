"""The first layer of a model with rotary positions: blocks of a mixed cache, read all at once.

The rows of every token are known beforehand, so each can be tried at each place (`Reader.read`),
from tokens that are known.

Where rounding hides the directions of a block's keys, values still tell which tokens it holds
(`ordered`). Which stands where is a question to all of them at once (squares in block_spans.py):
first an assignment by what single keys say; then, for as long as the squares fall, one by what they
would be with one token exchanged; then exchanges of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log

import torch
from torch import Tensor

from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.layers.block_spans import (
    CAP,
    DEVIATIONS,
    LEFT,
    Blocks,
    Fit,
    Map,
    Side,
    directions,
    exchanged,
    fitted,
    lost_with,
    squares,
)
from keyhole.recover.recovery import ODDS

_ROUNDS = 6  # of reading and solving again
LIST = 4  # times as many tokens as a block has are looked at again
_KEPT = 2048  # tokens that are compared exactly
_OUT = 8.0  # deviations of the others' logarithms: the least of a vocabulary is some five below
_MOVES = 8  # rounds of exchanges in a block, of each kind
_PAIRS, _NEAR = 48, 2  # exchanges that are compared exactly: of near places, and that promise most
_AGAIN = 1e6  # what a token's second place costs in an assignment: first come those not yet placed
_PASSES = 3  # over the text, with the map solved for again
_NOT_FILLED = 2.0  # times what is expected: rows that fill a block up are far larger than tokens
_LONGER = 4  # tokens of a last block, at most, that are there twice


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

    def turn(self, position: int) -> Tensor:
        """What keys are multiplied by (d, d) at a position."""
        parts, size = self.target.parts, self.keys.shape[-1]
        whole = torch.eye(size, device=parts.device)[None, None]
        at = torch.full((1, size), position, device=parts.device)
        return parts.rotated(0, whole, at)[0, 0].double().cpu()

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

        def nearest(values: Tensor, kept: int, turn: Tensor | None) -> Tensor:
            misfits = torch.stack([
                found.misfits(side, values[side.head], number, turn)
                for side, found in self.blocks.pairs
                if not side.keys
            ])  # fmt: skip
            total = misfits.sum(0) - (misfits.amax(0) if len(misfits) > 1 else 0.0)
            return total.topk(min(kept, len(total)), largest=False).indices

        values = self.table.values
        turn = torch.eye(values.shape[2], dtype=torch.float64)
        tokens = nearest(values, max(count, _KEPT), turn)
        return tokens[nearest(values[:, tokens], count, None)]

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
        reader, tokens = self if self.blocks.maps else self.solved(known), dict[int, int]()
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
        if all(side.keys for side, _ in self.blocks.pairs):
            return tokens
        size, odds = self.blocks.size, 2 * (log(self.table.values.shape[1]) + ODDS)
        for number, start in enumerate(range(0, self.blocks.length, size)):
            places = list(range(start, min(start + size, self.blocks.length)))
            near = self.shortlist(number, LIST * size)
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
            ids = ids[:-1]  # a row that fills the block up
        return ids

    def explained(self, ids: list[int]) -> bool:
        """Do the tokens of the last block span it?"""
        number = max(0, len(ids) - 1) // self.blocks.size
        places = torch.arange(number * self.blocks.size, len(ids))
        tokens = torch.tensor(ids, dtype=torch.long)[places]
        rows = [self.table.rows(side, tokens, places) for side in self.blocks.sides]
        return self.blocks.explained(rows, number)

    def spanning(self, ids: list[int]) -> list[int]:
        """The text with tokens exchanged for others with which they span their blocks better.

        A token between two of its like is nearly in a block without standing there.
        """
        size, table = self.blocks.size, self.table
        for start in range(0, len(ids), size):
            number, places = start // size, torch.arange(start, min(start + size, len(ids)))
            if self.explained(ids[: start + size]):
                continue
            near = self.shortlist(number, LIST * size)
            for place in places.tolist():
                tokens = torch.tensor(ids[start : start + size])
                rows = [table.rows(side, tokens, places) for side in self.blocks.sides]
                spans = self.blocks.spans(rows, number)
                if all(each is None or each.left <= LEFT for each in spans):
                    break
                at = torch.full_like(near, place)
                given = [table.rows(side, near, at) for side in self.blocks.sides]
                lost = lost_with(spans, place - start, given)
                if float(lost.min()) < 0:
                    ids[place] = int(near[lost.argmin()])
        return ids

    def likely(self, place: int) -> Tensor:
        """The tokens (c,) that may stand at a position: by their values, or where those are hidden
        by their keys.
        """
        number, inside = divmod(place, self.blocks.size)
        turn, total = self.table.turn(place), torch.zeros(self.table.keys.shape[1])
        for side, found in self.blocks.pairs:
            if side.keys and found.hidden != inside:
                rows = self.table.keys[side.head]
                total = total + found.misfits(side, rows, number, turn).clamp(max=CAP)
        by_keys = total.topk(min(LIST * self.blocks.size, len(total)), largest=False).indices
        return torch.cat([self.shortlist(number, LIST * self.blocks.size), by_keys]).unique()

    def stands_out(self, token: int, place: int) -> bool:
        """Do a token's keys fit at a position as those of no other nearly do?"""
        near = self.shortlist(place // self.blocks.size, LIST * self.blocks.size)
        near = torch.cat([torch.tensor([token]), near[near != token]])
        fit = self.fit(near, [place])
        own, others = fit.keys[0, 0].log(), fit.keys[0, 1:].log()
        others = others[others.isfinite()]
        return len(others) > 1 and bool(others.mean() - own > _OUT * others.std())


# The order of a block's tokens where rounding hides the directions of its keys.


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

    def rows(self, side: Side, tokens: Tensor, places: Tensor) -> Tensor:
        """Rows (…, d) of tokens (…) at places (…) of the block."""
        at = (places + self.number * self.reader.blocks.size).expand_as(tokens).flatten()
        return self.reader.table.rows(side, tokens.flatten(), at).double().view(*tokens.shape, -1)

    def fit(self, tokens: Tensor, near: Tensor) -> tuple[float, float, Tensor, list[Fitted]]:
        """Squares of an arrangement (n,), how many there are, and (n, c) with others by keys."""
        blocks, count, places = self.reader.blocks, len(tokens), torch.arange(len(tokens))
        added = any(found.hides for _, found in blocks.pairs)
        total, expected, made = 0.0, 0.0, list[Fitted]()
        rest = torch.zeros(count, len(near), dtype=torch.float64)
        for side, found in blocks.pairs:
            seen = places != found.hidden
            plain, block = self.rows(side, tokens, places), side.blocks[self.number]
            own = (plain @ found.matrix)[seen]
            own = own if side.keys else own[once(tokens[seen])]
            spread = side.spreads(self.number, plain)
            free = found.free(count, blocks.size - count, added)
            if added and not found.hides:
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
        pairs = self.reader.blocks.pairs
        hidden = all(found.hidden == len(tokens) for side, found in pairs if side.keys)
        return torch.equal(self.cut(tokens), tokens) and not hidden

    def inside(self) -> Tensor:
        """The tokens (c,) that the block holds, by their values; one head may hide one."""
        blocks, table = self.reader.blocks, self.reader.table
        near = self.reader.shortlist(self.number, LIST * blocks.size)
        pairs = [(side, found) for side, found in blocks.pairs if not side.keys]
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
