"""Planted targets, and errors against the truth that was planted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keyhole.oracle import Oracle
from keyhole.oracle.planted import Attention, Head, MultiHead
from show import relative


def normals(seed: int) -> Callable[..., Tensor]:
    """Standard Gaussian tensors from one stream, by their shape."""
    stream = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=stream, dtype=torch.float64)


def worst_error(found: object, truth: Head | MultiHead | Attention) -> float:
    """The largest error of any W or v, relative to its largest entry; heads in any order.

    Heads are matched by W. Infinite where there are more or fewer heads than were planted.
    """
    if not isinstance(found, type(truth)) or len(found.W) != len(truth.W):
        return math.inf
    if isinstance(truth, Head):
        return max(relative(found.W, truth.W), relative(found.v, truth.v))
    W, truths = (torch.stack(list(heads.W)) for heads in (found, truth))
    v, values = (
        torch.stack(list(heads.v if isinstance(heads, MultiHead) else heads.V))
        for heads in (found, truth)
    )
    partner = torch.cdist(truths.flatten(1), W.flatten(1)).argmin(1)
    if len(partner.unique()) < len(W):
        return math.inf
    largest = truths.abs().max()
    errors = [
        relative(W[p], t) if t.any() else float(W[p].abs().max() / largest)
        for p, t in zip(partner, truths, strict=True)
    ]
    return max(*errors, *(relative(v[p], t) for p, t in zip(partner, values, strict=True)))


def fresh_error(
    target: Oracle, model: Oracle | None, lengths: Sequence[int], count: int = 100, size: float = 1
) -> float:
    """The worst error on fresh sequences of each length, relative to the largest answer."""
    if model is None:
        return math.inf
    draw, worst = normals(987_654_321), 0.0
    for length in lengths:
        sequences = size * draw(count, length, target.dim)
        answers = target(sequences)
        off = (model(sequences) - answers).abs().max()
        worst = max(worst, float(off) / (float(answers.abs().max()) or 1.0))
    return worst
