"""Candidates tried by running the model: one position at a time, all positions side by side.

Each candidate at each position is put into the text as it stands, the model runs on all of them in
batches, and the best of each position are taken over together as far as that helps: they are put
in one after another, the best first, and the prefix with the smallest loss stays (one batch more).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.recover.search.comparison import Comparison

_TEXTS = 4096  # tried in one sweep at most: long texts get fewer candidates for each position
_WORTH = 0.8  # a further sweep is worth it while the loss falls by a fifth


@dataclass(frozen=True, eq=False)
class Tried:
    """A text, its loss, and the forward passes that finding it took."""

    ids: Tensor
    loss: float
    forwards: int


def substitute(
    comparison: Comparison, ids: Tensor, candidates: Tensor, known: Tensor, sweeps: int
) -> Tried:
    """Improve `ids` (n,) with `candidates` (k, n), wherever `known` (n,) is -1."""
    places = (known < 0).nonzero().flatten()
    each = max(2, min(len(candidates), _TEXTS // max(1, len(places))))
    loss, forwards = float(comparison.losses(ids[None])[0]), 1
    for _ in range(sweeps):
        if loss <= comparison.tolerance or len(places) == 0:
            break
        better = _sweep(comparison, ids, candidates[:each], places, loss)
        forwards += better.forwards
        enough = better.loss <= _WORTH * loss
        ids, loss = better.ids, better.loss
        if not enough:
            break
    return Tried(ids, loss, forwards)


def _sweep(
    comparison: Comparison, ids: Tensor, candidates: Tensor, places: Tensor, loss: float
) -> Tried:
    texts = ids.repeat(len(places), len(candidates), 1)
    rows = torch.arange(len(places), device=ids.device)
    texts[rows, :, places] = candidates[:, places].T
    losses = comparison.losses(texts.flatten(0, 1)).view(len(places), len(candidates))
    best = losses.min(1)
    order = best.values.argsort()
    order = order[best.values[order] < loss]
    spent = losses.numel()
    if len(order) == 0:
        return Tried(ids, loss, spent)
    prefixes = ids.repeat(len(order), 1)
    for number, place in enumerate(order.tolist()):
        prefixes[number:, places[place]] = candidates[best.indices[place], places[place]]
    joint = comparison.losses(prefixes)
    kept = int(joint.argmin())
    return Tried(prefixes[kept], float(joint[kept]), spent + len(order))
