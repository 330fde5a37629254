"""What attention maps say in numbers: log-probabilities, how far each is to be trusted, and
how well a candidate token explains them.

A map is softmax over keys of `s_h(i, j) = q_h(x_i)·k_h(x_j) / √k`, so a row of log-probabilities is
the row of scores up to one constant. With some tokens known (the anchors), a candidate at position
j is measured as a key by every anchor's row (whose constant the anchors' own scores give), and as
a query over the anchors' columns (whose constant is their mean error). Both are linear in the
candidate's hidden state below the layer.

A probability known to ±σ has a logarithm known to ±σ/p: every number is weighed by that, so maps
rounded to a few decimals count where they still say something. Misfits are summed as
`log(1 + r²/σ²)` (Student's t, one degree of freedom): an anchor that is wrong, or a σ that is too
small, costs every candidate about the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.models.anatomy import Anatomy, Projection
from keyhole.recover.leaks import AttentionMaps

# What the model's own arithmetic leaves in a score, measured on float32 maps: a few 1e-6.
_ARITHMETIC = 1e-5
_RELATIVE = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
_STEPS = {"int8": 127.0, "int4": 7.0}  # of the largest number of a position
_SUBNORMAL = {"float16": 2.0**-25}
_MOST_DECIMALS = 6


@dataclass(frozen=True, eq=False)
class LogMaps:
    """Log-probabilities (h, n, n) and the weight of each, 1/σ²; 0 where nothing leaked."""

    values: Tensor
    weights: Tensor

    @classmethod
    def of(cls, leak: AttentionMaps, device: torch.device) -> LogMaps:
        """Read a leak: its stated or visible rounding says how far each number is to be trusted."""
        maps = leak.values.to(device)
        known = maps.isfinite()
        maps = torch.where(known, maps, 1.0)
        error = resolution(leak, maps)
        # Below its own error a probability says only that it is small.
        least = torch.maximum(maps, error).clamp(min=torch.finfo(maps.dtype).tiny)
        spread = (error / least).square() + _ARITHMETIC**2
        return cls(least.log(), torch.where(known, 1.0 / spread, 0.0))


def resolution(leak: AttentionMaps, maps: Tensor) -> Tensor:
    """The standard deviation of each probability's rounding and noise, as stated or as seen.

    Not the judge's (precision.py), where the least error is one for all: small probabilities of a
    float32 map are as exact, relatively, as large ones, and their logarithms are what is read.
    """
    kind = leak.precision or "float32"
    relative = maps * _RELATIVE.get(kind, _RELATIVE["float32"])
    absolute = torch.full_like(maps, (leak.noise or 0.0) + _SUBNORMAL.get(kind, 0.0))
    if kind in _STEPS:
        largest = maps.amax(dim=(0, 2), keepdim=True)
        absolute = absolute + largest / _STEPS[kind] / 12**0.5
    decimals = _decimals(leak.values)
    if decimals is not None:
        absolute = absolute + 10.0**-decimals / 12**0.5
    return relative + absolute


def _decimals(values: Tensor) -> int | None:
    """After how many decimals every number ends; None where they go on."""
    numbers = values[values.isfinite()].double()
    for decimals in range(1, _MOST_DECIMALS + 1):
        scaled = numbers * 10.0**decimals
        if bool(((scaled - scaled.round()).abs() <= 1e-6 * scaled.abs() + 1e-9).all()):
            return decimals
    return None


@dataclass(frozen=True, eq=False)
class Anchors:
    """Known tokens of one text: where they are, and what they ask of a candidate.

    `as_key` and `as_query` (d, h·a) are the directions in which a hidden state is measured, with
    their offsets; `scores` (h, a, a) what the anchors give each other.
    """

    places: Tensor
    as_key: Tensor
    as_query: Tensor
    key_offset: Tensor
    query_offset: Tensor
    scores: Tensor

    @classmethod
    def of(cls, parts: Anatomy, layer: int, states: Tensor, places: Sequence[int]) -> Anchors:
        """Anchors at `places`, from the hidden states (n, d) below block `layer`."""
        (query, key, _), size = parts.attention(layer).apart, parts.head_dim
        where = torch.tensor(list(places), device=states.device)
        scale = size**-0.5
        to_query, q_bias = _by_head(query, size, states)
        to_key, k_bias = _by_head(key, size, states)
        q = (torch.einsum("ad,hkd->ahk", states[where], to_query) + q_bias) * scale
        k = torch.einsum("ad,hkd->ahk", states[where], to_key) + k_bias
        return cls(
            places=where,
            as_key=torch.einsum("ahk,hkd->dha", q, to_key),
            as_query=torch.einsum("ahk,hkd->dha", k * scale, to_query),
            key_offset=torch.einsum("ahk,hk->ha", q, k_bias),
            query_offset=torch.einsum("ahk,hk->ha", k * scale, q_bias),
            scores=torch.einsum("ahk,bhk->hab", q, k),
        )

    def measure(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The scores (…, h, a) of hidden states (…, d): as keys of the anchors, as queries."""
        shape = (*states.shape[:-1], *self.key_offset.shape)
        as_key = (states @ self.as_key.flatten(1)).view(shape) + self.key_offset
        as_query = (states @ self.as_query.flatten(1)).view(shape) + self.query_offset
        return as_key, as_query


def _by_head(projection: Projection, size: int, states: Tensor) -> tuple[Tensor, Tensor]:
    """A projection's weights (h, k, d) and bias (h, k), in the arithmetic of the states."""
    weight, bias = projection.weight, projection.bias
    offset = torch.zeros_like(weight[:, 0]) if bias is None else bias
    by_head = weight.unflatten(0, (-1, size)), offset.unflatten(0, (-1, size))
    return by_head[0].to(states), by_head[1].to(states)


@dataclass(frozen=True, eq=False)
class Questions:
    """What one text's maps say about every position, given its anchors: expected scores, weights.

    Arrays are (n, h, a): position, head, anchor.
    """

    key_scores: Tensor
    key_weights: Tensor
    query_logs: Tensor
    query_weights: Tensor

    @classmethod
    def of(cls, maps: LogMaps, anchors: Anchors) -> Questions:
        at = anchors.places
        n = maps.values.shape[-1]
        # The constant of an anchor's row, from all anchors but the position that is asked about.
        logs, weights = maps.values[:, at], maps.weights[:, at]  # (h, a, n)
        known = weights[:, :, at]
        off = known * (anchors.scores - logs[:, :, at])
        leave = torch.ones(len(at), n, device=at.device)
        leave[torch.arange(len(at), device=at.device), at] = 0.0
        total = torch.einsum("hab,bj->haj", known, leave)
        constant = torch.einsum("hab,bj->haj", off, leave) / total.clamp(min=1e-30)
        spread = 1.0 / total.clamp(min=1e-30) + 1.0 / weights.clamp(min=1e-30)
        self_free = leave[None]  # an anchor does not measure itself
        return cls(
            key_scores=(logs + constant).permute(2, 0, 1),
            key_weights=(self_free / spread).permute(2, 0, 1),
            query_logs=maps.values[:, :, at].transpose(0, 1),
            query_weights=maps.weights[:, :, at].transpose(0, 1) * leave.T[:, None],
        )

    def misfit(self, as_key: Tensor, as_query: Tensor) -> Tensor:
        """How badly candidates (…, n, h, a) explain the maps at each position: (…, n)."""
        off = (as_key - self.key_scores).square() * self.key_weights
        wrong = as_query - self.query_logs
        total = self.query_weights.sum(-1, keepdim=True).clamp(min=1e-30)
        constant = (wrong * self.query_weights).sum(-1, keepdim=True) / total
        also = (wrong - constant).square() * self.query_weights
        return off.log1p().sum((-2, -1)) + also.log1p().sum((-2, -1))

    def numbers(self) -> Tensor:
        """How many numbers each position is measured by: (n,)."""
        asked = (self.key_weights > 0).sum((-2, -1)) + (self.query_weights > 0).sum((-2, -1))
        return asked.clamp(min=1)
