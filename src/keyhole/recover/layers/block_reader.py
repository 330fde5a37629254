"""The first layer of a model with rotary positions: blocks of a mixed cache, read all at once.

The rows of every token are known beforehand, so each can be tried at each place (`Reader.read`),
from tokens that are known.

**No token known.** The tokens of a text are common ones. For token v in block B, θ lies in the
b-dimensional space B / v (the block's rows divided plane by plane by the token's), and two right
guesses have a line in common, while spaces of b < d/2 dimensions have none by chance. Values are
solved first, because tokens need no position there: one frequent token against all of some hundred
in every block. Then the block's tokens are known but for their order, and the same is done with
keys for each place that a token may have. (Positions all shifted by one are M turned, so the
places that fit best over all blocks decide.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import SHIPPED
from keyhole.recover.layers.block_spans import (
    CAP,
    HIDDEN,
    LEFT,
    Blocks,
    Fit,
    Map,
    Side,
    lost_with,
    products,
    solved,
)
from keyhole.recover.recovery import ODDS

_ROUNDS = 6  # of reading and solving again
LIST = 4  # times as many tokens as a block has are looked at again
_COMMON, _FIRST = 768, 24  # tokens that are common, and most so
_SQUARED = 5  # times that a product of projections is squared to find its largest eigenvalue
_KEPT = 2048  # tokens that are compared exactly
_OUT = 8.0  # deviations of the others' logarithms: the least of a vocabulary is some five below
_NEAR = 6  # pairs of guesses that are looked at, for each token that is most common
_NEARLY = 8.0  # q of a token in its block by a map that two tokens gave
_EVEN = 0.5  # of the planes, at least, that a map must not leave at nothing
_SHIFTS = 4  # of positions, that are read to the end


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
                each.misfits(side, values[side.head], number, turn)
                for side, each in zip(self.blocks.sides, self.blocks.maps, strict=True)
                if not side.keys and each is not None
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
        if not any(
            each is not None and not side.keys
            for side, each in zip(self.blocks.sides, self.blocks.maps, strict=True)
        ):
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
        for side, each in zip(self.blocks.sides, self.blocks.maps, strict=True):
            if side.keys and each is not None and each.hidden != inside:
                rows = self.table.keys[side.head]
                total = total + each.misfits(side, rows, number, turn).clamp(max=CAP)
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
    powers = cosines @ cosines.mT
    for _ in range(_SQUARED):
        powers = powers @ powers
    return powers.diagonal(dim1=1, dim2=2).sum(-1) ** 0.5**_SQUARED


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
            jacobians = products(rows[both])
            outside, errors = (
                jacobians @ form[numbers[both]] @ jacobians.mT for form in side.forms
            )
            weights = 1 / errors.diagonal(dim1=1, dim2=2).mean(-1)
            theta = torch.linalg.eigh((outside * weights[:, None, None]).sum(0))[1][:, 0]
            sizes = theta.unflatten(0, (2, -1)).square().sum(0)
            if float(sizes.sum() ** 2 / sizes.square().sum()) > _EVEN * len(sizes):
                yield theta
                yield theta / sizes.sqrt().repeat(2)  # as it is where M has no scales


def _map(theta: Tensor) -> Map:
    return Map(products((theta / theta.norm() * (len(theta) / 2) ** 0.5)[None])[0], None, 1.0)


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
        found, most = _unplaced(side, vocabulary[every], numbers), HIDDEN
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
