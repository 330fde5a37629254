"""The judge of a text from one vector: is it that text's vector, and that of no similar text?

A text is verified if four conditions hold.

1. Its own vector f may be what was stored: its misfit E(f) is within what the stored form and its
error allow by chance (`Stored`).

2. No alternative's vector may be: for each text one edit away among the nearest (edits.py), E is
larger by at least 2 (log V + 10), odds of V·e¹⁰ : 1 for a vocabulary of V tokens.

3. What is stored holds enough bits to exclude the texts that nobody tried. There are V^n texts of n
tokens, and B bits distinguish at most 2^B of them, so a chance fit among V^n is
excluded by odds of e¹⁰ : 1 only if B ≥ n log₂ V + 10 log₂ e. A search that tries long
texts against few bits finds one that fits sooner or later, and its neighbours may all
be worse.

4. Where noise was added, the first test alone distinguishes texts one edit apart (`resolves`). If
it accepts those, it also accepts texts two edits away, which are not tried.

One vector stands for the whole text: where an alternative fits as well, no token is
verified. Tokens are likely if the odds against every alternative that touches them are
e¹⁰ : 1.

Where the text does not fit, the rest may be noise that nobody stated. A single vector
has no second row to estimate noise from, so nothing is verified then. With n numbers
and a distance ‖y − f‖², the maximum likelihood estimate of the noise is ‖y − f‖²/n, and
an alternative's margin n (‖y − f′‖²/‖y − f‖² − 1). Tokens whose alternatives are all
excluded by it are likely, up to noise of 15% of the spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.core.tensors import root_mean_square, row_numbers
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.edits import (
    NONE,
    Alternatives,
    Vectors,
    alternatives_to,
)
from keyhole.recover.layers.precision import FLOAT32, rounding_of
from keyhole.recover.leaks import Pooled
from keyhole.recover.recovery import LOG_ODDS, Verdict, marks_of, verifying_margin

_NOISE = 0.15  # of the spread: a larger distance is not explained by noise


def judge_vector(
    target: Target,
    leak: Pooled,
    ids: list[int],
    vectors: Vectors | None = None,
) -> Verdict:
    """Judge `ids` as the text of a pooled embedding.

    `vectors` holds earlier results, where a text is judged several times.
    """
    vectors = vectors or Vectors(target, leak.exposure, ids)
    spent = vectors.passes
    text = vectors.inside(ids)
    own = vectors([text])[0]
    stored = Stored.of(leak, own)
    fits = stored.fits(own)
    residual = float(stored.distances(own[None]).sqrt())
    plausible = fits or residual <= _NOISE
    alternatives = NONE  # a text that is far from the vector is rejected without them
    if plausible:
        wanted = stored.nearest(own)
        alternatives = alternatives_to(vectors, text, wanted, leak.tokens is not None)
    margin = _margins(stored, own, alternatives, fits)
    verifying = verifying_margin(target.vocabulary)
    needed = _bits_needed(target, len(text))
    resolved = stored.resolves(own, alternatives.vectors)
    sure = fits and resolved and stored.bits >= needed
    verified = sure and bool((margin > verifying).all())
    # Special tokens are as certain as the text.
    likely = torch.ones(len(text), dtype=torch.bool)
    if plausible and text:
        each = margin[:, None].where(alternatives.touched, torch.inf).amin(0)
        likely = each > 2 * LOG_ODDS
    framed = (
        *[plausible] * len(vectors.before),
        *(likely & plausible).tolist(),
        *[plausible] * len(vectors.after),
    )
    marks = marks_of([verified] * len(framed), framed)
    status = Status.MISMATCH if residual > 1 else Status.UNSOLVED
    if verified:
        status = Status.RECOVERED
    elif plausible and text and likely.any():
        status = Status.INEXACT
    elif fits:
        status = Status.NOT_IDENTIFIABLE
    reason = (
        f"{stored.agreement(own)}, {'' if fits else 'not '}within its precision "
        f"({stored.name})"
    )
    if fits and not verified:
        reason += _doubt(target, stored, alternatives, margin, needed)
    error = float((stored.widths.nan_to_num(posinf=0).square() / 12).mean())
    return Verdict(
        status,
        reason,
        verified,
        residual,
        math.sqrt(error + stored.error**2) / stored.spread,
        marks,
        vectors.passes - spent,
        stored.similarity(own),
    )


def may_be(
    target: Target,
    leak: Pooled,
    ids: list[int],
    vectors: Vectors | None = None,
) -> bool:
    """Return whether `ids` pass conditions 1 and 3, as a search requires."""
    vectors = vectors or Vectors(target, leak.exposure, ids)
    text = vectors.inside(ids)
    own = vectors([text])[0]
    stored = Stored.of(leak, own)
    return stored.fits(own) and stored.bits >= _bits_needed(target, len(text))


def _bits_needed(target: Target, tokens: int) -> float:
    """Return the bits that distinguish a text of so many tokens from all others (condition 3)."""
    return tokens * math.log2(target.vocabulary) + LOG_ODDS / math.log(2)


def _margins(
    stored: Stored,
    own: Tensor,
    alternatives: Alternatives,
    fits: bool,
) -> Tensor:
    """Return how much worse (r,) each alternative fits, as twice the log of the odds against it."""
    if not len(alternatives.texts):
        return torch.zeros(0)
    measure = stored.misfit if fits else stored.distances
    before = measure(own[None])
    after = measure(alternatives.vectors)
    return (after - before if fits else len(own) * (after / before - 1)).cpu()


def _doubt(
    target: Target,
    stored: Stored,
    alternatives: Alternatives,
    margin: Tensor,
    needed: float,
) -> str:
    """Explain why a text that fits is not verified."""
    close = int((margin <= verifying_margin(target.vocabulary)).sum())
    if close:
        best = target.decode(alternatives.texts[int(margin.argmin())])
        return f"; {close} of {len(margin)} texts one edit away are not excluded, such as {best!r}"
    if stored.bits < needed:
        return f"; {stored.bits:.0f} bits do not tell it from all others, {needed:.0f} would"
    return "; with such noise a text one edit away would fit too, and so may others"


# How a vector is stored, and whether a text's own vector may be what was stored.
#
# A store keeps f in a form that many vectors share: rounded to floating-point numbers
# of fewer bits, to whole steps, to signs, or to the nearest of a few centroids in each
# block (product quantisation, Jégou et al., 2011). So f lies in a known cell, which has
# a few borders. With m_b(f) the distance of f to border b, positive inside, the borders
# are those of
#
#     a number in steps of w     two borders, y − w/2 and y + w/2
#     a sign                     one border, 0
#     one of K centroids c       K − 1 borders, half-way: (‖f − c′‖² − ‖f − c‖²) / (2 ‖c − c′‖)
#
# Before it was stored, f had an error, from arithmetic in another order and from stated
# noise. With s its standard deviation in each number, the probability of the stored
# form is about Π_b Φ(m_b(f)/s); this is exact while no two borders are within a few s
# of f. Where a step is short compared with the error (w ≤ 4 s), the borders blur, and
# the variance is s² + w²/12 in all. So the misfit of a text with vector f, −2 times its
# log-likelihood relative to the best possible, is
#
#     E(f) = Σ_short (y − f)² / (s² + w²/12) − 2 Σ_b log Φ(m_b(f)/s).
#
# For the right text each term of the first sum has mean 1 and variance 2. Each border
# is crossed with probability p = Φ(−|m_b|/s), so its term has mean −2 (p log p + q log
# q), with q = 1 − p, and second moment 4 (p log² p + q log² q). A text fits if E is at
# most the sum of the means, plus 4.5 standard deviations, plus 20: one border that is
# crossed against odds of e¹⁰ : 1.
#
# By Shannon's bound, the stored form holds at most Σ ½ log₂(1 + S²/(s² + w²/12)) bits
# for numbers of spread S, one bit for a sign, and log₂ K for one of K centroids.

_SHORT = 4.0  # standard deviations of the error up to which a step counts as short
_DEVIATIONS = 4.5  # standard deviations that chance explains
_SURPRISE = 20.0  # what a border that is crossed against odds of e¹⁰ : 1 adds
_LEVELS = {"int8": 127, "int4": 7}  # steps from zero to the largest number
# of a vector's length: the largest distance of a block from its centroid
_CENTROID = 1e-4
_AT_ONCE = 1 << 24  # distances to centroids that are held at a time


@dataclass(frozen=True, eq=False)
class Stored:
    """The stored form of a vector: `values` (k,), and the width of each number's cell.

    `widths` (k,) are 0 for a number that is not rounded and infinite for a sign. With a
    `codebook` (blocks, codes, numbers), the cells are those of its centroids, and
    `widths` (blocks,) are infinite. Cells at the `ends` (2, k) of a range are open.
    `error` is the standard deviation of the error before rounding, and `noise` the part
    of it that was stated, if that is more than arithmetic's.
    """

    name: str
    values: Tensor
    widths: Tensor
    error: float
    noise: float | None = None
    codebook: Tensor | None = None
    ends: Tensor | None = None

    @classmethod
    def of(cls, leak: Pooled, own: Tensor) -> Stored:
        """Return the stored form of a leak; the size of `own` (k,) gives float32's error."""
        values = leak.values.to(own.device, torch.float64)
        least = FLOAT32 * float(root_mean_square(own.double()))
        noise = leak.noise if leak.noise and leak.noise > least else None
        error = math.hypot(least, noise or 0.0)
        unbounded = torch.full_like(values, torch.inf)
        if leak.codebook is not None:
            book = leak.codebook.to(values)
            return cls("codes", values, unbounded[: len(book)], error, noise, book)
        if leak.steps is not None:
            ends = None if leak.ends is None else leak.ends.to(values)
            return cls("steps", values, leak.steps.to(values), error, noise, ends=ends)
        if leak.precision == "binary" or two_valued(values):
            middle = 0.0 if (values < 0).any() else float(values.max()) / 2
            signs = torch.where(values > middle, 1.0, -1.0).to(values)
            return cls("binary", signs, unbounded, error, noise)
        name, steps = rounding_of(values[None].float(), leak.precision)
        steps = steps[0].double()
        # too few numbers to show a grid
        if name == "float32" and leak.precision in _LEVELS:
            name = leak.precision
            steps = (values.abs().max() / _LEVELS[name]).expand_as(values)
        return cls(name, values, steps, error, noise)

    @cached_property
    def codes(self) -> Tensor:
        """The number (blocks,) of the centroid in each block of the values."""
        book = cast("Tensor", self.codebook)
        apart = (self.values.unflatten(0, (len(book), -1))[:, None] - book).norm(dim=-1)
        least, codes = apart.min(-1)
        if least.max() > _CENTROID * float(self.values.norm()):
            raise InputError("this vector is not made of the codebook's centroids")
        return codes

    @cached_property
    def bits(self) -> float:
        """An upper bound on the information in the stored form."""
        if self.codebook is not None:
            return self.codebook.shape[0] * math.log2(self.codebook.shape[1])
        if self.name == "binary":
            return float(len(self.values))
        error = self.widths.square() / 12 + self.error**2
        return float((1 + self.spread**2 / error).log2().sum()) / 2

    @cached_property
    def spread(self) -> float:
        """The standard deviation of the values: the unit of relative figures."""
        variance = (self.values - self.values.mean()).square().mean()
        return float(variance.sqrt().clamp(min=1e-30))

    def misfit(self, vectors: Tensor) -> Tensor:
        """Return E (b,) of vectors (b, k)."""
        vectors = vectors.double()
        if self.codebook is not None:
            parts = vectors.split(max(1, _AT_ONCE // self.codebook.numel()))
            each = [_surprise(self._margins(part)).sum((-2, -1)) for part in parts]
            return torch.cat(each)
        variance = self.error**2 + self.widths.where(self._short, 0).square() / 12
        blurred = (vectors - self.values).square() / variance
        sharp = _surprise(self._margins(vectors)).sum(-1)
        return torch.where(self._short, blurred, sharp).sum(-1)

    def limit(self, vector: Tensor) -> float:
        """Return the largest misfit that chance explains for a text with this vector (k,)."""
        wrong = torch.special.ndtr(-self._margins(vector.double()[None])[0].abs())
        mean = 2 * (torch.special.entr(wrong) + torch.special.entr(1 - wrong))
        square = 4 * (_squared_log(wrong) + _squared_log(1 - wrong))
        sharp = ~self._short[:, None]
        variance = float((square - mean.square()).where(sharp, 0.0).sum().clamp(min=0))
        short = int(self._short.sum())
        chance = float(mean.where(sharp, 0.0).sum()) + short
        return chance + _DEVIATIONS * math.sqrt(variance + 2 * short) + _SURPRISE

    def fits(self, vector: Tensor) -> bool:
        """Return whether this vector (k,) may be what is stored."""
        return float(self.misfit(vector[None])) <= self.limit(vector)

    def resolves(self, vector: Tensor, others: Tensor) -> bool:
        """Return whether texts with the other vectors (r, k) would not fit if this was stored.

        With noise s in n numbers, a vector at a distance of x s has a misfit of n + x²
        ± 2x, and one of up to n + 4.5 √(2n) + 20 is accepted. This matters only where
        noise is stated.
        """
        if not self.noise or not len(others):
            return True
        distances = (others.double() - vector.double()).norm(dim=-1)
        apart = float(distances.min()) / self.error
        accepted = _DEVIATIONS * math.sqrt(2 * len(vector)) + _SURPRISE
        return apart**2 - 2 * _DEVIATIONS * apart > accepted

    def nearest(self, vector: Tensor) -> Tensor:
        """Return the vector (k,) nearest to this one that would be stored in the same form.

        It is this vector itself if only arithmetic differs. Where noise was added, it
        is the stored vector: another text may explain part of what looks like noise.
        """
        vector = vector.double()
        inside = (self._margins(vector[None])[0] >= 0).all(-1)
        # the centroid stands for the nearest point of its cell
        if self.codebook is not None:
            size = self.codebook.shape[-1]
            return vector.where(inside.repeat_interleave(size), self.values)
        if self.name == "binary":
            return vector.where(inside, 0.0)
        low, high = self._borders
        if self.noise:
            return torch.where(self._short, self.values, vector.clamp(low, high))
        slack = torch.where(self._short, _DEVIATIONS * self.error, 0.0)
        return vector.clamp(low - slack, high + slack)

    def distances(self, vectors: Tensor) -> Tensor:
        """Return squared distances (b,) in units of the spread, as for noise that nobody stated."""
        return (vectors.double() - self.values).square().mean(-1) / self.spread**2

    def similarity(self, vector: Tensor) -> float:
        """Return the cosine of a text's vector with the stored one."""
        return float(torch.cosine_similarity(vector.double(), self.values, 0))

    def agreement(self, vector: Tensor) -> str:
        """Return the cosine in words, and how many codes or signs agree where there are any."""
        words = f"cosine {self.similarity(vector):.6f}"
        what = {"codes": "codes", "binary": "signs"}.get(self.name)
        if what is None:
            return words
        inside = (self._margins(vector.double()[None])[0] >= 0).all(-1)
        return f"{words}, {int(inside.sum())} of {len(inside)} {what} agree"

    @cached_property
    def _short(self) -> Tensor:
        """The numbers (k,) whose steps are short compared with the error."""
        return self.widths <= _SHORT * self.error

    @cached_property
    def _borders(self) -> tuple[Tensor, Tensor]:
        """The lower and the upper border of each number's cell."""
        low = self.values - self.widths / 2
        high = self.values + self.widths / 2
        if self.ends is None:
            return low, high
        # A store may give a cell's middle or its edge: within 0.75 steps of an end is
        # at the end.
        begin, end = self.ends
        low = low.where(self.values - begin > 0.75 * self.widths, -torch.inf)
        return low, high.where(end - self.values > 0.75 * self.widths, torch.inf)

    def _margins(self, vectors: Tensor) -> Tensor:
        """Return vectors' distances to all borders (b, cells, borders), in units of s."""
        if self.codebook is not None:
            blocks = vectors.unflatten(-1, (len(self.codebook), -1))
            own = self.codebook[row_numbers(self.codes), self.codes][:, None]
            # ‖f − c′‖² − ‖f − c‖² without the large terms that cancel
            normals = own - self.codebook
            middles = (own + self.codebook) / 2
            lengths = normals.norm(dim=-1)
            inside = torch.einsum("bmk,mck->bmc", blocks, normals)
            inside = inside - (middles * normals).sum(-1)
            return (inside / lengths / self.error).where(lengths > 0, torch.inf)
        if self.name == "binary":
            return (self.values * vectors)[..., None] / self.error
        low, high = self._borders
        return torch.stack([vectors - low, high - vectors], -1) / self.error


def two_valued(values: Tensor) -> bool:
    """Return whether there are only two numbers, one of them negative or zero: these are signs."""
    low = values.min()
    high = values.max()
    both = ((values == low) | (values == high)).all()
    return len(values) >= 8 and bool(both & (low <= 0) & (high > 0))


def _surprise(margins: Tensor) -> Tensor:
    return -2 * torch.special.log_ndtr(margins)


def _squared_log(chance: Tensor) -> Tensor:
    return torch.xlogy(chance, chance).square() / chance.clamp(min=1e-300)
