"""The judge of a text that was read from one vector: it is that text's, and no near one's.

A text is verified if three things hold.

1. Its own vector f may be what was stored: its misfit E(f) is within what the stored form and its
   error leave to chance (stored.py).
2. No alternative's may: for each text one edit away among the nearest (edits.py), E is larger by at
   least 2 (log V + 10), odds of V·e¹⁰ : 1 for a vocabulary of V tokens.
3. What is stored could tell it from texts that nobody tried. There are V^n texts of n tokens, and B
   bits tell at most 2^B of them apart, so a chance fit among V^n is excluded by odds of e¹⁰ : 1
   only if B ≥ n log₂ V + 10 log₂ e. A search that tries long texts against few bits ends at one
   that fits sooner or later, and its neighbours may all be worse.

One vector speaks for the text as a whole: where an alternative fits as well, no token is verified.
Tokens that no such alternative touches are likely, if the odds against each of theirs are e¹⁰ : 1.

Where the text does not fit, the rest may be noise that nobody stated. A single vector has no second
row to tell noise by, so nothing is verified then. With n numbers and a distance ‖y − f‖², the best
strength for the noise is ‖y − f‖²/n, and an alternative's margin n (‖y − f′‖²/‖y − f‖² − 1); tokens
whose alternatives are all excluded so are likely, up to noise of 15% of the spread.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.edits import NONE, Alternatives, Vectors, alternatives_to
from keyhole.recover.embeddings.stored import Stored
from keyhole.recover.judge import ODDS, Mark, Verdict
from keyhole.recover.leaks import Pooled

_NOISE = 0.15  # of the spread: a distance above it is not called noise


def judge_vector(
    target: Target, leak: Pooled, ids: list[int], vectors: Vectors | None = None
) -> Verdict:
    """Decide what `ids` are worth as the text of a pooled embedding.

    `vectors` has what was run before, where one text is judged several times.
    """
    vectors = vectors or Vectors(target, leak.exposure, ids)
    spent, text = vectors.passes, vectors.inside(ids)
    own = vectors([text])[0]
    stored = Stored.of(leak, own)
    fits = stored.fits(own)
    residual = float(stored.distances(own[None]).sqrt())
    plausible = fits or residual <= _NOISE
    alternatives = NONE  # they would change nothing about a text that is far off
    if plausible:
        alternatives = alternatives_to(vectors, text, stored.nearest(own), leak.tokens is not None)
    margin = _margins(stored, own, alternatives, fits)
    odds = 2 * (math.log(target.vocabulary) + ODDS)
    needed = _bits_needed(target, len(text))
    verified = fits and stored.bits >= needed and bool((margin > odds).all())
    around, inside = _marks(len(text), margin, alternatives, verified, plausible)
    marks = (*around * len(vectors.before), *inside, *around * len(vectors.after))
    status = _status(inside, verified, fits, residual)
    reason = (
        f"{stored.agreement(own)}, {'' if fits else 'not '}within its precision ({stored.name})"
    )
    if fits and not verified:
        reason += _doubt(target, stored, alternatives, margin, odds, needed)
    error = float((stored.widths.nan_to_num(posinf=0).square() / 12).mean())
    precision = math.sqrt(error + stored.error**2) / stored.spread
    return Verdict(
        status, reason, verified, residual, precision, marks, vectors.passes - spent,
        stored.similarity(own),
    )  # fmt: skip


def may_be(target: Target, leak: Pooled, ids: list[int], vectors: Vectors | None = None) -> bool:
    """Do `ids` pass the tests but that against alternatives? A search looks for such texts."""
    vectors = vectors or Vectors(target, leak.exposure, ids)
    text = vectors.inside(ids)
    own = vectors([text])[0]
    stored = Stored.of(leak, own)
    return stored.fits(own) and stored.bits >= _bits_needed(target, len(text))


def _bits_needed(target: Target, tokens: int) -> float:
    """To tell a text of so many tokens from all others, by odds of e¹⁰ : 1."""
    return tokens * math.log2(target.vocabulary) + ODDS / math.log(2)


def _margins(stored: Stored, own: Tensor, alternatives: Alternatives, fits: bool) -> Tensor:
    """How much worse (r,) each alternative fits: twice the logarithm of the odds against it."""
    if not len(alternatives.texts):
        return torch.zeros(0)
    if fits:
        return (stored.misfit(alternatives.vectors) - stored.misfit(own[None])).cpu()
    own_distance = stored.distances(own[None])
    return (len(own) * (stored.distances(alternatives.vectors) / own_distance - 1)).cpu()


def _marks(
    count: int, margin: Tensor, alternatives: Alternatives, verified: bool, plausible: bool
) -> tuple[list[Mark], list[Mark]]:
    """The mark of special tokens, which are as good as the text is, and of each of the others."""
    around = [Mark.VERIFIED if verified else Mark.LIKELY if plausible else Mark.UNKNOWN]
    if verified or not plausible or not count:
        return around, around * count
    each = margin[:, None].where(alternatives.touched, torch.inf).amin(0)
    return around, [Mark.LIKELY if m > 2 * ODDS else Mark.UNKNOWN for m in each.tolist()]


def _status(marks: list[Mark], verified: bool, fits: bool, residual: float) -> Status:
    if verified:
        return Status.RECOVERED
    if Mark.LIKELY in marks:
        return Status.INEXACT
    if fits:
        return Status.NOT_IDENTIFIABLE
    return Status.MISMATCH if residual > 1 else Status.UNSOLVED


def _doubt(
    target: Target,
    stored: Stored,
    alternatives: Alternatives,
    margin: Tensor,
    odds: float,
    needed: float,
) -> str:
    """Why a text that fits is not verified."""
    close = int((margin <= odds).sum())
    if close:
        best = target.decode(alternatives.texts[int(margin.argmin())])
        return f"; {close} of {len(margin)} texts one edit away are not excluded, such as {best!r}"
    return f"; {stored.bits:.0f} bits do not tell it from all others, {needed:.0f} would"
