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


def _head_order(
    schedule: Greedy,
    queries: MaskedQueries,
    noise: Tensor,
) -> Tensor:
    """The step at which each head (b, heads of all sites and sequences) is attacked, or NEVER."""
    places = queries.units.places
    counts = torch.tensor([place.shape[1] for place in places], device=noise.device)
    position = _positions(_layer_drops(schedule, queries, noise))[..., None]
    rank = _positions(_head_drops(schedule, queries, noise, counts))
    layers = len(places)
    if schedule.scale == "half":
        layers = math.ceil(layers / 2)
        counts = (counts + 1) // 2
    left_out = (position >= layers) | (rank >= counts[:, None])
    turns = (position * rank.shape[2] + rank).masked_fill(left_out, NEVER)
    # Close the gaps where layers have fewer heads than others, so that every step adds
    # a head.
    steps = _positions(-turns.flatten(1).double()).view_as(turns)
    steps = steps.masked_fill(left_out, NEVER)
    spread = [
        steps[:, index, : place.shape[1]].repeat(1, place.shape[0])
        for index, place in enumerate(places)
    ]
    return torch.cat(spread, 1)


def _positions(values: Tensor) -> Tensor:
    """The rank of each entry along the last axis, 0 for the largest."""
    return values.argsort(dim=-1, descending=True, stable=True).argsort(-1)


def _layer_drops(
    schedule: Greedy,
    queries: MaskedQueries,
    noise: Tensor,
) -> Tensor:
    places = queries.units.places
    if schedule.order in ("random layer", "random"):
        return torch.stack([noise[:, place.start] for place in places], 1)
    sites = torch.arange(len(places), device=noise.device)
    return _drops(queries, sites, torch.full_like(sites, -1))


def _head_drops(
    schedule: Greedy,
    queries: MaskedQueries,
    noise: Tensor,
    counts: Tensor,
) -> Tensor:
    """The fall in confidence without each head: (b, sites, largest number of heads)."""
    most = int(counts.max())
    present = torch.arange(most, device=noise.device) < counts[:, None]
    if schedule.order in ("random head", "random"):
        starts = [place.start + 1 for place in queries.units.places]
        drawn = torch.stack([noise[:, at : at + most] for at in starts], 1)
        return drawn.masked_fill(~present, -torch.inf)
    drops = _drops(queries, *present.nonzero(as_tuple=True)).to(noise)
    table = noise.new_full((len(drops), *present.shape), -torch.inf)
    table[:, present] = drops
    return table


def _drops(
    queries: MaskedQueries,
    sites: Tensor,
    heads: Tensor,
) -> Tensor:
    """Minus the confidence in the labels without each of these heads, (b, len(sites))."""
    size = queries.question.size
    count = len(sites)
    indices = torch.arange(size, device=sites.device).repeat_interleave(count)
    logits = queries.silenced(indices, sites.repeat(size), heads.repeat(size))
    return -queries.question.part(indices).confidence(logits).view(size, count)
