"""The judge of recovered texts: run the model on them and compare with the leak.

A recovered text counts only if running the model on it reproduces the leak within the leak's own
precision. The residual of the right text is not zero but looks like the leak's error ε
(precision.py), so each position is tested: with u = (y − f)/σ over d numbers, the mean of u² is
1 ± √(2/d), and a wrong token's is far outside.

Where noise of unknown strength was added (the residual is larger than rounding explains), σ is
taken from the residual itself, as the median over positions, and the residual has to look like
noise and like nothing else: as strong at every position, of no direction that positions share or
that the model's own answer has, at most 15% of the leak's spread, and at least 2,000 numbers. Less
than that may be right, but is not called verified. State the noise, and it is tested against that.
A wrong token fails at its own position; another model or layer at all of them.

A fit is not enough where the leak is coarse or a position did not leak: another token might fit as
well. So rivals are put in its place (rivals.py), one at a time. A token is verified if the text
fits as a whole and the odds against each rival are at least V·e¹⁰ : 1 for a vocabulary of V tokens.
Two exceptions, both of coarse leaks, where several wrong tokens may make up for each other: a token
whose own position did not leak is not verified, and none is where more than one in twenty is open.

A token is likely if its position leaked and the odds against each rival are e¹⁰ : 1, whether or not
the rest of the text is right: what the text leaves unexplained counts as noise then, and has to be
less than half of the leak's spread. Rows that leaked in no order are compared as a set, and the
order of the text has rivals of its own (orders.py). benchmarks/text_marks.py measures how often
all that is right. Of one vector for a whole text embedding/judge.py decides; of logits, which are
one as well, no token is verified where a text one edit away may be meant (other_texts.py).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from keyhole.core import Status
from keyhole.core.numerics import with_ridge
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.embedding.edits import Tokens, Vectors, rivals_of
from keyhole.recover.embedding.judge import judge_vector
from keyhole.recover.judge import ODDS, Verdict
from keyhole.recover.layers.precision import NOISE, Fit, compare, precision_of
from keyhole.recover.layers.unordered import assigned
from keyhole.recover.leaks import HiddenStates, Leak, Logits, Pooled
from keyhole.recover.judge import Mark

_NOISY = 0.05  # of the leak's spread: an error above it needs more rivals
_FINE = 5e-3  # of the leak's spread: below it any other token shows
_OPEN = 0.05  # of a coarse leak's tokens: more open ones than that leave none verified
_TWIN = 1e-2  # embeddings nearer than this (relative) may pass for each other
_TWINS: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()










def judge(target: Target, leak: Leak, ids: list[int]) -> Verdict:
    """Decide what `ids` are worth as an explanation of a leak."""
    if len(ids) != (leak.length or len(ids)) or not ids:
        reason = f"{len(ids)} tokens proposed for {leak.length} positions"
        return _without_fit(Status.UNSOLVED, reason, ids)
    if isinstance(leak, Pooled):
        return judge_vector(target, leak, ids)
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
        return _without_fit(Status.NOT_IDENTIFIABLE, reason, ids)
    given = exposed_rows(target, leak, text[None])[0]
    matched = in_best_order(leak, given) if isinstance(leak, HiddenStates) else None
    if matched is not None:
        leak, leaked = matched, matched.values.to(device)
    fit = compare(precision_of(leak), leaked, given)
    if not math.isfinite(fit.residual):
        return _without_fit(
            Status.NOT_APPLICABLE, "the leak's numbers are too large to compare", ids
        )
    hidden = leaked.isnan().any(-1) & ~padding if own else torch.ones_like(padding)
    margin, forwards = torch.full(text.shape, torch.inf, device=device), 1
    coarse = not fit.whole or fit.level > _FINE or bool(hidden.any())
    odds = 2 * (math.log(target.vocabulary) + ODDS)
    if coarse or bool(_twins(target)[text].any()):
        misfits, noisy = _misfits(fit, leaked, given), fit.level > _NOISY
        margin, more = margins(target, leak, text, misfits, hidden, odds, noisy)
        margin, forwards = margin.masked_fill(padding, torch.inf), forwards + more
    doubt = ""
    if matched is not None:
        unsettled, more = open_places(target, matched, text, fit.sigma, odds)
        margin, forwards = margin.masked_fill(unsettled, 0.0), forwards + more
        count = int(unsettled.sum())
        doubt = f"; the order of {count} tokens is unknown" if count else ""
    if isinstance(leak, Logits) and fit.whole and bool((margin > odds).all()):
        misfits = _misfits(fit, leaked, given)
        rival, more = other_text(target, leak, ids, misfits, odds)
        forwards += more
        if rival is not None:
            margin = torch.zeros_like(margin)
            doubt = f"; so could {target.decode(rival)!r}, for one"
    marks = _marks(fit, margin, hidden, odds)
    reason = f"residual {fit.residual:.1e} of the leak's spread, its precision {fit.level:.1e}"
    status, more_words = _status(fit, marks, _framed(target, text) | padding)
    verified = status is Status.RECOVERED
    reason += more_words + doubt
    return Verdict(status, reason, verified, fit.residual, fit.level, marks, forwards)


def _without_fit(status: Status, reason: str, ids: list[int]) -> Verdict:
    """What is left to say where a text cannot be compared with the leak."""
    return Verdict(status, reason, False, None, None, (Mark.UNKNOWN,) * len(ids))


def _marks(fit: Fit, margin: Tensor, hidden: Tensor, odds: float) -> tuple[Mark, ...]:
    """What each token has earned; see the head of this file and Mark."""
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


def _framed(target: Target, text: Tensor) -> Tensor:
    """Where (n,) do the tokenizer's own special tokens stand, which nobody has to read?"""
    return target.framed(len(text)) == text


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
        return Status.MISMATCH, ": no better than nothing"
    misfits = sum(not here for here in fit.good.tolist())
    return partly, f"{words}; {misfits} positions do not fit"


def _twins(target: Target) -> Tensor:
    """Which tokens (v,) share their embedding, nearly, with another? Found once for a model.

    Twins have nearly the same product with any vector, so only neighbours in that order are met.
    """
    table = target.parts.table.float()
    kept = _TWINS.get(target.parts.base)
    if kept is not None and kept.device == table.device:
        return kept
    probe = torch.linspace(-1, 1, table.shape[1], device=table.device).sin()
    order = (table @ probe).argsort()
    following = table[order].diff(dim=0).norm(dim=-1)
    near = following <= _TWIN * table[order[1:]].norm(dim=-1)
    twins = torch.zeros(len(table), dtype=torch.bool, device=table.device)
    twins[order[1:][near]] = True
    twins[order[:-1][near]] = True
    _TWINS[target.parts.base] = twins
    return twins


def _misfits(fit: Fit, leaked: Tensor, given: Tensor) -> Callable[[Tensor], Tensor]:
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


# Could another token stand in the place of one? Rivals are tried by running the model.
#
# With E(text) the misfit of a text in units of the leak's error, a rival's margin is how much
# larger E becomes with the rival in the token's place: twice the logarithm of the odds against it.
# The margin of a token is the least of its rivals'.
#
# Not all of a vocabulary can be tried at each position. Those that might pass are the tokens of
# most similar embedding e, and the tokens whose answer would be what leaked: with A the linear map
# from embeddings to a row of the leak (answers.py) and r what the text leaves unexplained at its
# own position, those of least ‖(e_v − e) A − r‖. In 112 tokens that were wrong within the noise, on
# a model of four layers, these ten always held one that fits as well or better; of the tokens that
# the gradient of E asks for, whose steps are far too long, the first three did in 15 to 20% of
# them. Where the leak's error is above 5% of its spread, r says less: with noise of 20% a wrong
# token was called verified because the right one came twentieth. There the first 32 are tried.
# Where a position did not leak there is no r, and where rows are no position's own there is no A:
# the gradient's are all there is besides the most similar ones.

_ALONE = 64  # rivals tried one by one; more only together
_AT_ONCE = 4096  # tokens in one pass
_ANSWERING = 6  # … by what leaked at its position,
_RIVALS_NOISY = 32  # … where noise blurs it,
_WISHED = 3  # … and by the gradient


def exposed_rows(target: Target, leak: Leak, ids: Tensor) -> Tensor:
    """What the model gives for ids (b, n), as rows."""
    return leak.rows(target.expose(leak, ids, _mask(target, leak, len(ids))))


def margins(
    target: Target,
    leak: Leak,
    text: Tensor,
    misfits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    enough: float,
    noisy: bool = False,
) -> tuple[Tensor, int]:
    """The margin (n,) of each token over its nearest rival, and the passes that took.

    The whole leak speaks for a token: a row may say next to nothing about its own one ([CLS] in the
    lower layers of MiniLM), while all others do. So a rival is tried alone. In a long text only
    rivals at every 64th position, together, and each is judged by its own row; the first 64 whose
    margin is not `enough` so are tried alone, and so are the first 64 positions that did not leak
    (`hidden`). A leak that is `noisy` has more rivals.
    """
    size = max(1, _AT_ONCE // len(text))
    places = torch.arange(len(text), device=text.device)
    given = exposed_rows(target, leak, text[None])[0]
    before = misfits(given)

    def gains(rivals: Tensor, groups: Tensor) -> Tensor:
        """How much worse each row (g, n) fits with the rivals of a group (g, n) in their places.

        `rivals` are those of all groups (n,), or each group has its own (g, n).
        """
        swapped = torch.where(groups, rivals, text)
        rows = [misfits(exposed_rows(target, leak, part)) for part in swapped.split(size)]
        return torch.cat(rows) - before

    all_rivals = _rivals(target, leak, text, given, misfits, hidden, noisy)
    if len(text) <= _ALONE:  # each alone, in as few passes as hold them
        alone = (places == places[:, None]).repeat(len(all_rivals), 1)
        each = all_rivals.repeat_interleave(len(text), 0)
        return gains(each, alone).sum(-1).view_as(all_rivals).amin(0), 3 + len(alone)
    least, spent = torch.full(text.shape, torch.inf, device=text.device), 3
    for rival in all_rivals:
        groups = (places % _ALONE == places[:_ALONE, None]) & ~hidden
        margin = gains(rival, groups).where(groups, -torch.inf).amax(0)
        spent += len(groups)
        for part in (hidden, ~hidden & ~(margin > enough)):
            tried = part.nonzero().flatten()[:_ALONE]
            if len(tried):
                margin[tried] = gains(rival, places == tried[:, None]).sum(-1)
                spent += len(tried)
        least = torch.minimum(least, margin)
    return least, spent


def _rivals(
    target: Target,
    leak: Leak,
    text: Tensor,
    given: Tensor,
    misfits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    noisy: bool,
) -> Tensor:
    """The tokens (k, n) to be tried at each position."""
    rivals = [most_similar(target.parts.table, text)]
    answers = answers_of(target, leak.exposure)
    if answers is not None:
        leaked = leak.rows(leak.tensors).to(given)
        unexplained = answers.own(leaked - given).nan_to_num()
        count = _RIVALS_NOISY if noisy else _ANSWERING
        rivals.append(answers.nearest(target.parts.table, text, unexplained, count))
    if answers is None or bool(hidden.any()):
        rivals.append(_wished(target, leak, text, misfits))
    return torch.cat(rivals)


def _wished(
    target: Target, leak: Leak, text: Tensor, misfits: Callable[[Tensor], Tensor]
) -> Tensor:
    """The tokens (k, n) that would lower the misfit most, to first order; one pass."""
    table = target.parts.table
    with torch.enable_grad():
        words = table[text][None].requires_grad_()
        mask = _mask(target, leak, 1)
        given = leak.rows(capture(target.model, leak.exposure, embeddings=words, mask=mask))
        (gradient,) = torch.autograd.grad(misfits(given[0]).sum(), words)
    change = gradient[0] @ table.T
    change[:, target.pads()] = torch.inf
    change = change.scatter(1, text[:, None], torch.inf)
    return change.topk(min(_WISHED, change.shape[1]), largest=False).indices.T


def _mask(target: Target, leak: Leak, count: int) -> Tensor | None:
    return None if leak.mask is None else leak.mask.to(target.parts.device).expand(count, -1)




# What a row of a leak says about its own token, to first order: a linear map from embeddings.
#
# `row ≈ e A + b`, fitted on the rows that random tokens give in one and the same context. It is far
# too coarse to read a token by, and good enough to say which few tokens might pass for another:
# those whose row would be moved by what is left unexplained.

_SAMPLES = 4  # tokens for each number of an embedding
_CONTEXT = 4  # random tokens before the one that is looked at: the first of a text is no example
_RIDGE = 1e-5
_ANSWERS_AT_ONCE = 512  # short texts in one pass
_FITTED: weakref.WeakKeyDictionary[nn.Module, dict[Exposure, Answers]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Answers:
    """`map` (e, f) from embeddings to rows, and the squared length (v,) of each token's answer.

    Of keys and values only the values count: keys may be rotated by their position. `heads` is
    their number, or 1.
    """

    map: Tensor
    sizes: Tensor
    heads: int

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


def answers_of(target: Target, exposure: Exposure) -> Answers | None:
    """The map of a model's exposure, fitted once; None where rows are not those of positions."""
    if exposure.kind not in ("hidden", "kv", "attention"):
        return None
    fitted = _FITTED.setdefault(target.parts.base, {})
    if exposure not in fitted or fitted[exposure].map.device != target.parts.device:
        fitted[exposure] = _fit(target, exposure)
    return fitted[exposure]


def _fit(target: Target, exposure: Exposure) -> Answers:
    table = target.parts.table
    count = min(len(table), _SAMPLES * table.shape[1])
    stream = torch.Generator().manual_seed(0)
    tokens = torch.randperm(len(table), generator=stream)[:count]
    before, after = target.frame()
    context = torch.randint(len(table), (_CONTEXT,), generator=stream).tolist()
    opening, ending = torch.tensor([*before, *context]), torch.tensor(after, dtype=torch.long)
    rows: list[Tensor] = []
    for part in tokens.split(_ANSWERS_AT_ONCE):
        frame = [opening.expand(len(part), -1), part[:, None], ending.expand(len(part), -1)]
        with torch.no_grad():
            ids = torch.cat(frame, 1).to(target.parts.device)
            given = capture(target.model, exposure, ids=ids)["values"]
        rows.append(given[..., len(opening), :].flatten(1).double())
    words = table[tokens.to(table.device)].double()
    words, answers = words - words.mean(0), torch.cat(rows)
    square = with_ridge(words.T @ words, _RIDGE)
    linear = torch.linalg.solve(square, words.T @ (answers - answers.mean(0))).to(table)
    heads = target.parts.key_heads if exposure.kind == "kv" else 1
    return Answers(linear, (table @ linear).square().sum(-1), heads)


# The judge of orders: rows that leaked in no order are compared as a set.
#
# What the model gives for a text has an order; the rows that leaked are put into the one that fits
# it best (an assignment of least misfit), and are judged there like any others. The text's own
# order is believed only if no other one does as well: two tokens that are neighbours, or next but
# one, change places, all in between is reversed, or shuffled, the model is run on that, and the
# leak is assigned anew. Its misfit must be larger by what a rival of any token must exceed
# (rivals.py). Two rows that are alike leave open which is which; that is no doubt about the text,
# if their tokens are the same.

_ORDERS_AT_ONCE = 4096  # tokens in one pass
_SHORT = 64  # tokens: of a longer text only neighbours are exchanged


def in_best_order(leak: HiddenStates, given: Tensor) -> HiddenStates | None:
    """The leak with its rows where they fit what the model gives, (n, f), best.

    None where the rows have an order of their own.
    """
    if not leak.permuted:
        return None
    return leak.ordered(
        assigned(_orders_misfits(given, leak.values.to(given), torch.ones(()).to(given)))
    )


def open_places(
    target: Target, leak: HiddenStates, text: Tensor, sigma: Tensor, enough: float
) -> tuple[Tensor, int]:
    """The positions (n,) whose tokens might stand in another order, and the passes that took.

    `leak` is in the text's order, `sigma` (n, f) the error of its numbers.
    """
    rivals = _rival_orders(len(text)).to(text.device)
    rivals = rivals[(text[rivals] != text).any(-1)]
    leaked = leak.values.to(text.device)
    unsettled = torch.zeros_like(text, dtype=torch.bool)
    if not len(rivals):  # a single token, or the same one throughout
        return unsettled, 0
    own = _least(_orders_misfits(exposed_rows(target, leak, text[None])[0], leaked, sigma))
    for part in rivals.split(max(1, _ORDERS_AT_ONCE // len(text))):
        for order, given in zip(part, exposed_rows(target, leak, text[part]), strict=True):
            if not _least(_orders_misfits(given, leaked, sigma)) - own > enough:
                unsettled |= text[order] != text
    return unsettled, len(rivals) + 1


def _rival_orders(length: int) -> Tensor:
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


def _orders_misfits(given: Tensor, leaked: Tensor, sigma: Tensor) -> Tensor:
    """Sums of squares (rows, positions) in units of the leak's error; NaN for what did not leak."""
    weights = sigma.expand_as(leaked).square().reciprocal()
    far = (weights * leaked.square()).sum(-1, keepdim=True)
    return far - 2 * (weights * leaked) @ given.T + weights @ given.square().T


def _least(misfits: Tensor) -> float:
    order = assigned(misfits).to(misfits.device)
    return float(misfits[order, torch.arange(len(order), device=order.device)].nansum())


# Could another text have given the same logits? Texts one edit away are run, of any length.
#
# Logits are one vector for a whole text, and a token more or less is a rival like any other where
# its length is not known. One such rival always fits: a model with rotary positions and no token
# that begins every text gives the same for a token alone and for that token repeated, because
# attention over equal values is that value.

_TOKENS = 2048  # in one pass


def other_text(
    target: Target, leak: Logits, ids: Sequence[int], misfits: Callable[[Tensor], Tensor],
    enough: float,
) -> tuple[Tokens | None, int]:  # fmt: skip
    """The text one edit away that fits best, if the odds against it are not `enough`; passes."""
    exposure = Exposure("pooled", pooling="last", steps=leak.exposure.steps)
    vectors = Vectors(target, exposure, ids)
    text = vectors.inside(ids)
    rivals = rivals_of(vectors, text, vectors([text])[0], leak.length is not None).texts

    def misfit(texts: Sequence[Tokens]) -> Tensor:
        framed = [[*vectors.before, *each, *vectors.after] for each in texts]
        rows = torch.tensor(framed, device=target.parts.device)
        parts = rows.split(max(1, _TOKENS // rows.shape[1]))
        return torch.cat([misfits(exposed_rows(target, leak, part)).sum(-1) for part in parts])

    own = float(misfit([text]))
    best: tuple[float, Tokens | None] = (enough, None)
    for _, alike in groupby(sorted(rivals, key=len), key=len):
        texts = list(alike)
        worse, place = (misfit(texts) - own).min(0)
        if float(worse) <= best[0]:
            best = (float(worse), texts[int(place)])
    return best[1], vectors.passes + len(rivals) + 1
