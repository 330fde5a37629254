"""Leaks of a server of quantised weights, with the error that its arithmetic leaves.

The weights are ours, dequantised, but the server rounds what it multiplies (models/capture.py).
How far that moves an exposure is measured before the leak is looked at, by rounding in the same way
on ordinary texts; the judge then tests the leak against it, as against any noise that was stated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from keyhole.models import demo
from keyhole.models.capture import eight_bit_activations
from keyhole.recover.attack import Target
from keyhole.recover.leaks import Leak

_MARGIN = 1.5  # above the largest error of a position of the ordinary texts; chosen, not fitted


def with_served_noise(target: Target, leaks: Sequence[Leak]) -> list[Leak]:
    """Leaks of one exposure, with the noise stated that a server of 8-bit blocks leaves in it."""
    noise = served_noise(target, leaks[0])
    return [replace(leak, noise=noise) for leak in leaks]


def served_noise(target: Target, leak: Leak) -> float:
    """The largest error of a position, as a root mean square over its numbers, and a margin."""
    largest = 0.0
    for text in demo.TEXTS:
        ids = torch.tensor([target.tokenizer(text)["input_ids"]], device=target.parts.device)
        exact = _rows(target, leak, ids)
        with eight_bit_activations(target.model):
            rounded = _rows(target, leak, ids)
        largest = max(largest, float((rounded - exact).square().mean(-1).sqrt().max()))
    return _MARGIN * largest


def _rows(target: Target, leak: Leak, ids: Tensor) -> Tensor:
    return leak.rows(target.expose(leak, ids))[0]
