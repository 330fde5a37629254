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
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keyhole.core import Status
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.judge import judge_vector
from keyhole.recover.leaks import HiddenStates, Leak, Logits, Pooled
from keyhole.recover.orders import in_best_order, open_places
from keyhole.recover.other_texts import other_text
from keyhole.recover.precision import Precision, precision_of
from keyhole.recover.recovery import Mark
from keyhole.recover.rivals import exposed_rows, margins
from keyhole.recover.verdict import ODDS, Verdict

_DEVIATIONS = 4.5  # standard deviations that chance is granted
_NOISE = 0.5  # of the leak's spread: noise above it may be a misfit as well
_CLAIMED = 0.15  # of the leak's spread: unknown noise above it is never vouched for
_NOISY = 0.05  # of the leak's spread: an error above it needs more rivals
_FEW = 4  # positions, …
_NUMBERS = 2000  # … and numbers, without which unknown noise proves nothing
_FINE = 5e-3  # of the leak's spread: below it any other token shows
_OPEN = 0.05  # of a coarse leak's tokens: more open ones than that leave none verified
_TWIN = 1e-2  # embeddings nearer than this (relative) may pass for each other
_TWINS: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Fit:
    """How a text's own numbers compare with the leak's, position by position.

    `good` (positions,) is true where the difference may be the leak's error, or nothing leaked.
    `proven` says that the difference was tested hard enough for a claim: against a known precision,
    or as noise that nothing but noise looks like.
    """

    good: Tensor
    proven: bool
    residual: float
    sigma: Tensor
    level: float

    @property
    def settled(self) -> bool:
        """Nothing is left that a search could improve on."""
        return bool(self.good.all())

    @property
    def whole(self) -> bool:
        return self.settled and self.proven


def compare(precision: Precision, leaked: Tensor, given: Tensor) -> Fit:
    """Test a residual against a leak's precision; rows are positions."""
    off = given - leaked
    seen = ~off.isnan().any(-1)
    residual = float(off[seen].square().mean().sqrt()) / precision.scale
    sigma = precision.sigma.to(off.device)
    limit = _limit(off.shape[-1])
    strength = (off / sigma).square().mean(-1)
    typical = float(strength[seen].median())
    if typical <= limit or precision.noise is not None:
        good = (strength <= limit) | ~seen
        return Fit(good, True, residual, sigma, precision.relative)
    # Larger than rounding explains: noise of unknown strength, or a wrong text.
    strength = off.square().mean(-1)
    level = float(strength[seen].median().sqrt())
    good = (strength <= limit * level**2) & (level <= _NOISE * precision.scale) | ~seen
    proven = _only_noise(off[seen], given[seen], level, precision.scale)
    return Fit(good, proven, residual, sigma.clamp(min=level), level / precision.scale)


def _limit(count: int, deviations: float = _DEVIATIONS) -> float:
    """A bound on the mean of so many squared standard normals (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * count)
    return (1 - spread + deviations * math.sqrt(spread)) ** 3


def _only_noise(off: Tensor, given: Tensor, level: float, scale: float) -> bool:
    """Is the residual independent noise of one strength, and long enough to tell?

    A leak that is not what it says leaves traces that noise does not: a part along what the model
    gives (another text mixed in), a part that positions share (another context or model: a singular
    value beyond √n + √d), numbers that are worse than others at every position.
    """
    rows, count = off.shape
    if rows * count < _NUMBERS or rows < _FEW or not level <= _CLAIMED * scale:
        return False
    off = off / level
    along = float((off * given).sum() / given.norm())
    largest = float(torch.linalg.matrix_norm(off.cpu(), 2))
    columns = float(off.square().mean(0).max())
    return (
        abs(along) <= _DEVIATIONS
        and largest <= math.sqrt(rows) + math.sqrt(count) + _DEVIATIONS
        and columns <= _limit(rows, _DEVIATIONS + 1)
    )


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
    likely = shown & (margin > 2 * ODDS) & (fit.residual <= _NOISE)
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
