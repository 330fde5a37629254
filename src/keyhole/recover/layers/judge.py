"""Judge texts that were read from rows of positions: run the model and compare with the leak.

`judge_rows` takes the model, a leak and the ids that an attack proposes, and returns a
`Verdict` with a mark for every token. No attack decides by itself that it is right.

A recovered text counts only if the model, run on it, reproduces the leak within the
leak's own precision (precision.py). Each position is tested: a wrong token fails at its
own position, another model or layer at all of them.

**Alternatives.** A fit is not enough if the leak is coarse or a position did not leak,
because another token might fit as well. A leak is fine if its error is small and each
row has enough bits to tell every token from the others (`_is_fine`). Otherwise others
are put in a token's place, one at a time. With E(text) the misfit of a text in units of
the leak's error, an alternative's margin is the increase of E: twice the logarithm of
the odds against it. The margin of a token is the least of its alternatives'.

A token is **verified** if the text fits as a whole and the odds against each
alternative are at least V·e¹⁰ : 1 for a vocabulary of V tokens. In a coarse leak
several wrong tokens may make up for each other. There no token is verified whose own
position did not leak, and none at all if more than one in twenty is open.

A token is **likely** if its position leaked and the odds against each alternative are
e¹⁰ : 1, even if the rest of the text is wrong. What the text leaves unexplained then
counts as noise, and must be less than half of the leak's spread. If an encoder's rows
are no linear map of its tokens (large random weights), the right token is not among the
alternatives, and no token is likely.

Rows that leaked in no order are compared as a set, and other orders of the text are
alternatives too. Logits are one vector for a whole text: no token is verified if a text
one edit away fits. benchmarks/text_judge.py measures how often all this is right.

**Which alternatives are tried.** Not every token can be tried at each position. Those
that might pass are the tokens with the most similar embedding e, and those whose row
would be what leaked. With A a linear map from embeddings to rows, and r what the text
leaves unexplained at its position, these have the least ‖(e_v − e) A − r‖. Among ten of
these was a token that fits as well, for all of 112 tokens that were wrong within the
noise. If the leak's error is above 5% of its spread, r says less, and 32 are tried. If
a position did not leak there is no r, and if rows are not a position's own there is no
A. Then tokens are tried that the gradient of E asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.core.numerics import with_ridge
from keyhole.core.tensors import (
    indices_of,
    root_mean_square,
    row_numbers,
    seeded,
    squared_norms,
)
from keyhole.models.capture import Exposure
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
from keyhole.recover.layers.unordered import assigned, swapped
from keyhole.recover.leaks import HiddenStates, Leak, Logits
from keyhole.recover.recovery import (
    LOG_ODDS,
    Mark,
    Verdict,
    counts_of,
    marks_of,
    verifying_margin,
)

_MIDDLE_HALF = 1.35  # standard deviations between the quartiles of normal numbers
_NOISY = 0.05  # an error above this share of the leak's spread needs more alternatives
_FINE = 5e-3  # an error above this share of the leak's spread may hide another token
# bits of a fine leak's row beyond those that the odds need: some tokens are alike
_MORE_BITS = 10
_OPEN = 0.05  # the share of open tokens of a coarse leak above which none is verified
_SMALL = 1e-3  # embeddings below this share of the median length all count as zero
# the relative distance of embeddings below which tokens may pass for each other
_ALIKE = 1e-2
_ALONE = 64  # alternatives tried one by one; more are tried several in a pass
_BY_ROW = 6  # alternatives of a token by what leaked at its position
_BY_ROW_NOISY = 32  # the same if noise blurs the row
_BY_GRADIENT = 3  # alternatives of a token by the gradient
# of the rows' variance: a map that explains less does not find the right token
_EXPLAINED = 0.5
_AS_GOOD = 4  # tokens that give the same attention output
_SAMPLES = 4  # tokens that the map is fitted on, for each number of an embedding
# random tokens before the fitted one: the first position of a text is special
_CONTEXT = 4
_SHORT_TEXTS = 512  # in one pass
_SHORT = 64  # tokens of a text up to which more than neighbours are exchanged

Misfits = Callable[[Tensor], Tensor]


class Compared(NamedTuple):
    """A text (n,) compared with a leak: the leaked rows (m, f), and those that the model gives.

    `hidden` (n,) are the positions whose rows did not leak. `misfits` maps rows (…, m,
    f) to their sums of squares (…, m) in units of the leak's error.
    """

    target: Target
    leak: Leak
    text: Tensor
    leaked: Tensor
    given: Tensor
    hidden: Tensor
    misfits: Misfits

    @property
    def verifying(self) -> float:
        """The margin that verifies a token."""
        return verifying_margin(self.target.vocabulary)

    def rows(self, ids: Tensor, each: Misfits = lambda rows: rows) -> Tensor:
        """Return what the model gives for texts (b, n); `each` is applied to every pass."""
        return self.target.rows(self.leak, ids, self.leak.mask, each)


def judge_rows(
    target: Target,
    leak: Leak,
    ids: list[int],
) -> Verdict:
    """Decide what `ids` are worth as an explanation of a leak."""
    text = target.tensor(ids)
    leaked = leak.rows(leak.tensors).to(target.device)
    own = len(leaked) == len(ids)  # each token has a row
    padding = torch.zeros_like(text, dtype=torch.bool)
    if own and leak.mask is not None:
        padding = leak.mask.to(target.device) == 0
        leaked = leaked.masked_fill(padding[:, None], torch.nan)
    numbers = leaked[leaked.isfinite()]
    if (numbers == numbers[:1]).all():
        reason = "every number of the leak is the same, so it distinguishes no tokens"
        return Verdict.without_fit(Status.NOT_IDENTIFIABLE, reason, len(ids))
    given = target.rows(leak, text[None], leak.mask)[0]
    unordered = leak.in_no_order
    if isinstance(leak, HiddenStates) and unordered:
        values = leak.values.to(given)
        leak = leak.ordered(assigned(_set_misfits(given, values, given.new_ones(()))))
        leaked = leak.values.to(target.device)
    fit = compare(precision_of(leak), leaked, given)
    # another machine, or a batch of texts, may have rounded differently
    if not fit.whole:
        rounding = rounding_error(target, leak.exposure)
        other = compare(precision_of(leak, rounding), leaked, given)
        fit = other if other.whole else fit
    if not math.isfinite(fit.residual):
        reason = "the leak's numbers are too large to compare"
        return Verdict.without_fit(Status.NOT_APPLICABLE, reason, len(ids))
    hidden = leaked.isnan().any(-1) & ~padding if own else torch.ones_like(padding)
    misfits = _misfits(fit, leaked, given)
    compared = Compared(target, leak, text, leaked, given, hidden, misfits)
    fine = _is_fine(fit, own, compared)
    margin, forwards, doubt = _margin(compared, fit, fine, padding, unordered)
    # a causal model is read token by token
    if not fit.settled and not target.parts.causal:
        rows = _row_map(compared)
        # the right token was not tried
        if rows is not None and rows.explained < _EXPLAINED:
            margin = torch.zeros_like(margin)
    shown = ~hidden | (fit.whole and fine)
    certain = (margin > compared.verifying) & shown & fit.whole
    if not fine and (~certain).float().mean() > _OPEN:
        certain = torch.zeros_like(certain)
    likely = shown & (margin > 2 * LOG_ODDS) & (fit.residual <= NOISE)
    marks = marks_of(certain.tolist(), likely.tolist())
    # The tokenizer's own special tokens, and padding, are no part of the text.
    status, words = _status(fit, marks, (target.framed(len(text)) == text) | padding)
    reason = f"residual {fit.residual:.1e} of the leak's spread, its precision {fit.level:.1e}"
    return Verdict(
        status,
        f"{reason}{words}{doubt}",
        status is Status.RECOVERED,
        fit.residual,
        fit.level,
        marks,
        forwards,
    )


def _is_fine(
    fit: Fit,
    own: bool,
    compared: Compared,
) -> bool:
    """Return whether every other token would show in a leak with errors like those of `fit`.

    The error must be a small share of the leak's spread. If each token has its `own`
    row, each row must also have the bits that tell a token from all others: a number of
    spread s and error σ has ½ log₂(1 + s²/σ²). So a row of few numbers is not fine, nor
    one whose numbers differ much from each other but little between positions.
    """
    seen = ~compared.leaked.isnan().any(-1)
    if fit.level > _FINE or not own or not seen.any():
        return fit.level <= _FINE
    rows = compared.leaked[seen]
    sigma = fit.sigma.expand_as(compared.leaked)[seen]
    # A single row has only the spread of its own numbers. Of several, the middle half
    # counts: a model's first position often has far larger numbers.
    ordered = (rows.T if len(rows) == 1 else rows).sort(0).values
    cut = len(ordered) // 4
    spread = (ordered[len(ordered) - 1 - cut] - ordered[cut]) / _MIDDLE_HALF
    bits = (1 + (spread / sigma).square()).log2().sum(-1) / 2
    return float(bits.min()) >= compared.verifying / 2 / math.log(2) + _MORE_BITS


def _margin(
    compared: Compared,
    fit: Fit,
    fine: bool,
    padding: Tensor,
    unordered: bool,
) -> tuple[Tensor, int, str]:
    """Return the margin (n,) of each token, the passes that took, and doubts in words."""
    target = compared.target
    leak = compared.leak
    text = compared.text
    margin = torch.full_like(text, torch.inf, dtype=torch.float32)
    forwards = 1
    doubt = ""
    coarse = not fit.whole or not fine or bool(compared.hidden.any())
    # With saturated attention, a token may show in no attention output, not even its
    # own. If rows have too few bits, many tokens fit by chance, and no map finds them.
    vague = fit.level <= _FINE and not fine
    blind = (leak.kind == "attention" or vague) and target.parts.causal and fit.whole
    if coarse or blind or duplicated(target)[text].any():
        others = alternatives(compared, noisy=vague or fit.level > _NOISY)
        if blind:
            others = torch.cat([others, _fitting_as_well(compared, fit, others[0])])
        margin, more = _over_alternatives(compared, others)
        margin = margin.masked_fill(padding, torch.inf)
        forwards += more
    if unordered:
        unsettled, more = _unsettled_places(compared, fit.sigma)
        margin = margin.masked_fill(unsettled, 0.0)
        forwards += more
        if unsettled.any():
            doubt = f"; the order of {int(unsettled.sum())} tokens is unknown"
    verified = fit.whole and bool((margin > compared.verifying).all())
    if isinstance(leak, Logits) and verified:
        other, more = _other_text(compared, leak)
        forwards += more
        if other is not None:
            margin = torch.zeros_like(margin)
            doubt = f"; so could {target.decode(other)!r}, for example"
    return margin, forwards, doubt


def _status(
    fit: Fit,
    marks: tuple[Mark, ...],
    special: Tensor,
) -> tuple[Status, str]:
    """Return the status by the marks, and a reason; `special` (n,) are no part of the text."""
    certain = marks.count(Mark.VERIFIED)
    if certain == len(marks):
        return Status.RECOVERED, ""
    inside = [
        mark for mark, out in zip(marks, special.tolist(), strict=True) if not out
    ]
    known = any(mark is not Mark.UNKNOWN for mark in inside)
    partly = Status.INEXACT if known else Status.UNSOLVED
    words = f"; {counts_of(marks)}"
    if fit.whole:
        words += f": {len(marks) - certain} of {len(marks)} tokens could be others"
        return (Status.INEXACT if known else Status.NOT_IDENTIFIABLE), words
    if fit.settled:
        noise = "as noise would leave it, but noise that strong was not stated"
        return partly, f"{words}: {noise}"
    if fit.residual > 1:
        return Status.UNSOLVED, ": no better than nothing"
    return partly, f"{words}; {int((~fit.good).sum())} positions do not fit"


def duplicated(target: Target) -> Tensor:
    """Return which tokens (v,) of a model nearly share their embedding with another."""
    return target.remembered("duplicates", None, lambda: _duplicates(target.table))


def _duplicates(table: Tensor) -> Tensor:
    """Return which tokens (v,) nearly share their embedding with another.

    Duplicates have nearly the same product with any vector, so only neighbours in the
    order of these products are compared.
    """
    probe = torch.linspace(-1, 1, table.shape[1], device=table.device).sin()
    order = (table @ probe).argsort()
    following = table[order].diff(dim=0).norm(dim=-1)
    lengths = table.norm(dim=-1)
    near = following <= _ALIKE * lengths[order[1:]]
    alike = torch.zeros_like(lengths, dtype=torch.bool)
    alike[order[1:][near]] = True
    alike[order[:-1][near]] = True
    small = lengths <= _SMALL * lengths.median()
    return alike | small if small.sum() > 1 else alike


def _misfits(
    fit: Fit,
    leaked: Tensor,
    given: Tensor,
) -> Misfits:
    """Return a function from rows (…, n, f) to sums of squares in units of the leak's error.

    Numbers that did not leak add 0. If the text does not fit as a whole, what it leaves
    unexplained counts as an error too.
    """
    sigma = fit.sigma
    if not fit.whole:
        left = root_mean_square((given - leaked)[~leaked.isnan().any(-1)])
        sigma = sigma.clamp(min=float(left))
    weights = torch.where(leaked.isfinite(), 1 / sigma, 0.0)
    known = leaked.nan_to_num()
    return lambda rows: squared_norms((rows - known) * weights)


def _over_alternatives(compared: Compared, others: Tensor) -> tuple[Tensor, int]:
    """Return the margin (n,) of each token over `others` (k, n), and the passes that took.

    The whole leak speaks for a token, because its own row may say next to nothing about
    it ([CLS] in the lower layers of MiniLM), while the other rows do. So an alternative
    is tried alone. In a text of more than 64 tokens a pass has an alternative at every
    64th position, each judged by its own row. The first 64 tokens that this does not
    verify are tried alone, and so are the first 64 positions that did not leak.
    """
    text = compared.text
    hidden = compared.hidden
    misfits = compared.misfits
    places = row_numbers(text)
    before = misfits(compared.given)

    def gains(tokens: Tensor, groups: Tensor) -> Tensor:
        """Return how much worse each row (g, n) fits with other tokens at the places of a group.

        `groups` (g, n) are masks of places, `tokens` those of all groups (n,) or of
        each (g, n).
        """
        return compared.rows(torch.where(groups, tokens, text), misfits) - before

    if len(text) <= _ALONE:
        alone = (places == places[:, None]).repeat(len(others), 1)
        each = others.repeat_interleave(len(text), 0)
        return gains(each, alone).sum(-1).view_as(others).amin(0), 2 + len(alone)
    margins: list[Tensor] = []
    spent = 2
    for tokens in others:
        groups = (places % _ALONE == places[:_ALONE, None]) & ~hidden
        margin = gains(tokens, groups).where(groups, -torch.inf).amax(0)
        spent += len(groups)
        for part in (hidden, ~hidden & ~(margin > compared.verifying)):
            tried = indices_of(part)[:_ALONE]
            if len(tried):
                margin[tried] = gains(tokens, places == tried[:, None]).sum(-1)
                spent += len(tried)
        margins.append(margin)
    return torch.stack(margins).amin(0), spent


def alternatives(compared: Compared, noisy: bool) -> Tensor:
    """Return the tokens (k, n) to be tried at each position."""
    table = compared.target.table
    text = compared.text
    tokens = [most_similar(table, text)]
    rows = _row_map(compared)
    if rows is not None:
        unexplained = rows.own(compared.leaked - compared.given).nan_to_num()
        count = _BY_ROW_NOISY if noisy else _BY_ROW
        tokens.append(rows.nearest(table, text, unexplained, count))
    if rows is None or compared.hidden.any():
        tokens.append(_by_gradient(compared))
    return torch.cat(tokens)


def _row_map(compared: Compared) -> RowMap | None:
    """Return the map from embeddings to rows; None if rows are not a position's own."""
    target = compared.target
    exposure = compared.leak.exposure
    if exposure.kind not in ("hidden", "kv", "attention"):
        return None
    return target.remembered("row map", exposure, lambda: _fitted_map(target, exposure))


@torch.no_grad()
def _fitting_as_well(
    compared: Compared,
    fit: Fit,
    none: Tensor,
) -> Tensor:
    """Return the tokens (k, n) of the vocabulary that fit as well after the text before them.

    If there are fewer than k, `none` (n,) takes their place.
    """
    target = compared.target
    text = compared.text
    exposure = compared.leak.exposure
    start = 0 if compared.leak.mask is None else int(compared.leak.mask.nonzero().min())
    branches = target.branches(start)
    branches.go_on(exposure, text[None, start:])
    found = none.repeat(_AS_GOOD, 1)
    for place in range(start, len(text)):
        parts: list[Tensor] = []
        for tokens in target.tokens.split(branches.at_once(place)):
            given, _ = branches.each(exposure, 0, place - start, tokens)
            off = (given["values"][0] - compared.leaked[place]) / fit.sigma[place]
            parts.append(off.square().mean(-1))
        misfits = torch.cat(parts)
        misfits[text[place]] = torch.inf
        least, tokens = misfits.topk(min(_AS_GOOD, len(misfits)), largest=False)
        tokens = tokens[least <= limit(compared.leaked.shape[-1])]
        found[: len(tokens), place] = tokens
    return found


def _by_gradient(compared: Compared) -> Tensor:
    """Return the tokens (k, n) that would lower the misfit most, to first order."""
    target = compared.target
    leak = compared.leak
    text = compared.text
    mask = None if leak.mask is None else leak.mask.to(text)[None]
    words = target.table[text][None]

    def misfit(given: Mapping[str, Tensor]) -> Tensor:
        return compared.misfits(leak.rows(given)).sum(-1)

    slopes = target.slopes(leak.exposure, words, misfit, mask)[1]
    change = slopes[0] @ target.table.T
    change[:, target.pads()] = torch.inf
    change = change.scatter(1, text[:, None], torch.inf)
    return change.topk(min(_BY_GRADIENT, change.shape[1]), largest=False).indices.T


class RowMap(NamedTuple):
    """A linear `map` (e, f) from embeddings to rows, and its squared length (v,) for each token.

    Of keys and values only the values count, since keys may be rotated by their
    position. `heads` is their number, or 1. `explained` is the share of the rows'
    variance that is linear.
    """

    map: Tensor
    sizes: Tensor
    heads: int
    explained: float

    def own(self, rows: Tensor) -> Tensor:
        """Return the part (n, f) of a leak's rows that is compared."""
        each = rows.unflatten(-1, (self.heads, -1))
        return each[..., -self.map.shape[1] // self.heads :].flatten(-2)

    def nearest(
        self,
        table: Tensor,
        text: Tensor,
        unexplained: Tensor,
        count: int,
    ) -> Tensor:
        """Return for each token those (k, n) whose rows differ most nearly by `unexplained`."""
        wanted = table[text] @ self.map + unexplained.to(self.map)
        far = self.sizes - 2 * (wanted @ self.map.T) @ table.T
        far = far.scatter(1, text[:, None], torch.inf)
        return far.topk(min(count, len(table) - 1), largest=False).indices.T


@torch.no_grad()
def _fitted_map(target: Target, exposure: Exposure) -> RowMap:
    table = target.table
    count = min(len(table), _SAMPLES * table.shape[1])
    stream = seeded(0)
    tokens = torch.randperm(len(table), generator=stream)[:count].to(target.device)
    before, after = target.frame()
    context = torch.randint(len(table), (_CONTEXT,), generator=stream).tolist()
    answers = _answers(target, exposure, [*before, *context], tokens, after).double()
    answers = answers - answers.mean(0)
    words = table[tokens].double()
    words = words - words.mean(0)
    linear = torch.linalg.solve(with_ridge(words.T @ words), words.T @ answers)
    left = (answers - words @ linear).square().sum()
    share = float(left / answers.square().sum().clamp(min=1e-30))
    # of tokens not fitted
    explained = 1 - share * count / max(1, count - table.shape[1])
    linear = linear.to(table)
    heads = target.parts.key_heads if exposure.kind == "kv" else 1
    return RowMap(linear, squared_norms(table @ linear), heads, explained)


def _answers(
    target: Target,
    exposure: Exposure,
    before: list[int],
    tokens: Tensor,
    after: list[int],
) -> Tensor:
    """Return the rows (t, f) of tokens (t,) in the same context; a causal model runs that once."""
    if target.parts.causal:
        branches = target.branches()
        branches.go_on(exposure, target.tensor([before]))
        given = [
            branches.each(exposure, 0, len(before), part)[0]["values"][0]
            for part in tokens.split(_SHORT_TEXTS)
        ]
        return torch.cat([rows.movedim(-2, 0).flatten(1) for rows in given])
    ids = target.tensor([*before, -1, *after]).repeat(len(tokens), 1)
    ids[:, len(before)] = tokens
    given = [
        each["values"][..., len(before), :] for each in target.exposed(exposure, ids)
    ]
    return torch.cat(given).flatten(1)


# Rows in no order.


def _unsettled_places(compared: Compared, sigma: Tensor) -> tuple[Tensor, int]:
    """Return the positions (n,) whose tokens might be in another order, and the passes that took.

    The leak is in the text's order, `sigma` (n, f) is the error of its numbers. The
    model runs on other orders of the text, and the leak is assigned anew. Two equal
    rows leave open which is which; that is no doubt about the text if their tokens are
    the same.
    """
    text = compared.text
    orders = _other_orders(len(text)).to(text.device)
    orders = orders[(text[orders] != text).any(-1)]
    unsettled = torch.zeros_like(text, dtype=torch.bool)
    if not len(orders):  # the text is a single token, or the same token repeated
        return unsettled, 0

    def least(rows: Tensor) -> Tensor:
        """Return the total misfit (b,) of the best assignment of rows (b, n, f)."""
        totals: list[Tensor] = []
        for given in rows:
            misfits = _set_misfits(given, compared.leaked, sigma)
            order = assigned(misfits).to(misfits.device)
            totals.append(misfits[order, row_numbers(order)].nansum())
        return torch.stack(totals)

    own = least(compared.given[None])
    excluded = compared.rows(text[orders], least) - own > compared.verifying
    for order in orders[~excluded]:
        unsettled |= text[order] != text
    return unsettled, len(orders)


def _other_orders(length: int) -> Tensor:
    """Return other orders (k, n) of n tokens.

    All tokens are reversed, all but the ends are reversed, all are shuffled, or two are
    exchanged: neighbours, and in short texts next but one.
    """
    same = torch.arange(length)
    orders = [same.flip(0), torch.cat([same[:1], same[1:-1].flip(0), same[1:][-1:]])]
    orders.append(torch.randperm(length, generator=seeded(0)))
    for distance in (1, 2) if length <= _SHORT else (1,):
        for place in range(length - distance):
            orders.append(swapped(same, place, place + distance))
    return torch.stack(orders)


def _set_misfits(
    given: Tensor,
    leaked: Tensor,
    sigma: Tensor,
) -> Tensor:
    """Return sums of squares (rows, positions) in units of the leak's error; NaN without a row."""
    weights = sigma.expand_as(leaked).square().reciprocal()
    far = (weights * leaked.square()).sum(-1, keepdim=True)
    return far - 2 * (weights * leaked) @ given.T + weights @ given.square().T


def _other_text(compared: Compared, leak: Logits) -> tuple[Tokens | None, int]:
    """Return the best text one edit away, if the odds do not exclude it, and the passes.

    A token more or less is an edit too if the length is not known. Such a text always
    fits in a model with rotary positions and no token that begins every text: it gives
    the same for a token alone and for that token repeated, because attention over equal
    values is that value.
    """
    target = compared.target
    ids = compared.text.tolist()
    vectors = Vectors(target, Exposure("pooled", pooling="last"), ids)
    text = vectors.inside(ids)
    wanted = vectors([text])[0]
    others = alternatives_to(vectors, text, wanted, leak.length is not None).texts

    def misfit(texts: Sequence[Tokens]) -> Tensor:
        framed = [[*vectors.before, *each, *vectors.after] for each in texts]
        rows = target.tensor(framed)
        return compared.rows(rows, lambda given: compared.misfits(given).sum(-1))

    own = float(misfit([text]))
    least = compared.verifying
    best: Tokens | None = None
    for _, alike in groupby(sorted(others, key=len), key=len):
        texts = list(alike)
        worse, place = (misfit(texts) - own).min(0)
        if worse <= least:
            least = float(worse)
            best = texts[int(place)]
    return best, vectors.passes + len(others) + 1
