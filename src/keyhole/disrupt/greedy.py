"""HackAttend as released: heads join one by one, each with its top units, until the answer flips.

*Unveiling Vulnerability of Self-Attention* (arXiv 2402.16470), Algorithm 1; ALGORITHMS.md IV.1.
One backward pass ranks units. Layers are ranked by how far the confidence falls without the layer,
heads inside a layer likewise, one at a time. Then heads are added cumulatively, layer by layer, the
top `k` units of each cut, and the model is asked after each; the first flip ends it.

Departures:
- The queries are the prefixes of one ordering, so they are asked in batches; the first flip is the
  same. `queries` counts what was asked, `steps` the heads that had joined at the flip, which is
  the number of queries of the paper's loop.
- A layer or a head is taken out by gating its probabilities to zero. Cutting all its units before
  the softmax would leave uniform attention, padding included.
- A head's k units are counted exactly, padding is never opened, special tokens are spared.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from keyhole.disrupt.budget import Budget, choose
from keyhole.disrupt.masked_queries import NEVER, Asker, Ordering
from keyhole.disrupt.prefix_search import Found, first_flip
from keyhole.disrupt.rankings import score


class Settings(Protocol):
    """What this schedule reads of the method's hyperparameters."""

    @property
    def ranking(self) -> Any: ...
    @property
    def order(self) -> Any: ...
    @property
    def scale(self) -> Any: ...
    @property
    def loss(self) -> Any: ...
    @property
    def one_at_a_time(self) -> bool: ...


def greedy(settings: Settings, asker: Asker, limits: Budget, noise: Tensor) -> Found:
    """Attack every example of the asker; random choices are made of `noise` (b, units)."""
    units = asker.units
    everyone = torch.arange(asker.question.size, device=noise.device)
    empty = torch.zeros_like(units.free)
    a, g, _ = asker.slopes(empty, everyone, settings.loss)
    scores = units.each(partial(score, settings.ranking), a, g, noise)
    heads = _head_order(settings, asker, noise)
    chosen = choose(units, scores, units.free, limits)
    turn = heads[:, units.head_of]
    goes = torch.where((chosen < NEVER) & (turn < NEVER), turn, NEVER).to(torch.int32)
    return first_flip(asker, Ordering(goes), int(heads[heads < NEVER].max()) + 1, settings)


def _head_order(settings: Settings, asker: Asker, noise: Tensor) -> Tensor:
    """When each head (b, heads of all sites and sequences) joins; NEVER for those left out."""
    places = asker.units.places
    size = asker.question.size
    layers = _layer_drops(settings, asker, noise)
    heads = _head_drops(settings, asker, noise)
    kept = len(places) if settings.scale == "full" else math.ceil(len(places) / 2)
    position = _positions(layers)
    turns = torch.full((size, len(places), heads.shape[2]), NEVER, device=noise.device)
    for index, place in enumerate(places):
        count = place.shape[1] if settings.scale == "full" else math.ceil(place.shape[1] / 2)
        rank = _positions(heads[:, index, : place.shape[1]])
        turn = position[:, index : index + 1] * heads.shape[2] + rank
        out = (position[:, index : index + 1] >= kept) | (rank >= count)
        turns[:, index, : place.shape[1]] = turn.masked_fill(out, NEVER)
    # Layers may differ in heads: close the gaps, so that every step adds one.
    flat = turns.flatten(1)
    dense = _positions(-flat.double()).masked_fill(flat == NEVER, NEVER).view_as(turns)
    spread = [
        dense[:, index, : place.shape[1]].repeat(1, place.shape[0])
        for index, place in enumerate(places)
    ]
    return torch.cat(spread, 1)


def _positions(values: Tensor) -> Tensor:
    """The rank of each entry along the last axis, 0 for the largest."""
    return values.argsort(dim=-1, descending=True, stable=True).argsort(-1)


def _layer_drops(settings: Settings, asker: Asker, noise: Tensor) -> Tensor:
    places = asker.units.places
    if settings.order in ("random layer", "random"):
        return torch.stack([noise[:, place.start] for place in places], 1)
    sites = torch.arange(len(places), device=noise.device)
    return _drops(asker, sites, torch.full_like(sites, -1))


def _head_drops(settings: Settings, asker: Asker, noise: Tensor) -> Tensor:
    """How far the confidence falls without each head: (b, sites, most heads)."""
    places = asker.units.places
    most = max(place.shape[1] for place in places)
    if settings.order in ("random head", "random"):
        return torch.stack(
            [noise[:, place.start + 1 : place.start + 1 + most] for place in places], 1
        )
    sites = torch.tensor([i for i, p in enumerate(places) for _ in range(p.shape[1])])
    heads = torch.tensor([head for place in places for head in range(place.shape[1])])
    found = _drops(asker, sites.to(noise.device), heads.to(noise.device))
    table = torch.full((len(found), len(places), most), -torch.inf, device=noise.device)
    table[:, sites, heads] = found.to(table.dtype)
    return table


def _drops(asker: Asker, sites: Tensor, heads: Tensor) -> Tensor:
    """Minus the confidence in the labels when these heads are silent, (b, len(sites))."""
    size, count = asker.question.size, len(sites)
    which = torch.arange(size, device=sites.device).repeat_interleave(count)
    logits = asker.silenced(which, sites.repeat(size), heads.repeat(size))
    return -asker.question.part(which).confidence(logits).view(size, count)
