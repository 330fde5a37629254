"""Comparisons with the planted truth, which only tests and benchmarks may look at."""

from __future__ import annotations

from torch import Tensor

from keyhole.oracle import Head


def relative(found: Tensor, truth: Tensor) -> float:
    """Return the largest error, relative to the largest entry."""
    return float((found - truth).abs().max() / truth.abs().max())


def worst(found: Head, truth: Head) -> float:
    return max(relative(found.W, truth.W), relative(found.v, truth.v))
