"""Read text from a KV cache whose tokens are mixed within blocks by a secret (KV-Cloak).

`MixedKeys` takes the stored keys and values of one layer (`MixedCache`) and the model,
and perhaps the first tokens of the text. It proposes token ids, which `judge_mixed`
verifies. So whoever gets such a cache has the text: the secret is no encryption.

*Shadow in the Cache* (NDSS 2026, arXiv 2508.09442; code SiO-2/kvcloak) stores, for each
layer, head and block of b positions, of keys and of values alike,

    X' = S P (X M + A)      S (b, b) invertible, P a permutation, drawn anew for every block,
                            M (d, d) one rotation with a scale in each plane (j, j +
                            d/2), A zero but for one secret row a, at one place of every
                            block

and keeps S, M, A and the place secret; each head has its own. S P is invertible, so it
changes the rows of a block and not the space that they span. With W the projection on
what is outside of that span,

    x_i M W = 0             for every token i of the block except the one under A.

**M.** In plane j it multiplies by one complex number α_j + iβ_j, so x_i M = θ J(x_i) is
linear in the d numbers θ = (α, β). Known tokens give θ as the eigenvector of Σ_i J W Jᵀ
with the least eigenvalue, up to a factor that membership does not need. A token gives d
− b equations for d unknowns: two tokens are enough up to b = d/2, and about d/(d − b)
beyond. The place under A is the one without which the least eigenvalue falls; it is the
same in all blocks. A general M has d² unknowns and needs d²/(d − b) known tokens: 86
for d = 64, b = 16.

**Tokens.** In the first layer of a model with rotary positions, the rows of token v at
position p are known before anything leaks: R_p k_v and u_v. ‖u_v M W‖ finds the tokens
of a block (values have no position), and ‖R_p k_v M W‖ their places. In deeper layers,
and with learnt positions, rows depend on the prefix. Tokens are then tried after it,
left to right, in the order of the model's own prediction. The place under A differs
between heads, so other heads show what one head hides.

**Rounding.** Stored rows are Y = X' + E, with row i of E of standard deviation σ_i.
Each row is divided by its σ_i, so E has unit deviation. A token's row is c (Y − E), so
what of it is outside of Y is −cE: ‖c‖² in each of d − b dimensions, with c = x M Y⁺. So
q = ‖x M W‖² / (d − b) ‖c‖² is 1 ± √(2/(d − b)) for the right token, whatever S, M and
the rounding are. It is a chi-square, and its sums over heads, keys and values compare
tokens. W = (YᵀY + 1)⁻¹ and Y⁺ are soft: directions no larger than the rounding count as
outside.

**Coarse rounding.** If rounding hides directions of a block's keys (a large bias, few
bits), single tokens cannot be distinguished. Whole blocks still can, by squares
(block_spans.py, block_reader.py).

**No token known.** The tokens of a text are common ones. For token v in block B, θ lies
in the b-dimensional space B / v (the block's rows divided plane by plane by the
token's). Two right guesses have a direction in common, while spaces of b < d/2
dimensions have none by chance. Values are solved first, because there tokens need no
position: each frequent token is compared with some hundred common ones in every block.
Then the block's tokens are known except for their order, and the same is done with keys
for each place that a token may have. Shifting all positions by one is a rotation M, so
the places that fit best over all blocks decide.

**What it does not read.** If the rows of a block span all of a head (b ≥ d, if the text
is as long), then W = 0: nothing is outside. Encryption is what protects a cache at
rest.

A text is verified as all others are, by running the model (`judge_mixed`). M is solved
for again from the whole text. Each token must lie in its block, in the heads that show
it, and no other token of the vocabulary may do as well. The tokens must also span their
blocks, except for one row (A) and the padding, so that no token is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product, takewhile
from math import log
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, not_applicable
from keyhole.core.tensors import indices_of, root_mean_square, seeded
from keyhole.models.capture import capture
from keyhole.recover.attack import Proposal, Proposals, Target
from keyhole.recover.embeddings.counts import SHIPPED
from keyhole.recover.layers.block_reader import BlockOrders, Reader, Table, ordered
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
from keyhole.recover.recovery import (
    LOG_ODDS,
    Mark,
    Verdict,
    counts_of,
    marks_of,
    verifying_margin,
)

_SIZES = (
    8,
    16,
    32,
    64,
)  # of blocks: if two sizes fit, one a multiple, the smaller is right
_FAN = 256  # tokens tried at once after a prefix
_CLAIMED = 4.0  # the level above which no text is verified
_LOOKED_AT = 8  # positions that show whether a cache is mixed
# relative distance from all tokens' rows above which a row is no token's
_STRANGE = 0.5
_AGAIN = 8  # tokens after which M is solved for again
_OPENS = 3.0  # the level above which known tokens do not open the text
# common tokens, and the most frequent of them
_COMMON = 768
_FREQUENT = 24
_SQUARINGS = 5  # of a product of projections, to find its largest eigenvalue
_NEAR = 6  # pairs of guesses that are examined for each frequent token
_NEARLY = 8.0  # the q below which a token may be in a block, by a map from two tokens
_EVEN = 0.5  # the share of planes that a map must not nearly remove
_SHIFTS = 4  # shifts of positions that are read to the end
_SILENT = (
    "the first tokens are in the cache by their values, but rounding hides all keys: the tokens of "
    "each block could be found, but not their order"
)


@dataclass(frozen=True)
class MixedKeys:
    """Read mixed caches by the spans of their blocks; M comes from known or usual first tokens."""

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Proposals:
        for number, leak in enumerate(leaks):
            if not isinstance(leak, MixedCache):
                reason = "this attack reads mixed caches"
                raise not_applicable(reason)
            yield number, _read(target, leak)


Read = tuple[int, list[int], str]  # how many tokens fit, the text, a note


def _read(target: Target, leak: MixedCache) -> Proposal:
    sizes = sizes_of(leak)
    cut = Blocks.cut(leak, sizes)
    if all(float(side.free.max()) < 1 for blocks in cut for side in blocks.sides):
        raise not_applicable(
            f"blocks of {sizes[0]} positions span all {leak.keys.shape[-1]} dimensions of a head: "
            "no token is outside of one"
        )
    known = [leak.known] if leak.known is not None else openings(target)
    known = [ids[: leak.keys.shape[1]] for ids in known if len(ids)]
    if not first_and_rotary(target, leak):
        return _left_to_right(target, cut, known)
    table = Table.of(target)
    reads: list[Read] = []
    for blocks, ids in product(cut, known):
        read = _from_known(table, blocks, ids)
        if read is not None:
            reads.append(read)
            if read[0] > len(ids) or len(ids) >= blocks.size:
                break  # if a whole block fits, no other size can be right
    for blocks in cut if not reads else ():
        found = guessed(Reader(table, blocks))
        if found is not None:
            reader, tokens = found
            note = f"blocks of {blocks.size}, no token known"
            reads.append((len(tokens), reader.whole(tokens), note))
            break
    _, text, note = max(reads, default=(0, [], ""))
    if not text:
        reason = "no tokens are known that would give the secret map"
        raise Unsuccessful(Status.UNSOLVED, reason)
    return Proposal(text, fitting=target.vocabulary, note=note)


def _from_known(
    table: Table,
    blocks: Blocks,
    ids: Sequence[int],
) -> Read | None:
    """Read from first tokens; None if these tokens do not open the text."""
    known = dict(enumerate(ids))
    last = replace(blocks, sides=blocks.sides[-1:])  # the values of one head are enough
    if not Reader(table, last).solved(known).blocks.level <= _OPENS:
        return None
    reader = Reader(table, blocks).solved(known)
    note = f"blocks of {blocks.size}, {len(ids)} first tokens known"
    if reader.blocks.coarse:
        text = ordered(reader, ids)
        return len(text), text, note
    reader, tokens = reader.read(known)
    if reader.blocks.silent:
        raise Unsuccessful(Status.BUDGET, _SILENT)
    first = dict(enumerate(ids[: max(tokens, default=0)]))
    return len(tokens), reader.whole(first | tokens), note


@torch.no_grad()
def unmixed(target: Target, leak: Leak) -> MixedCache | None:
    """Return keys and values as a mixed cache if no tokens would give them; otherwise None.

    The secret row A makes numbers many times as large as any of the layer's own. In a
    first layer, the values at every position must be those of a token.
    """
    parts = target.parts
    if not isinstance(leak, KeyValues) or not parts.causal:
        return None
    if leak.mask is not None or leak.keys.isnan().any():
        return None
    length = min(leak.keys.shape[1], parts.max_length)
    ids = random_texts(target, 1, length, seeded(0))
    usual = capture(target.model, leak.exposure, ids=ids)["values"].abs().max()
    strange = bool(root_mean_square(leak.values) > usual.cpu())
    number = leak.exposure.block(parts)
    mixed = MixedCache(
        leak.keys, leak.values, number, precision=leak.precision, noise=leak.noise
    )
    if not strange and first_and_rotary(target, mixed):
        rows = leak.values[:, :_LOOKED_AT].transpose(0, 1).flatten(1)
        table = Table.of(target).values.transpose(0, 1).flatten(1)
        far = [(table - row).norm(dim=-1).min() / row.norm() for row in rows]
        strange = bool(torch.stack(far).median() > _STRANGE)
    return mixed if strange else None


def sizes_of(leak: MixedCache) -> list[int]:
    """Return the sizes that blocks may have: the stored rows fill whole blocks."""
    if leak.block is not None:
        return [leak.block]
    length = leak.keys.shape[1]
    return [size for size in _SIZES if length % size == 0] or [min(length, _SIZES[0])]


def openings(target: Target) -> list[list[int]]:
    """Return what texts for this model usually begin with, the most tokens first."""
    frame = target.frame()[0]
    found = [frame]
    for roles in (("user",), ("system", "user")):
        texts: list[list[int]] = []
        for text in ("a", "The 1", target.decode([target.vocabulary // 2])):
            talk = [{"role": role, "content": text} for role in roles]
            try:
                ids = target.tokenizer.apply_chat_template(
                    talk, tokenize=True, return_dict=True
                )
            # it has no template
            except (AttributeError, ImportError, TypeError, ValueError):
                return [frame]
            # a template may refuse roles that it does not know
            except Exception as error:
                if type(error).__module__.partition(".")[0] != "jinja2":
                    raise
                break
            texts.append(list(ids["input_ids"]))
        else:
            columns = zip(*texts, strict=False)
            same = takewhile(lambda column: len(set(column)) == 1, columns)
            found.append([column[0] for column in same])
    return sorted(found, key=len, reverse=True)


def first_and_rotary(target: Target, leak: MixedCache) -> bool:
    """Return whether the rows of a token are the same after every prefix, except for a rotation."""
    return leak.layer == 1 and bool(target.parts.rotary)


# The judge.


def judge_mixed(
    target: Target,
    leak: MixedCache,
    ids: list[int],
) -> Verdict:
    """Decide whether the tokens lie in their blocks and span them, and no other tokens would."""
    with torch.no_grad():
        given = capture(target.model, leak.exposure, ids=target.tensor([ids]))
    places = torch.arange(len(ids))
    sizes = sizes_of(leak) if len(ids) <= leak.keys.shape[1] else []
    for blocks in Blocks.cut(leak, sizes):
        rows = [_rows_of(side, given) for side in blocks.sides]
        last = replace(blocks, sides=blocks.sides[-1:]).solved(rows[-1:], places)
        if last.level <= _OPENS or blocks.size == sizes[-1]:
            best = blocks.solved(rows, places)
            if best.silent and best.pairs:
                return Verdict.without_fit(Status.UNSOLVED, _SILENT, len(ids))
            if best.pairs:
                return _verdict(target, best, rows, ids)
            break
    reason = "the text has too few tokens for the map to be solved from them"
    return Verdict.without_fit(Status.UNSOLVED, reason, len(ids))


def _rows_of(side: Side, given: Mapping[str, Tensor]) -> Tensor:
    """Return a side's rows (n, d) among captured keys and values."""
    return given["keys" if side.keys else "values"][0, side.head].float().cpu()


def _verdict(
    target: Target,
    blocks: Blocks,
    rows: Sequence[Tensor],
    ids: list[int],
) -> Verdict:
    if blocks.coarse and first_and_rotary(target, blocks.leak):
        reader = Reader(Table.of(target), blocks)
        by_order, ends = _in_order(reader, ids)
        fine = blocks.fine()
        pairs = zip(rows, blocks.sides, strict=True)
        rows = [row for row, side in pairs if side in fine.sides]
        blocks = fine
        margins, fitting, left = _margins(target, blocks, rows, ids, reader)
        margins = [min(pair) for pair in zip(margins, by_order, strict=True)]
    else:
        margins, fitting, left = _margins(target, blocks, rows, ids, None)
        ends = _ends(target, blocks, rows, ids)
    level = max(1.0, blocks.level)
    verifying = verifying_margin(target.vocabulary)
    whole = left <= LEFT and all(fitting) and level <= _CLAIMED and ends
    marks = marks_of(
        [whole and margin > verifying for margin in margins],
        [
            fits and margin > 2 * LOG_ODDS and level <= _CLAIMED
            for fits, margin in zip(fitting, margins, strict=True)
        ],
    )
    off = blocks.level**0.5
    reason = (
        f"mixed by a secret in blocks of {blocks.size} positions, whose spans hold the tokens to "
        f"{off:.2g} of the rounding"
    )
    if set(marks) == {Mark.VERIFIED}:
        return Verdict(Status.RECOVERED, reason, True, off, 1.0, marks)
    status = Status.UNSOLVED if set(marks) == {Mark.UNKNOWN} else Status.INEXACT
    reason += f"; {counts_of(marks)}"
    if left > LEFT:
        reason += "; they do not span their blocks"
    if not ends:
        reason += "; the text may be a token longer or shorter"
    return Verdict(status, reason, False, off, 1.0, marks)


def _margins(
    target: Target,
    blocks: Blocks,
    rows: Sequence[Tensor],
    ids: list[int],
    reader: Reader | None,
) -> tuple[list[float], list[bool], float]:
    """Return each token's margin, whether it fits, and the largest direction that none spans.

    With a `reader`, the keys of its blocks are coarse, and count by squares.
    """
    level = max(1.0, blocks.level)
    others = _others(target, blocks, ids)
    margins: list[float] = []
    fitting: list[bool] = []
    left = 0.0
    for number, start in enumerate(range(0, blocks.length, blocks.size)):
        stop = start + blocks.size
        tokens = ids[start:stop]
        own = [each[start:stop] for each in rows]
        spans = blocks.spans(own, number)
        for each in spans:
            left = max(left, torch.inf if each is None else each.left)
        by_keys = None
        if reader is not None and tokens:
            orders = BlockOrders(reader, number)
            by_keys = orders.order(torch.tensor(tokens), others(start)[0]).others
        for inside, token in enumerate(tokens):
            place = start + inside
            fit = blocks.fit([each[inside][None, None] for each in own], [place])
            fitting.append(bool(fit.fits(level)))
            near, given = others(place)
            lost = lost_with(spans, inside, given)
            same = near == token
            alone = not float(fit.keys_free) and tokens.count(token) == 1
            if by_keys is not None:  # keys that A does not hide distinguish tokens too
                lost = (lost + by_keys[inside]) * bool(fit.free)
                alone = True
            if alone:
                # No other token of the block can take this place: this token would be
                # missing.
                same |= torch.isin(near, torch.tensor(tokens))
            margins.append(float(lost.masked_fill(same, torch.inf).min()) / level)
    return margins, fitting, left


def _in_order(reader: Reader, ids: list[int]) -> tuple[list[float], bool]:
    """Return each token's margin over other orders, by squares, and whether the text ends.

    The alternatives at a place are fewer than the tokens of a vocabulary: an exchange
    with each other place, or each other token of the block. In a block that does not
    fit, no margin counts.
    """
    size = reader.blocks.size
    last = reader.blocks.length // size - 1
    fewer = 2 * log(len(reader.table.values[0]) / (2 * size))
    margins: list[float] = []
    ends = False
    for number, tokens in enumerate(torch.tensor(ids).split(size)):
        orders = BlockOrders(reader, number)
        if orders.order(tokens).fits:
            margins += (orders.margins(tokens) + fewer).tolist()
        else:
            margins += [0.0] * len(tokens)
        ends = number == last and orders.ends(tokens)
    return margins, ends


def _ends(
    target: Target,
    blocks: Blocks,
    rows: Sequence[Tensor],
    ids: list[int],
) -> bool:
    """Return whether the text ends with its last token: rows that fill a block leave that open.

    Without its last token it must not span its block, unless this token fits as none
    does by chance. And no token may fit at the next position.
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
    if not needed and not reader.stands_out(ids[-1], len(ids) - 1):
        return False
    following = reader.fit(reader.likely(len(ids)), [len(ids)])
    return not bool(following.fits(blocks.level).any())


Others = Callable[[int], tuple[Tensor, Sequence[Tensor]]]


def _others(
    target: Target,
    blocks: Blocks,
    ids: list[int],
) -> Others:
    """Return a function from a position to its alternative tokens (c,), and each side's rows."""
    if first_and_rotary(target, blocks.leak):
        reader = Reader(Table.of(target), blocks)
        shortlist = cache(reader.shortlist)

        def by_table(place: int) -> tuple[Tensor, Sequence[Tensor]]:
            near = shortlist(place // blocks.size)
            return near, reader.rows(near, torch.full_like(near, place))

        return by_table
    prefix = Prefix(target, blocks, ids)
    near = most_similar(target.table, target.tensor(ids))
    return lambda place: (near[:, place].cpu(), prefix.rows(near[:, place], place))


# Rows that depend on the prefix: left to right.


class Prefix:
    """The beginning of a text, and the rows of tokens after it for each side of a leak."""

    def __init__(
        self,
        target: Target,
        blocks: Blocks,
        ids: Sequence[int],
    ) -> None:
        self.target = target
        self.sides = blocks.sides
        self.exposure = blocks.leak.exposure
        self.branches = target.branches()
        self.own = self.extend(ids)

    @torch.no_grad()
    def extend(self, ids: Sequence[int]) -> list[Tensor]:
        """Append tokens, and return their rows (n, d)."""
        given = self.branches.go_on(self.exposure, self.target.tensor([list(ids)]))
        return [_rows_of(side, given) for side in self.sides]

    @torch.no_grad()
    def rows(self, tokens: Tensor, length: int) -> list[Tensor]:
        """Return the rows (c, d) of tokens (c,), each alone after the first `length` tokens."""
        tokens = tokens.to(self.target.device)
        given, _ = self.branches.each(self.exposure, 0, length, tokens)
        return [_rows_of(side, given) for side in self.sides]


def _left_to_right(
    target: Target,
    cut: Sequence[Blocks],
    known: Sequence[Sequence[int]],
) -> Proposal:
    """Read token by token, after some that are known."""
    for blocks, first in product(cut, known):
        prefix = Prefix(target, blocks, first)
        blocks = blocks.solved(prefix.own, torch.arange(len(first)))
        if blocks.level <= _OPENS:
            break
    else:
        reason = "no first tokens are known, or too few, that would give the secret map"
        raise Unsuccessful(Status.UNSOLVED, reason)
    ids = list(first)
    rows = prefix.own
    tested = 0
    while len(ids) < blocks.length:
        number = len(ids) // blocks.size
        inside = [each[number * blocks.size :] for each in rows]
        last = (number + 1) * blocks.size >= blocks.length and len(inside[0]) > 0
        if last and blocks.explained(inside, number):
            break
        token, spent = _next_token(target, blocks, prefix, ids)
        tested += spent
        if token is None:
            break
        ids.append(token)
        pairs = zip(rows, prefix.extend([token]), strict=True)
        rows = [torch.cat(pair) for pair in pairs]
        if len(ids) % _AGAIN == 0:
            blocks = blocks.solved(rows, torch.arange(len(ids)))
    note = f"blocks of {blocks.size}, {len(first)} first tokens known, {tested} tokens tested"
    return Proposal(ids, len(ids), len(ids), note=note, tested=tested)


def _next_token(
    target: Target,
    blocks: Blocks,
    prefix: Prefix,
    ids: Sequence[int],
) -> tuple[int | None, int]:
    """Return the first token that fits after the prefix, and how many were tested."""
    length = len(ids)
    # All tokens in the order in which the model itself expects them next.
    with torch.no_grad():
        base = cast("Any", target.parts.base)
        states = base(input_ids=target.tensor([list(ids)]))[0]
        order = (target.parts.table @ states[0, -1]).argsort(descending=True)
    tested = 0
    margin = verifying_margin(target.vocabulary)
    for tokens in order.split(min(_FAN, prefix.branches.at_once(length))):
        rows = [each[None] for each in prefix.rows(tokens, length)]
        fit = blocks.fit(rows, [length])
        tested += len(tokens)
        scores, at = fit.score[0].topk(min(2, len(tokens)), largest=False)
        apart = len(scores) < 2 or float(scores[1] - scores[0]) > margin
        if fit.fits(blocks.level)[0, at[0]] and apart:
            return int(tokens[at[0]]), tested
    return None, tested


# No token known: directions that the spaces of two guesses have in common.


def guessed(reader: Reader) -> tuple[Reader, dict[int, int]] | None:
    """Return the text if nothing is known, from values first and then from keys."""
    blocks = reader.blocks
    size = blocks.sides[0].blocks[0].shape[1]
    if 2 * max(len(base) for base in blocks.sides[0].bases) > size:
        return None  # any two guesses have directions in common
    target = reader.table.target
    common = target.remembered("common tokens", None, lambda: common_tokens(target))
    keys = [side for side in blocks.sides if side.keys]
    for values in blocks.sides[len(keys) :]:
        held = _tokens_of_blocks(reader.table, values, common)
        if held is None:
            continue
        for side in keys:
            found = _placed(reader, side, held)
            if found is not None:
                return found
    return None


def common_tokens(target: Target) -> Tensor:
    """Return the tokens of plain English, by how often they occur in the corpus that ships."""
    counts: Counter[int] = Counter()
    for line in SHIPPED.read_text("utf-8").splitlines():
        for text in (line, f" {line}"):
            counts.update(target.tokenizer(text, add_special_tokens=False)["input_ids"])
    return torch.tensor([token for token, _ in counts.most_common(_COMMON)])


def _spaces(
    base: Tensor,
    rows: Tensor,
    size: int,
) -> Tensor:
    """Return bases (t, d, size) of the maps θ that put each of rows (t, d) into a block."""
    spans = planes(base.double())[None] / planes(rows.double())[:, None]
    spaces = torch.linalg.qr(torch.cat([spans.real, spans.imag], -1).mT)[0]
    return torch.nn.functional.pad(spaces, (0, size - spaces.shape[-1])).float()


def _in_common(space: Tensor, others: Tensor) -> Tensor:
    """Return how nearly (n,) others (n, d, r) share a direction with a space (d, r); 1: they do."""
    cosines = others.mT @ space
    powers = cosines @ cosines.mT
    for _ in range(_SQUARINGS):
        powers = powers @ powers
    return powers.diagonal(dim1=1, dim2=2).sum(-1) ** 0.5**_SQUARINGS


def _maps_of_pairs(
    side: Side,
    rows: Tensor,
    numbers: Tensor,
    tokens: Tensor,
    most: int,
) -> Iterator[Map]:
    """Yield the maps that two guesses have in common: rows (n, d) of tokens in blocks.

    The first `most` guesses are each compared with all others that are of another
    token.
    """
    width = max(len(base) for base in side.bases)
    spaces = torch.zeros(*rows.shape, width)
    for number, base in enumerate(side.bases):
        own = numbers == number
        spaces[own] = _spaces(base, rows[own], width)
    for first in range(min(most, len(rows))):
        near = _in_common(spaces[first], spaces)
        near = near.masked_fill(tokens == tokens[first], 0.0)
        for other in near.topk(min(_NEAR, len(near))).indices.tolist():
            both = torch.tensor([first, other])
            jacobians = products(rows[both])
            outside, errors = (
                jacobians @ form[numbers[both]] @ jacobians.mT for form in side.forms
            )
            weights = 1 / errors.diagonal(dim1=1, dim2=2).mean(-1)
            sums = (outside * weights[:, None, None]).sum(0)
            theta = torch.linalg.eigh(sums)[1][:, 0]
            sizes = theta.unflatten(0, (2, -1)).square().sum(0)
            if sizes.sum() ** 2 / sizes.square().sum() > _EVEN * len(sizes):
                for each in (theta, theta / sizes.sqrt().repeat(2)):
                    # the second is the same if M has no scales
                    unit = each / each.norm() * len(sizes) ** 0.5
                    yield Map(products(unit[None])[0], NOWHERE, 1.0)


def _tokens_of_blocks(
    table: Table,
    side: Side,
    common: Tensor,
) -> list[Tensor] | None:
    """Return the tokens of each block, by their values.

    Each frequent token is compared with all common ones. The map that puts the most
    common tokens into blocks is solved for again from all tokens that it puts there.
    """
    count = len(side.blocks)
    vocabulary = table.values[side.head]
    tokens = common.repeat_interleave(count)  # the most frequent first, in every block
    numbers = torch.arange(count).repeat(len(common))
    whole = sum(len(each) for each in side.blocks)
    most_fits = 0
    best: Map | None = None
    rows = vocabulary[tokens]
    for found in _maps_of_pairs(side, rows, numbers, tokens, _FREQUENT * count):
        misfits = [found.misfits(side, vocabulary[common], n) for n in range(count)]
        fits = int((torch.cat(misfits) < _NEARLY).sum())
        # if more than there are, this map puts any token into a block
        if most_fits < fits <= whole:
            most_fits = fits
            best = found
            if fits >= 5 * count:
                break
    most = _NEARLY
    held: list[Tensor] = []
    for _ in range(3):
        if best is None:
            return None
        misfits = [best.misfits(side, vocabulary, n) for n in range(count)]
        held = [indices_of(each < most) for each in misfits]
        every = torch.cat(held)
        if not 2 * count < len(every) <= 4 * whole:
            return None
        # No place is known: each token gets a place of its own, of which A hides one at
        # most.
        sizes = torch.tensor([len(tokens) for tokens in held])
        numbers = torch.arange(count).repeat_interleave(sizes)
        places = numbers * len(every) + torch.arange(len(every))
        best = solved(side, vocabulary[every], places, len(every))
        most = HIDDEN
        best = best and replace(best, hidden=NOWHERE)
    return held


def _placed(
    reader: Reader,
    side: Side,
    held: Sequence[Tensor],
) -> tuple[Reader, dict[int, int]] | None:
    """Put the tokens that blocks hold into their places, by one head's keys, and read the rest."""
    size = reader.blocks.size
    whole = [n for n in range(len(held)) if len(side.blocks[n]) == size]
    number = max(whole, key=lambda n: len(held[n]), default=0)
    places = torch.arange(number * size, (number + 1) * size)
    tokens = held[number].repeat(size)
    at = places.repeat_interleave(len(held[number]))
    rows = reader.table.rows(side, tokens, at)
    numbers = torch.full_like(tokens, number)
    for found in _maps_of_pairs(side, rows, numbers, tokens, len(tokens)):
        if (found.misfits(side, rows, number) < _NEARLY).sum() < size // 2:
            continue
        shifts = range(-size, size + 1)
        shifted = [_shifted(reader, side, found, held, shift) for shift in shifts]
        likely = sorted(filter(None, shifted), key=len, reverse=True)[:_SHIFTS]
        reads = [reader.read(known) for known in likely]
        best = max(reads, key=lambda read: len(read[1]))
        if len(best[1]) >= size // 2:
            return best
    return None


def _shifted(
    reader: Reader,
    side: Side,
    found: Map,
    held: Sequence[Tensor],
    shift: int,
) -> dict[int, int]:
    """Return the tokens that fit by their positions, if all positions are shifted."""
    known: dict[int, int] = {}
    for number, tokens in enumerate(held):
        start = number * reader.blocks.size
        for place in range(max(start, -shift), start + len(side.blocks[number])):
            if not len(tokens):
                break
            at = torch.full_like(tokens, place + shift)
            misfits = found.misfits(side, reader.table.rows(side, tokens, at), number)
            if misfits.min() < _NEARLY:
                known[place] = int(tokens[misfits.argmin()])
    return known
