"""HackAttend's schedule as released: cut the top units of one head after the other, until a flip.

*Unveiling Vulnerability of Self-Attention* (arXiv 2402.16470), and its released code:

1. One backward pass ranks units, by `−gradient` in the code and by the gradient's magnitude in the
   paper's text.
2. Layers are ranked by how far the confidence falls without the layer, and the heads of a layer by
   how far it falls without the head.
3. Heads are attacked cumulatively, layer by layer. In each, the top `k = max(1, ⌊share·(n−1)²⌋)`
   units are cut before the softmax. The model is asked after each head, up to the first
   flip.

All positions may be cut, as query and as key, except the first token ([CLS]) and
padding.

Departures (released.py has none of them, for the models that the code supports):
- All masks are prefixes of one ordering, so they are asked in batches. The first flip is the same.
  `queries` counts the queries asked; `steps` counts the heads attacked at the flip,
  which is the number of queries of the paper's loop.
- To remove a layer, its probabilities are set to zero, as the code does for heads; the code masks
  all its keys instead. The confidence is that in the label, not in the predicted class.
- Exactly k units of each head are cut, by the gradient. [CLS] may always attend to [CLS].
- Random units are drawn from the real tokens. The code draws from all 128² positions, with
  replacement. A sentence of 25 tokens fills 4% of them, so its control mostly cuts
  padding.
- In multiple choice, the matrix of each choice loses ⌊share·(n−1)²⌋ of its own units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from keyhole.core.errors import expect_among
from keyhole.disrupt.budget import choose
from keyhole.disrupt.masked_queries import (
    MaskedQueries,
    Ordering,
    Proposal,
    Search,
    first_flip,
)
from keyhole.disrupt.units import NEVER

Order = Literal["importance", "random layer", "random head", "random"]
Scale = Literal["full", "half"]


@dataclass(frozen=True)
class Greedy:
    """`order` ranks layers and heads; with `scale` "half", half of both are attacked."""

    order: Order = "importance"
    scale: Scale = "full"
    name: str = field(default="greedy", init=False, repr=False)

    def __post_init__(self) -> None:
        expect_among("order", self.order, Order)
        expect_among("scale", self.scale, Scale)

    def __call__(self, search: Search) -> Proposal:
        queries = search.queries
        noise = search.noise
        units = queries.units
        everyone = torch.arange(queries.question.size, device=noise.device)
        a, g = queries.slopes(torch.zeros_like(units.free), everyone, search.loss)
        scores = search.scores(units, a, g, noise)
        heads = _head_order(self, queries, noise)
        chosen = choose(units, scores, units.free, search.limits)
        turn = heads[:, units.head_of]
        goes = torch.where(chosen < NEVER, turn, NEVER).to(torch.int32)
        return first_flip(queries, Ordering(goes), int(heads[heads < NEVER].max()) + 1)


def _head_order(schedule: Greedy, queries: MaskedQueries, noise: Tensor) -> Tensor:
    """The step at which each head (b, heads of all sites and sequences) is attacked, or NEVER."""
    places = queries.units.places
    size = queries.question.size
    layers = _layer_drops(schedule, queries, noise)
    heads = _head_drops(schedule, queries, noise)
    kept = len(places) if schedule.scale == "full" else math.ceil(len(places) / 2)
    position = _positions(layers)
    turns = torch.full((size, len(places), heads.shape[2]), NEVER, device=noise.device)
    for index, place in enumerate(places):
        if schedule.scale == "full":
            count = place.shape[1]
        else:
            count = math.ceil(place.shape[1] / 2)
        rank = _positions(heads[:, index, : place.shape[1]])
        turn = position[:, index : index + 1] * heads.shape[2] + rank
        out = (position[:, index : index + 1] >= kept) | (rank >= count)
        turns[:, index, : place.shape[1]] = turn.masked_fill(out, NEVER)
    # Close the gaps where layers have fewer heads than others, so that every step adds
    # a head.
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


def _layer_drops(schedule: Greedy, queries: MaskedQueries, noise: Tensor) -> Tensor:
    places = queries.units.places
    if schedule.order in ("random layer", "random"):
        return torch.stack([noise[:, place.start] for place in places], 1)
    sites = torch.arange(len(places), device=noise.device)
    return _drops(queries, sites, torch.full_like(sites, -1))


def _head_drops(schedule: Greedy, queries: MaskedQueries, noise: Tensor) -> Tensor:
    """The fall in confidence without each head: (b, sites, largest number of heads)."""
    places = queries.units.places
    most = max(place.shape[1] for place in places)
    if schedule.order in ("random head", "random"):
        return torch.stack(
            [noise[:, place.start + 1 : place.start + 1 + most] for place in places], 1
        )
    sites = torch.tensor([i for i, p in enumerate(places) for _ in range(p.shape[1])])
    heads = torch.tensor([head for place in places for head in range(place.shape[1])])
    drops = _drops(queries, sites.to(noise.device), heads.to(noise.device))
    table = torch.full((len(drops), len(places), most), -torch.inf, device=noise.device)
    table[:, sites, heads] = drops.to(table.dtype)
    return table


def _drops(queries: MaskedQueries, sites: Tensor, heads: Tensor) -> Tensor:
    """Minus the confidence in the labels without each of these heads, (b, len(sites))."""
    size = queries.question.size
    count = len(sites)
    indices = torch.arange(size, device=sites.device).repeat_interleave(count)
    logits = queries.silenced(indices, sites.repeat(size), heads.repeat(size))
    return -queries.question.part(indices).confidence(logits).view(size, count)
