"""The length of a row of which only the direction leaked, from the norm that made it.

A normalised row is u = y / ‖y‖. Where y came straight out of a LayerNorm with gain γ and bias β,
z = (y − β)/γ has mean 0 and mean square 1 (up to the norm's ε). With y = s·u and means taken over
the d numbers of a row, that is

    s·mean(u/γ) = mean(β/γ)                                             (the mean)
    a s² − 2 b s + c = 1,   a = mean(u²/γ²), b = mean(uβ/γ²), c = mean(β²/γ²)   (the mean square)

The second has at most two positive roots, s = (b ± √(b² − a(c − 1)))/a, and the first says which:
the root that leaves the smaller mean. Where β = 0 the first says nothing (both sides vanish for any
s), but then c = 0, and only one root is positive. An RMSNorm has no mean condition and no β:
s = 1/√mean(u²/γ²). So the length comes back exactly, and with it the row.

Every number counts, those of the smallest gain too: in the last layer of all-MiniLM-L6-v2 three
gains are below 1e-8, and their z hold most of the mean square of a row. Floating-point formats keep
them to the last bit; int8, float16 and noise do not, and then the mean of z, which two equations
for one unknown leave over as a check, is far from 0.

Every row of the post-norm encoders and the last one of the causal models comes out of a norm.
Elsewhere, and where the check fails, the length is gone, and rows are compared by their directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from keyhole.models.anatomy import gain_and_bias
from keyhole.recover.attack import Target
from keyhole.recover.layers.precision import precision_of
from keyhole.recover.leaks import HiddenStates, Leak

_SMALL = 1e-3  # of the median gain: without a check, a row of smaller ones is not trusted
_CENTRED = 0.05  # the mean of z that rounding explains; its standard deviation is 1
_TWICE = 2.0  # rounding errs in the length as well as in each number


def row_lengths(rows: Tensor, norm: nn.Module) -> Tensor:
    """The s (…,) for which s·u could have come out of `norm`, for rows u (…, d); NaN for none."""
    gain, bias = gain_and_bias(norm)
    shift = torch.zeros_like(gain) if bias is None else bias
    u = rows.double()
    a = (u / gain).square().mean(-1)
    b = (u / gain * (shift / gain)).mean(-1)
    c = (shift / gain).square().mean()
    root = (b.square() - a * (c - 1)).sqrt()
    larger, smaller = (b + root) / a, (b - root) / a
    if bias is None:
        trusted = bool((gain.abs() > _SMALL * gain.abs().median()).all())
        return larger if trusted else larger * torch.nan
    off = [((s[..., None] * u - shift) / gain).mean(-1).abs() for s in (larger, smaller)]
    second = (smaller > 0) & (off[1] < off[0])
    lengths, left = torch.where(second, smaller, larger), torch.where(second, off[1], off[0])
    return lengths.where((left <= _CENTRED) & (lengths > 0), torch.nan)


def whole_rows(target: Target, leaks: Sequence[Leak]) -> list[Leak]:
    """Leaks of one exposure with their rows at full length, if that can be known of all of them.

    Their rounding is stated as noise then, that of the longest row: enough for an attack to know
    when to stop. The judge compares with what leaked.
    """
    whole = [_whole(target, leak) for leak in leaks]
    return list(leaks) if None in whole else cast("list[Leak]", whole)


def _whole(target: Target, leak: Leak) -> Leak | None:
    if not isinstance(leak, HiddenStates) or not leak.normalised or leak.width is not None:
        return None
    norm = target.parts.closing_norm(leak.layer)
    if norm is None:
        return None
    lengths = row_lengths(leak.values.to(target.parts.device), norm).float().cpu()[:, None]
    values = leak.values.cpu() * lengths
    seen = leak.values.isfinite().all(-1)
    if not bool(values[seen].isfinite().all()):
        return None
    errors = (precision_of(leak).sigma.cpu() * lengths)[seen].square().mean(-1).sqrt()
    noise = _TWICE * float(errors.max())
    return replace(leak, values=values, normalised=False, precision=None, noise=noise)
