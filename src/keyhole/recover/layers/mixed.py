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

**Coarse rounding.** Where it hides directions of a block's keys (a large bias, few bits), single
tokens are nowhere outside of it; whole blocks are still told apart by squares (block_spans.py,
block_reader.py).

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
from itertools import product, takewhile
from math import log
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.models.branches import Branches
from keyhole.models.capture import capture
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embeddings.counts import SHIPPED
from keyhole.recover.layers.block_reader import LIST, Orders, Reader, Table, ordered
from keyhole.recover.layers.block_spans import (
    HIDDEN,
    LEFT,
    NOWHERE,
    Blocks,
    Map,
    Side,
    lost_with,
    planes,
    products,
    solved,
)
from keyhole.recover.layers.inverse_map import most_similar, random_texts
from keyhole.recover.leaks import KeyValues, Leak, MixedCache
from keyhole.recover.recovery import ODDS, Mark, Verdict

_BLOCKS = (8, 16, 32, 64)  # positions: of two sizes that fit, one a multiple, the smaller is right
_FAN = 256  # tokens tried at once behind a prefix, until one fits
_CLAIMED = 4.0  # level, at most, of a text that is verified
_LOOKED = 8  # positions that show whether a cache is mixed
_STRANGE = 0.5  # of a row: one that is so far from all tokens' is of none
_AGAIN = 8  # tokens after which M is solved for again
_SILENT = (
    "the tokens that open the text are there by their values, but rounding hides all keys: which "
    "tokens each block holds could be told, and not their order"
)
_OPENS = 3.0  # level of the tokens that are taken to open a text, at most
_COMMON, _FIRST = 768, 24  # tokens that are common, and most so
_SQUARED = 5  # times that a product of projections is squared to find its largest eigenvalue
_NEAR = 6  # pairs of guesses that are looked at, for each token that is most common
_NEARLY = 8.0  # q of a token in its block by a map that two tokens gave
_EVEN = 0.5  # of the planes, at least, that a map must not leave at nothing
_SHIFTS = 4  # of positions, that are read to the end


@dataclass(frozen=True)
class MixedKeys:
    """Row spaces of blocks: M from the first tokens, if they are known or usual; then the text."""

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        for number, leak in enumerate(leaks):
            if not isinstance(leak, MixedCache):
                raise Unsuccessful(Status.NOT_APPLICABLE, "this attack reads mixed caches")
            yield number, _read(target, leak)


def _read(target: Target, leak: MixedCache) -> Proposal:
    sizes = sizes_of(leak)
    cut = Blocks.cut(leak, sizes)
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
    opened = False
    for blocks, ids in product(cut, known):
        last = replace(blocks, sides=blocks.sides[-1:])  # a head's values show what is wrong
        if Reader(table, last).solved(dict(enumerate(ids))).blocks.level <= _OPENS:
            reader, opened = Reader(table, blocks).solved(dict(enumerate(ids))), True
            note = f"blocks of {blocks.size}, {len(ids)} first tokens known"
            if reader.blocks.coarse:
                tokens = text = ordered(reader, ids)
            else:
                reader, tokens = reader.read(dict(enumerate(ids)))
                if reader.blocks.silent:
                    raise Unsuccessful(Status.BUDGET, _SILENT)
                text = reader.whole(tokens)
            best = max(best, (len(tokens), text, note))
            if len(tokens) > len(ids) or len(ids) >= blocks.size:
                break  # nor does a whole block that fits leave another size to be tried
    if not opened:
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
    for blocks in Blocks.cut(leak, sizes_of(leak)) if len(ids) <= leak.keys.shape[1] else []:
        rows = [given["keys" if side.keys else "values"][0, side.head].float().cpu()
                for side in blocks.sides]  # fmt: skip
        last = replace(blocks, sides=blocks.sides[-1:]).solved(rows[-1:], places)
        if last.level <= _OPENS or blocks.size == sizes_of(leak)[-1]:
            best = blocks.solved(rows, places)
            break
    if best is None or all(each is None for each in best.maps):
        reason = "the text has too few tokens for the map to be solved from them"
        return Verdict.without_fit(Status.UNSOLVED, reason, len(ids))
    if best.silent:
        return Verdict.without_fit(Status.UNSOLVED, _SILENT, len(ids))
    return _verdict(target, best, rows, ids)


def _verdict(target: Target, blocks: Blocks, rows: Sequence[Tensor], ids: list[int]) -> Verdict:
    reader, by_order, ends = None, list[float](), False
    if blocks.coarse and first_and_rotary(target, blocks.leak):
        reader = Reader(Table.of(target), blocks)
        by_order, ends = _in_order(reader, ids)
        kept = [side in blocks.fine().sides for side in blocks.sides]
        blocks, rows = blocks.fine(), [row for row, fine in zip(rows, kept, strict=True) if fine]
    level, size, others = max(1.0, blocks.level), blocks.size, _others(target, blocks, ids)
    margins, fitting, left = list[float](), list[bool](), 0.0
    for start in range(0, blocks.length, size):
        number, own = start // size, [each[start : start + size] for each in rows]
        spans = blocks.spans(own, number)
        left = max([left, *(torch.inf if each is None else each.left for each in spans)])
        tokens = ids[start : start + size]
        by_keys = None
        if reader is not None and tokens:
            by_keys = Orders(reader, number).fit(torch.tensor(tokens), others(start)[0])[2]
        for inside, token in enumerate(tokens):
            fit = blocks.fit([each[inside][None, None] for each in own], [start + inside])
            fitting.append(bool(fit.fits(level)))
            near, given = others(start + inside)
            lost = lost_with(spans, inside, given)
            same = near == token
            if by_keys is not None:  # values tell tokens, and keys do as well where those show
                lost = (lost + by_keys[inside]) * bool(fit.free)
            if by_keys is not None or (not float(fit.keys_free) and tokens.count(token) == 1):
                # Another one of the block cannot stand here as well: this one would be missing.
                same |= torch.isin(near, torch.tensor(tokens))
            margins.append(float(lost.masked_fill(same, torch.inf).min()) / level)
    if reader is None:
        ends = _ends(target, blocks, rows, ids)
    else:
        margins = [min(pair) for pair in zip(margins, by_order, strict=True)]
    whole = left <= LEFT and all(fitting) and level <= _CLAIMED and ends
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
        reason += "" if left <= LEFT else "; they do not span their blocks"
        reason += "" if ends else "; the text may be a token longer or shorter"
    return Verdict(status, reason, status is Status.RECOVERED, off, 1.0, marks)


def _in_order(reader: Reader, ids: list[int]) -> tuple[list[float], bool]:
    """By squares: how far other orders of each block's tokens are off, and does the text end?

    Fewer of these are for a place than tokens of a vocabulary: an exchange with each other place,
    or for each other token of the block. A block that does not fit has no order.
    """
    text, size = torch.tensor(ids), reader.blocks.size
    fewer = 2 * log(len(reader.table.values[0]) / (2 * size))
    margins = list[float]()
    for number, tokens in enumerate(text.split(size)):
        orders = Orders(reader, number)
        fits = orders.as_it_is(tokens).fits
        margins += [float(each) + fewer if fits else 0.0 for each in orders.margins(tokens)]
    last = reader.blocks.length // size - 1
    return margins, len(ids) > last * size and Orders(reader, last).ends(text[last * size :])


def _ends(target: Target, blocks: Blocks, rows: Sequence[Tensor], ids: list[int]) -> bool:
    """Does the text end where it is said to? Rows that fill a block up leave that open.

    Without its last token it must not span its block as well, unless that fits as none by chance
    does; and no token may fit at the next position.
    """
    number, more = divmod(len(ids), blocks.size)
    if len(ids) == blocks.length:
        return True
    if (number + 1) * blocks.size < blocks.length:
        return False
    shorter = [each[number * blocks.size : -1] for each in rows]
    needed = not more or not blocks.explained(shorter, number)
    if not first_and_rotary(target, blocks.leak):
        return needed
    reader = Reader(Table.of(target), blocks)
    needed = needed or reader.stands_out(ids[-1], len(ids) - 1)
    return needed and not bool(
        reader.fit(reader.likely(len(ids)), [len(ids)]).fits(blocks.level).any()
    )


Others = Callable[[int], tuple[Tensor, Sequence[Tensor]]]


def _others(target: Target, blocks: Blocks, ids: list[int]) -> Others:
    """For each position the tokens (c,) that might stand there as well, and each side's rows."""
    if first_and_rotary(target, blocks.leak):
        reader, lists = Reader(Table.of(target), blocks), dict[int, Tensor]()

        def by_table(place: int) -> tuple[Tensor, Sequence[Tensor]]:
            number = place // blocks.size
            if number not in lists:
                lists[number] = reader.shortlist(number, LIST * blocks.size)
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
        text = torch.tensor([list(ids)], device=self.device)
        return self._of(self.branches.go_on(self.exposure, text))

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
        if last and blocks.explained(inside, number):
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
    lines = planes(base.double())[None] / planes(rows.double())[:, None]
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
            found = _placed(reader, keys, bags) if keys.keys else None
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
    return Map(products((theta / theta.norm() * (len(theta) / 2) ** 0.5)[None])[0], NOWHERE, 1.0)


def _unplaced(side: Side, rows: Tensor, numbers: Tensor) -> Map | None:
    """The map from rows (n, d) of tokens that are in blocks `numbers` (n,), in whatever place."""
    inside = torch.arange(len(rows))  # a place of its own for each, of which A hides one at most
    found = solved(side, rows, numbers * len(rows) + inside, len(rows))
    return None if found is None else replace(found, hidden=NOWHERE)


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


def _placed(
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
