"""A checkpoint's attention sub-layer as an oracle: embeddings in, its output out, in float64.

Answers do not come from the model itself: transformers computes the norms, the softmax and the
positions of a Llama in float32 whatever the weights are in. Instead the weights are put, in
float64, into the formula of oracle/sub_layer.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.anatomy import Anatomy, Projection, anatomy, gain_and_bias
from keyhole.models.capture import Exposure, capture
from keyhole.oracle.sub_layer import SubLayer, no_places

_AGREES = 1e-3  # how far float32 may be from float64, relative to the largest number


def sub_layer(
    model: nn.Module, layer: int, *, residual: bool = False, every_token: bool = False
) -> SubLayer:
    """The attention of block `layer`, counted from 0, with the norm in front where there is one.

    Without a residual it is self-attention with the output projection behind. Its answers are
    compared with the model's own; a model whose attention adds anything else is refused.
    """
    parts = anatomy(model)
    if not 0 <= layer < parts.layers:
        raise InputError(f"the layer must be from 0 to {parts.layers - 1}, not {layer}")
    attention = parts.attention(layer + 1)
    query, key, value = attention.apart
    if parts.rotary and key.bias is not None:
        raise InputError("rotary positions are read where keys have no bias, and these have one")
    norm = parts.opening_norm(layer + 1)
    gain = torch.ones(parts.width) if norm is None else gain_and_bias(norm)[0]
    scale = 1 / math.sqrt(parts.head_dim)
    H, G = parts.heads, parts.key_heads
    V, output = _split(value, G, gain), Projection(attention.output, None)
    O = double(output.weight).mT.reshape(H, parts.head_dim, -1).contiguous()  # noqa: E741
    queries = _rows(query.bias, H, parts.head_dim)
    values = _rows(value.bias, G, parts.head_dim).repeat_interleave(H // G, 0)
    b = torch.einsum("hk,hkm->m", values, O)
    made = SubLayer(
        Q=_split(query, H, gain) * scale,
        q=queries * scale,
        K=_split(key, G, gain),
        V=V,
        O=O,
        b=b if output.bias is None else b + double(output.bias),
        frequencies=_frequencies(parts),
        places=_places(parts),
        epsilon=None if norm is None else epsilon_of(norm),
        residual=residual,
        every_token=every_token,
        causal=parts.causal,
    )
    plain = replace(made, residual=False, every_token=not len(made.places))
    if _agrees(model, parts, layer, plain, 8):
        return made
    if _agrees(model, parts, layer, plain, 1):  # one token's weight is 1, whatever its score
        raise InputError(
            f"the attention of {parts.family} adds a term to its scores that is not read here: "
            "only position biases are, if the model computes them from its states alone"
        )
    raise InputError(f"the attention of {parts.family} adds something that is not read here")


@torch.no_grad()
def _agrees(model: nn.Module, parts: Anatomy, layer: int, made: SubLayer, tokens: int) -> bool:
    """Does it give the model's own answer for so many tokens?"""
    ids = torch.arange(1, min(tokens + 1, len(parts.table)), device=parts.device)[None]
    given = capture(model, Exposure("hidden", layer), ids=ids)["values"]
    wanted = double(capture(model, Exposure("attention", layer + 1), ids=ids)["values"])
    wanted = wanted if made.every_token else wanted[:, -1]
    off = made(double(given)) - wanted
    return float(off.abs().max()) <= _AGREES * float(wanted.abs().max())


def double(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _split(projection: Projection, heads: int, gain: Tensor) -> Tensor:
    """The weight of each head, (heads, d, k), times the gain of the norm in front."""
    weight = double(projection.weight) * double(gain)
    return weight.unflatten(0, (heads, -1)).mT.contiguous()


def _rows(bias: Tensor | None, heads: int, k: int) -> Tensor:
    if bias is None:
        return torch.zeros(heads, k, dtype=torch.float64)
    return double(bias).view(heads, k)


def epsilon_of(norm: nn.Module) -> float:
    """The ε of a norm, which has one of two names."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def _frequencies(parts: Anatomy) -> Tensor:
    if not parts.rotary:
        return torch.zeros(parts.key_heads, 0, dtype=torch.float64)
    settings = cast("Any", parts.base.config).rope_parameters
    kind = settings.get("rope_type")
    if kind != "default":
        raise InputError(f"rotary positions of the kind {kind} are not supported: default is")
    planes = torch.arange(0, parts.head_dim, 2, dtype=torch.float64) / parts.head_dim
    turns = float(settings["rope_theta"]) ** -planes
    return turns.repeat(parts.key_heads, 1)


@torch.no_grad()
def _places(parts: Anatomy) -> Tensor:
    """The position bias for each distance before a token, up to where it no longer changes."""
    compute = getattr(getattr(parts.base, "encoder", None), "compute_position_bias", None)
    if compute is None:
        return no_places()
    longest = int(cast("Any", parts.base.config).max_position_embeddings)
    states = parts.table.new_zeros(1, longest, parts.width)
    biases = double(compute(states))[0, :, -1].flip(-1)
    changes = torch.nonzero((biases[:, 1:] != biases[:, :-1]).any(0))
    return biases[:, : int(changes.max()) + 2 if len(changes) else 1].contiguous()
