"""The judge of texts that were read from rows of positions: run the model, compare with the leak.

A recovered text counts only if running the model on it reproduces the leak within the leak's own
precision (precision.py): each position is tested. A wrong token fails at its own position; another
model or layer at all of them.

**Alternatives.** A fit is not enough where the leak is coarse or a position did not leak: another
token might fit as well. So others are put in its place, one at a time. With E(text) the misfit of a
text in units of the leak's error, an alternative's margin is how much larger E becomes with it:
twice the logarithm of the odds against it. The margin of a token is the least of its alternatives'.

**Verified** is a token if the text fits as a whole and the odds against each alternative are at
least V·e¹⁰ : 1 for a vocabulary of V tokens. Of a coarse leak, where several wrong tokens may make
up for each other, no token is verified whose own position did not leak, and none at all where more
than one in twenty is open.

**Likely** is a token if its position leaked and the odds against each alternative are e¹⁰ : 1,
whether or not the rest of the text is right: what the text leaves unexplained counts as noise then,
and has to be less than half of the leak's spread. Of an encoder whose rows are no linear map of its
tokens (large random weights) the right one is not among those tried, and no token is likely.

Rows that leaked in no order are compared as a set, and the text's own order has alternatives too.
Logits are one vector for a whole text: no token is verified where a text one edit away may be
meant. benchmarks/text_judge.py measures how often all that is right.

**Which alternatives are tried.** Not all of a vocabulary can be, at each position. Those that might
pass are the tokens of most similar embedding e, and those whose row would be what leaked: with A a
linear map from embeddings to rows and r what the text leaves unexplained at its own position, those
of least ‖(e_v − e) A − r‖. Ten of these held one that fits as well in all of 112 tokens that were
wrong within the noise; where the leak's error is above 5% of its spread, r says less, and 32 are
tried. Where a position did not leak there is no r, and where rows are no position's own there is no
A: then tokens are tried that the gradient of E asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.core.numerics import with_ridge
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.edits import Tokens, Vectors, alternatives_to
from keyhole.recover.layers.inverse_map import most_similar
from keyhole.recover.layers.precision import (
    NOISE,
    Fit,
    compare,
    limit,
    precision_of,
    rounding_error,
)
from keyhole.recover.layers.unordered import assigned
from keyhole.recover.leaks import HiddenStates, Leak, Logits
from keyhole.recover.recovery import ODDS, Mark, Verdict

_NOISY = 0.05  # of the leak's spread: an error above it needs more alternatives
_FINE = 5e-3  # of the leak's spread: below it any other token shows
_OPEN = 0.05  # of a coarse leak's tokens: more open ones than that leave none verified
_ALIKE = 1e-2  # embeddings nearer than this (relative) may pass for each other
_ALONE = 64  # alternatives tried one by one; more only several in a pass
_BY_ROW = 6  # alternatives of a token by what leaked at its position,
_BY_ROW_NOISY = 32  # … where noise blurs it,
_BY_GRADIENT = 3  # … and by the gradient
_EXPLAINED = 0.5  # of the rows' variance: a map that explains less does not find the right token
_AS_GOOD = 4  # tokens that give the same attention output,
_SAMPLES = 4  # tokens that the map is fitted on, for each number of an embedding
_CONTEXT = 4  # random tokens before the one that is looked at: the first of a text is no example
_RIDGE = 1e-5
_SHORT_TEXTS = 512  # in one pass
_SHORT = 64  # tokens: of a longer text only neighbours are exchanged

Misfits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Compared:
    """A text (n,) compared with a leak: what leaked (m, f), and what the model gives for the text.

    `hidden` (n,) are the positions whose rows did not leak; `misfits` are the sums of squares of
    rows (…, m, f) in units of the leak's error.
    """

    target: Target
    leak: Leak
    text: Tensor
    leaked: Tensor
    given: Tensor
    hidden: Tensor
    misfits: Misfits

    @property
    def odds(self) -> float:
        """The margin that verifies a token."""
        return 2 * (math.log(self.target.vocabulary) + ODDS)

    def rows(self, ids: Tensor, each: Misfits = lambda rows: rows) -> Tensor:
        """What the model gives for other texts (b, n); `each` pass is reduced by itself."""
        return self.target.rows(self.leak, ids, self.leak.mask, each)


def judge_rows(target: Target, leak: Leak, ids: list[int]) -> Verdict:
    """Decide what `ids` are worth as an explanation of a leak."""
    device = target.parts.device
    text = torch.tensor(ids, device=device)
    leaked = leak.rows(leak.tensors).to(device)
    own = len(leaked) == len(ids)  # a row for each token
    padding = torch.zeros_like(text, dtype=torch.bool)
    if own and leak.mask is not None:
        padding = leak.mask.to(device) == 0
        leaked = leaked.masked_fill(padding[:, None], torch.nan)
    numbers = leaked[leaked.isfinite()]
    if bool((numbers == numbers[:1]).all()):
        reason = "every number of the leak is the same: it tells no tokens apart"
        return Verdict.without_fit(Status.NOT_IDENTIFIABLE, reason, len(ids))
    given = target.rows(leak, text[None], leak.mask)[0]
    matched = _in_best_order(leak, given)
    if matched is not None:
        leak, leaked = matched, matched.values.to(device)
    fit = compare(precision_of(leak), leaked, given)
    if not fit.whole:  # another machine, or texts side by side, may have rounded otherwise
        rounding = rounding_error(target, leak.exposure)
        other = compare(precision_of(leak, rounding), leaked, given)
        fit = other if other.whole else fit
    if not math.isfinite(fit.residual):
        reason = "the leak's numbers are too large to compare"
        return Verdict.without_fit(Status.NOT_APPLICABLE, reason, len(ids))
    hidden = leaked.isnan().any(-1) & ~padding if own else torch.ones_like(padding)
    misfits = _misfits(fit, leaked, given)
    compared = Compared(target, leak, text, leaked, given, hidden, misfits)
    margin, forwards, doubt = _margin(compared, fit, padding, matched is not None)
    if not fit.settled and not _right_token_is_tried(compared):
        margin = torch.zeros_like(margin)
    marks = _marks(fit, margin, hidden, compared.odds)
    # The tokenizer's own special tokens, and padding, are no part of the text.
    status, words = _status(fit, marks, (target.framed(len(text)) == text) | padding)
    reason = f"residual {fit.residual:.1e} of the leak's spread, its precision {fit.level:.1e}"
    return Verdict(
        status, f"{reason}{words}{doubt}", status is Status.RECOVERED, fit.residual, fit.level,
        marks, forwards,
    )  # fmt: skip


def _margin(
    compared: Compared, fit: Fit, padding: Tensor, unordered: bool
) -> tuple[Tensor, int, str]:
    """The margin (n,) of each token, the passes that took, and in words what is in doubt."""
    target, leak, text = compared.target, compared.leak, compared.text
    margin, forwards, doubt = torch.full(text.shape, torch.inf, device=text.device), 1, ""
    coarse = not fit.whole or fit.level > _FINE or bool(compared.hidden.any())
    # Where attention is saturated, a token may show in no attention output, not even its own.
    blind = leak.kind == "attention" and target.parts.causal and fit.whole
    table = target.parts.table
    duplicates = target.remembered("duplicates", None, lambda: _duplicates(table.float()))
    if coarse or blind or bool(duplicates[text].any()):
        others = alternatives(compared, noisy=fit.level > _NOISY)
        if blind:
            others = torch.cat([others, _fitting_as_well(compared, fit, others[0])])
        margin, more = _over_alternatives(compared, others)
        margin, forwards = margin.masked_fill(padding, torch.inf), forwards + more
    if unordered:
        unsettled, more = _open_places(compared, fit.sigma)
        margin, forwards = margin.masked_fill(unsettled, 0.0), forwards + more
        count = int(unsettled.sum())
        doubt = f"; the order of {count} tokens is unknown" if count else ""
    if isinstance(leak, Logits) and fit.whole and bool((margin > compared.odds).all()):
        other, more = _other_text(compared, leak)
        forwards += more
        if other is not None:
            margin = torch.zeros_like(margin)
            doubt = f"; so could {target.decode(other)!r}, for example"
    return margin, forwards, doubt


def _marks(fit: Fit, margin: Tensor, hidden: Tensor, odds: float) -> tuple[Mark, ...]:
    """The mark of each token, as the head of this file and Mark define them."""
    shown = ~hidden | (fit.whole and fit.level <= _FINE)
    apart = margin > odds
    certain = apart & shown & fit.whole
    if fit.level > _FINE and float((~certain).float().mean()) > _OPEN:
        certain = torch.zeros_like(certain)
    likely = shown & (margin > 2 * ODDS) & (fit.residual <= NOISE)
    return tuple(
        Mark.VERIFIED if sure else Mark.LIKELY if nearly else Mark.UNKNOWN
        for sure, nearly in zip(certain.tolist(), likely.tolist(), strict=True)
    )


def _status(fit: Fit, marks: tuple[Mark, ...], given: Tensor) -> tuple[Status, str]:
    """Read, partly read or not: `given` (n,) are tokens that are no part of the text."""
    certain = sum(mark is Mark.VERIFIED for mark in marks)
    if certain == len(marks):
        return Status.RECOVERED, ""
    likely = sum(mark is Mark.LIKELY for mark in marks)
    known = any(
        mark is not Mark.UNKNOWN and not free
        for mark, free in zip(marks, given.tolist(), strict=True)
    )
    partly = Status.INEXACT if known else Status.UNSOLVED
    words = f"; of {len(marks)} tokens {certain} verified, {likely} likely"
    if fit.whole:
        words += f": {len(marks) - certain} of {len(marks)} tokens could be others"
        return (Status.INEXACT if known else Status.NOT_IDENTIFIABLE), words
    if fit.settled:
        return partly, f"{words}: as noise would leave it, but noise that strong was not stated"
    if fit.residual > 1:
        return Status.UNSOLVED, ": no better than nothing"
    misfits = sum(not good for good in fit.good.tolist())
    return partly, f"{words}; {misfits} positions do not fit"


def _duplicates(table: Tensor) -> Tensor:
    """Which tokens (v,) share their embedding, nearly, with another?

    Duplicates have nearly the same product with any vector: only neighbours in that order are met.
    """
    probe = torch.linspace(-1, 1, table.shape[1], device=table.device).sin()
    order = (table @ probe).argsort()
    following = table[order].diff(dim=0).norm(dim=-1)
    near = following <= _ALIKE * table[order[1:]].norm(dim=-1)
    alike = torch.zeros(len(table), dtype=torch.bool, device=table.device)
    alike[order[1:][near]] = True
    alike[order[:-1][near]] = True
    return alike


def _misfits(fit: Fit, leaked: Tensor, given: Tensor) -> Misfits:
    """Sums of squares of rows (…, n, f) in units of the leak's error; 0 where nothing leaked.

    Where the text does not fit as a whole, what it leaves unexplained is an error too.
    """
    seen = leaked.isfinite()
    sigma = fit.sigma
    if not fit.whole:
        left = (given - leaked)[~leaked.isnan().any(-1)].square().mean().sqrt()
        sigma = sigma.clamp(min=float(left))
    weights, known = torch.where(seen, 1 / sigma, 0.0), leaked.nan_to_num()
    return lambda rows: ((rows - known) * weights).square().sum(-1)


def _over_alternatives(compared: Compared, others: Tensor) -> tuple[Tensor, int]:
    """The margin (n,) of each token over the nearest of others (k, n); the passes that took.

    The whole leak speaks for a token: a row may say next to nothing about its own one ([CLS] in the
    lower layers of MiniLM), while all others do. So an alternative is tried alone. In a
    long text a pass has one at every 64th position, each judged by its own row; the first 64 whose
    margin does not verify them so are tried alone, and so are the first 64 positions that did not
    leak (`hidden`).
    """
    text, hidden, misfits = compared.text, compared.hidden, compared.misfits
    places = torch.arange(len(text), device=text.device)
    before = misfits(compared.given)

    def gains(tokens: Tensor, groups: Tensor) -> Tensor:
        """How much worse each row (g, n) fits with the tokens of a group (g, n) in their places.

        `tokens` are those of all groups (n,), or each group has its own (g, n).
        """
        return compared.rows(torch.where(groups, tokens, text), misfits) - before

    if len(text) <= _ALONE:  # each alone, in as few passes as hold them
        alone = (places == places[:, None]).repeat(len(others), 1)
        each = others.repeat_interleave(len(text), 0)
        return gains(each, alone).sum(-1).view_as(others).amin(0), 2 + len(alone)
    least, spent = torch.full(text.shape, torch.inf, device=text.device), 2
    for tokens in others:
        groups = (places % _ALONE == places[:_ALONE, None]) & ~hidden
        margin = gains(tokens, groups).where(groups, -torch.inf).amax(0)
        spent += len(groups)
        for part in (hidden, ~hidden & ~(margin > compared.odds)):
            tried = part.nonzero().flatten()[:_ALONE]
            if len(tried):
                margin[tried] = gains(tokens, places == tried[:, None]).sum(-1)
                spent += len(tried)
        least = torch.minimum(least, margin)
    return least, spent


def alternatives(compared: Compared, noisy: bool) -> Tensor:
    """The tokens (k, n) to be tried at each position."""
    table, text = compared.target.parts.table.float(), compared.text
    tokens = [most_similar(table, text)]
    rows = _row_map(compared)
    if rows is not None:
        unexplained = rows.own(compared.leaked - compared.given).nan_to_num()
        count = _BY_ROW_NOISY if noisy else _BY_ROW
        tokens.append(rows.nearest(table, text, unexplained, count))
    if rows is None or bool(compared.hidden.any()):
        tokens.append(_by_gradient(compared))
    return torch.cat(tokens)


def _row_map(compared: Compared) -> RowMap | None:
    """The map from embeddings to rows of positions; None where rows are none of a position's."""
    target, exposure = compared.target, compared.leak.exposure
    if exposure.kind not in ("hidden", "kv", "attention"):
        return None
    return target.remembered("row map", exposure, lambda: _fitted_map(target, exposure))


def _right_token_is_tried(compared: Compared) -> bool:
    """Would the right token be among the alternatives to a wrong one?

    Left to right that is no question: a causal model's tokens were found one by one.
    """
    rows = None if compared.target.parts.causal else _row_map(compared)
    return rows is None or rows.explained >= _EXPLAINED


@torch.no_grad()
def _fitting_as_well(compared: Compared, fit: Fit, none: Tensor) -> Tensor:
    """Of the whole vocabulary the tokens (k, n) that fit as well behind the text before them.

    `none` (n,) stands where there are fewer.
    """
    target, text, exposure = compared.target, compared.text, compared.leak.exposure
    start = 0 if compared.leak.mask is None else int(compared.leak.mask.nonzero().min())
    branches = Branches(target.model, torch.tensor([start], device=text.device))
    branches.go_on(exposure, text[None, start:])
    found = none.repeat(_AS_GOOD, 1)
    vocabulary = torch.arange(target.vocabulary, device=text.device)
    for place in range(start, len(text)):
        misfits = torch.cat([
            ((branches.each(exposure, 0, place - start, part)[0]["values"][0]
              - compared.leaked[place]) / fit.sigma[place]).square().mean(-1)
            for part in vocabulary.split(branches.at_once(place))
        ])  # fmt: skip
        misfits[text[place]] = torch.inf
        least, tokens = misfits.topk(min(_AS_GOOD, len(misfits)), largest=False)
        tokens = tokens[least <= limit(compared.leaked.shape[-1])]
        found[: len(tokens), place] = tokens
    return found


def _by_gradient(compared: Compared) -> Tensor:
    """The tokens (k, n) that would lower the misfit most, to first order; one pass."""
    target, leak, text = compared.target, compared.leak, compared.text
    table = target.parts.table.float()
    with torch.enable_grad():
        words = table[text][None].requires_grad_()
        mask = None if leak.mask is None else leak.mask.to(words.device)[None]
        given = leak.rows(capture(target.model, leak.exposure, embeddings=words, mask=mask))
        (gradient,) = torch.autograd.grad(compared.misfits(given[0]).sum(), words)
    change = gradient[0] @ table.T
    change[:, target.pads()] = torch.inf
    change = change.scatter(1, text[:, None], torch.inf)
    return change.topk(min(_BY_GRADIENT, change.shape[1]), largest=False).indices.T


@dataclass(frozen=True, eq=False)
class RowMap:
    """`map` (e, f) from embeddings to rows, and the squared length (v,) of each token's answer.

    Of keys and values only the values count: keys may be rotated by their position. `heads` is
    their number, or 1; `explained` the share of the rows' variance that is linear.
    """

    map: Tensor
    sizes: Tensor
    heads: int
    explained: float

    def own(self, rows: Tensor) -> Tensor:
        """The part (n, f) of a leak's rows that is compared."""
        each = rows.unflatten(-1, (self.heads, -1))
        return each[..., -self.map.shape[1] // self.heads :].flatten(-2)

    def nearest(self, table: Tensor, text: Tensor, unexplained: Tensor, count: int) -> Tensor:
        """For each token the others (k, n) whose answers differ most nearly by `unexplained`."""
        wanted = table[text] @ self.map + unexplained.to(self.map)
        far = self.sizes - 2 * (wanted @ self.map.T) @ table.T
        far = far.scatter(1, text[:, None], torch.inf)
        return far.topk(min(count, len(table) - 1), largest=False).indices.T


def _fitted_map(target: Target, exposure: Exposure) -> RowMap:
    table = target.parts.table.float()
    count = min(len(table), _SAMPLES * table.shape[1])
    stream = torch.Generator().manual_seed(0)
    tokens = torch.randperm(len(table), generator=stream)[:count]
    before, after = target.frame()
    context = torch.randint(len(table), (_CONTEXT,), generator=stream).tolist()
    opening, ending = torch.tensor([*before, *context]), torch.tensor(after, dtype=torch.long)
    tokens, opening, ending = (ids.to(target.parts.device) for ids in (tokens, opening, ending))
    with torch.no_grad():
        answers = torch.cat([
            rows.double() for rows in _answers(target, exposure, tokens, opening, ending)
        ])  # fmt: skip
    words = table[tokens.to(table.device)].double()
    words = words - words.mean(0)
    square = with_ridge(words.T @ words, _RIDGE)
    answers = answers - answers.mean(0)
    linear = torch.linalg.solve(square, words.T @ answers)
    left = (answers - words @ linear).square().sum() / answers.square().sum().clamp(min=1e-30)
    explained = 1 - float(left) * count / max(1, count - table.shape[1])  # as of other tokens
    linear, heads = linear.to(table), target.parts.key_heads if exposure.kind == "kv" else 1
    return RowMap(linear, (table @ linear).square().sum(-1), heads, explained)


def _answers(
    target: Target, exposure: Exposure, tokens: Tensor, opening: Tensor, ending: Tensor
) -> Iterator[Tensor]:
    """The rows (t, f) of tokens, each in the same context; a causal model runs that once."""
    parts = tokens.split(_SHORT_TEXTS)
    if not target.parts.causal:
        for part in parts:
            frame = [opening.expand(len(part), -1), part[:, None], ending.expand(len(part), -1)]
            given = capture(target.model, exposure, ids=torch.cat(frame, 1))["values"]
            yield given[..., len(opening), :].flatten(1)
        return
    branches = Branches(target.model, torch.zeros(1, dtype=torch.long, device=tokens.device))
    branches.go_on(exposure, opening[None])
    for part in parts:
        given = branches.each(exposure, 0, len(opening), part)[0]["values"][0]
        yield given.movedim(-2, 0).flatten(1)


def _in_best_order(leak: Leak, given: Tensor) -> HiddenStates | None:
    """The leak with its rows where they fit what the model gives, (n, f), best.

    None where the rows have an order of their own.
    """
    if not isinstance(leak, HiddenStates) or not leak.permuted:
        return None
    sigma = torch.ones(()).to(given)
    return leak.ordered(assigned(_set_misfits(given, leak.values.to(given), sigma)))


def _open_places(compared: Compared, sigma: Tensor) -> tuple[Tensor, int]:
    """The positions (n,) whose tokens might stand in another order, and the passes that took.

    The leak is in the text's order, `sigma` (n, f) the error of its numbers. Neighbours change
    places, or next but one, all in between is reversed, or shuffled; the model runs on that, and
    the leak is assigned anew. Two rows that are alike leave open which is which; that is no doubt
    about the text if their tokens are the same.
    """
    text, leaked = compared.text, compared.leaked
    orders = _other_orders(len(text)).to(text.device)
    orders = orders[(text[orders] != text).any(-1)]
    unsettled = torch.zeros_like(text, dtype=torch.bool)
    if not len(orders):  # a single token, or the same one throughout
        return unsettled, 0
    own = _least(_set_misfits(compared.given, leaked, sigma))

    def least(rows: Tensor) -> Tensor:
        return torch.tensor([_least(_set_misfits(given, leaked, sigma)) for given in rows])

    for order, misfit in zip(orders, compared.rows(text[orders], least).tolist(), strict=True):
        if not misfit - own > compared.odds:
            unsettled |= text[order] != text
    return unsettled, len(orders)


def _other_orders(length: int) -> Tensor:
    """Other orders (k, n) of n tokens; the first and the last one stay where they are in some."""
    same = torch.arange(length)
    orders = [same.flip(0), torch.cat([same[:1], same[1:-1].flip(0), same[1:][-1:]])]
    orders.append(torch.randperm(length, generator=torch.Generator().manual_seed(0)))
    for distance in (1, 2) if length <= _SHORT else (1,):
        for place in range(length - distance):
            swapped = same.clone()
            swapped[[place, place + distance]] = same[[place + distance, place]]
            orders.append(swapped)
    return torch.stack(orders)


def _set_misfits(given: Tensor, leaked: Tensor, sigma: Tensor) -> Tensor:
    """Sums of squares (rows, positions) in units of the leak's error; NaN for what did not leak."""
    weights = sigma.expand_as(leaked).square().reciprocal()
    far = (weights * leaked.square()).sum(-1, keepdim=True)
    return far - 2 * (weights * leaked) @ given.T + weights @ given.square().T


def _least(misfits: Tensor) -> float:
    order = assigned(misfits).to(misfits.device)
    return float(misfits[order, torch.arange(len(order), device=order.device)].nansum())


def _other_text(compared: Compared, leak: Logits) -> tuple[Tokens | None, int]:
    """The text one edit away that fits best, if the odds do not exclude it; and the passes.

    A token more or less counts too where the length is not known. One such text always fits: a
    model with rotary positions and no token that begins every text gives the same for a token alone
    and for that token repeated, because attention over equal values is that value.
    """
    exposure = Exposure("pooled", pooling="last")
    target, ids = compared.target, compared.text.tolist()
    vectors = Vectors(target, exposure, ids)
    text = vectors.inside(ids)
    others = alternatives_to(vectors, text, vectors([text])[0], leak.length is not None).texts

    def misfit(texts: Sequence[Tokens]) -> Tensor:
        framed = [[*vectors.before, *each, *vectors.after] for each in texts]
        rows = torch.tensor(framed, device=target.parts.device)
        return compared.rows(rows, lambda given: compared.misfits(given).sum(-1))

    own = float(misfit([text]))
    best: tuple[float, Tokens | None] = (compared.odds, None)
    for _, alike in groupby(sorted(others, key=len), key=len):
        texts = list(alike)
        worse, place = (misfit(texts) - own).min(0)
        if float(worse) <= best[0]:
            best = (float(worse), texts[int(place)])
    return best[1], vectors.passes + len(others) + 1
