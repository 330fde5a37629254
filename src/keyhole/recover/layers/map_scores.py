"""Log-probabilities of attention maps, their errors, and how well a candidate token explains them.

`LogMaps` takes the leaked maps, `Anchors` the known tokens, and `Questions.misfit`
returns how badly candidates at each position explain the maps. maps.py chooses tokens
by that.

A map is the softmax over keys of `s_h(i, j) = q_h(x_i)·k_h(x_j) / √k`. So a row of
log-probabilities is the row of scores up to a constant. Given some known tokens (the
anchors), a candidate at position j is measured in two ways. As a key, by every anchor's
row; the constant of a row follows from the anchors' own scores. As a query, over the
anchors' columns; the constant is their mean error. Both are linear in the candidate's
hidden state below the layer.

A probability p known to ±σ has a logarithm known to ±σ/p. Each number is weighted by
that, so maps rounded to a few decimals count where they are still informative. Misfits
are summed as `log(1 + r²/σ²)` (Student's t with one degree of freedom). So a wrong
anchor, or a σ that is too small, costs every candidate about the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core.tensors import row_numbers
from keyhole.models.anatomy import Anatomy, Projection
from keyhole.recover.leaks import AttentionMaps

_ARITHMETIC = 1e-5  # the error of a score by float32 arithmetic; measured: a few 1e-6
_RELATIVE = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
_LEVELS = {
    "int8": 127.0,
    "int4": 7.0,
}  # rounding steps in the largest number of a position
_SUBNORMAL = {"float16": 2.0**-25}
_MAX_DECIMALS = 6
_TINY = 1e-30  # keeps divisors positive


class LogMaps(NamedTuple):
    """Log-probabilities (h, n, n) and their weights 1/σ²; the weight is 0 if nothing leaked."""

    values: Tensor
    weights: Tensor

    @classmethod
    def of(cls, leak: AttentionMaps, device: torch.device) -> LogMaps:
        maps = leak.values.to(device)
        known = maps.isfinite()
        maps = torch.where(known, maps, 1.0)
        error = resolution(leak, maps)
        # A probability below its own error says only that it is small.
        least = torch.maximum(maps, error).clamp(min=torch.finfo(maps.dtype).tiny)
        variance = (error / least).square() + _ARITHMETIC**2
        return cls(least.log(), torch.where(known, 1.0 / variance, 0.0))


def resolution(leak: AttentionMaps, maps: Tensor) -> Tensor:
    """Return the error of each probability by rounding and noise, as stated or as inferred.

    The judge's precision (precision.py) has a single least error for all numbers. But
    small probabilities of a float32 map are as exact, relatively, as large ones, and
    their logarithms are what is read.
    """
    kind = leak.precision or "float32"
    error = maps * _RELATIVE.get(kind, _RELATIVE["float32"])
    error = error + (leak.noise or 0.0) + _SUBNORMAL.get(kind, 0.0)
    if kind in _LEVELS:
        largest = maps.amax(dim=(0, 2), keepdim=True)
        error = error + largest / _LEVELS[kind] / 12**0.5
    decimals = _decimals(leak.values)
    if decimals is not None:
        error = error + 10.0**-decimals / 12**0.5
    return error


def _decimals(values: Tensor) -> int | None:
    """Return the number of decimals that all numbers are rounded to; None if there is none."""
    numbers = values[values.isfinite()].double()
    for decimals in range(1, _MAX_DECIMALS + 1):
        scaled = numbers * 10.0**decimals
        if ((scaled - scaled.round()).abs() <= 1e-6 * scaled.abs() + 1e-9).all():
            return decimals
    return None


class Anchors(NamedTuple):
    """The known tokens of a text, and the linear measurements that they make of a candidate.

    `as_key` and `as_query` (d, h·a) are the directions in which a hidden state is
    measured, with their offsets. `scores` (h, a, a) are those between the anchors
    themselves.
    """

    places: Tensor
    as_key: Tensor
    as_query: Tensor
    key_offset: Tensor
    query_offset: Tensor
    scores: Tensor

    @classmethod
    def of(
        cls,
        parts: Anatomy,
        layer: int,
        states: Tensor,
        places: Tensor,
    ) -> Anchors:
        """Return the anchors at `places`, from the hidden states (n, d) below block `layer`."""
        query, key, _ = parts.attention(layer).apart
        size = parts.head_dim
        scale = size**-0.5
        to_query, q_bias = _by_head(query, size, states)
        to_key, k_bias = _by_head(key, size, states)
        known = states[places]
        q = (torch.einsum("ad,hkd->ahk", known, to_query) + q_bias) * scale
        k = torch.einsum("ad,hkd->ahk", known, to_key) + k_bias
        return cls(
            places=places,
            as_key=torch.einsum("ahk,hkd->dha", q, to_key),
            as_query=torch.einsum("ahk,hkd->dha", k * scale, to_query),
            key_offset=torch.einsum("ahk,hk->ha", q, k_bias),
            query_offset=torch.einsum("ahk,hk->ha", k * scale, q_bias),
            scores=torch.einsum("ahk,bhk->hab", q, k),
        )

    def measure(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (…, h, a) of hidden states (…, d) as keys and as queries."""
        shape = (*states.shape[:-1], *self.key_offset.shape)
        as_key = (states @ self.as_key.flatten(1)).view(shape) + self.key_offset
        as_query = (states @ self.as_query.flatten(1)).view(shape) + self.query_offset
        return as_key, as_query


def _by_head(
    projection: Projection,
    size: int,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a projection's weights (h, k, d) and bias (h, k), in the dtype of the states."""
    weight = projection.weight.to(states)
    bias = projection.bias
    offset = torch.zeros_like(weight[:, 0]) if bias is None else bias.to(states)
    return weight.unflatten(0, (-1, size)), offset.unflatten(0, (-1, size))


class Questions(NamedTuple):
    """The scores that a text's maps ask for at every position, and their weights.

    The arrays are (n, h, a): position, head, anchor. An anchor does not measure its own
    position.
    """

    key_scores: Tensor
    key_weights: Tensor
    query_logs: Tensor
    query_weights: Tensor

    @classmethod
    def of(cls, maps: LogMaps, anchors: Anchors) -> Questions:
        at = anchors.places
        # (h, a, n)
        logs = maps.values[:, at]
        weights = maps.weights[:, at]
        others = torch.ones_like(logs[0])
        others[row_numbers(at), at] = 0.0
        # The constant of an anchor's row, from all anchors but the position that is
        # measured.
        known = weights[:, :, at]
        off = known * (anchors.scores - logs[:, :, at])
        total = torch.einsum("hab,bj->haj", known, others).clamp(min=_TINY)
        constant = torch.einsum("hab,bj->haj", off, others) / total
        variance = 1.0 / total + 1.0 / weights.clamp(min=_TINY)
        return cls(
            key_scores=(logs + constant).permute(2, 0, 1),
            key_weights=(others[None] / variance).permute(2, 0, 1),
            query_logs=maps.values[:, :, at].transpose(0, 1),
            query_weights=maps.weights[:, :, at].transpose(0, 1) * others.T[:, None],
        )

    def misfit(self, as_key: Tensor, as_query: Tensor) -> Tensor:
        """Return how badly candidates (…, n, h, a) explain the maps at each position, (…, n)."""
        keys = (as_key - self.key_scores).square() * self.key_weights
        off = as_query - self.query_logs
        total = self.query_weights.sum(-1, keepdim=True).clamp(min=_TINY)
        constant = (off * self.query_weights).sum(-1, keepdim=True) / total
        queries = (off - constant).square() * self.query_weights
        return keys.log1p().sum((-2, -1)) + queries.log1p().sum((-2, -1))

    def numbers(self) -> Tensor:
        """Return how many numbers measure each position, (n,)."""
        both = torch.cat([self.key_weights, self.query_weights], -1)
        return (both > 0).sum((-2, -1)).clamp(min=1)
