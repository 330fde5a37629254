"""A checkpoint's attention sub-layer as an oracle: embeddings in, its output out, in float64.

transformers computes the norms, the softmax and the positions of a Llama in float32 whatever the
weights are in. So the weights are taken, in float64, and folded as oracle/sub_layer.py says.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.oracle.sub_layer import SubLayer

_FAMILIES = ("bert", "roberta", "llama")


def sub_layer(
    model: nn.Module, layer: int, *, residual: bool = False, every_token: bool = False
) -> SubLayer:
    """The attention of block `layer`, counted from 0, with the norm in front where there is one.

    Without a residual it is the attention alone: self-attention and the output projection behind.
    """
    parts = anatomy(model)
    if parts.family not in _FAMILIES:
        raise InputError(f"{parts.family} is not supported: {', '.join(_FAMILIES)} are")
    if not 0 <= layer < parts.layers:
        raise InputError(f"the layer must be from 0 to {parts.layers - 1}, not {layer}")
    attention = parts.attentions[layer]
    if parts.rotary and _bias(attention.key) is not None:
        raise InputError("rotary positions are read where keys have no bias, and these have one")
    norm = cast("Any", parts.opening_norm(layer + 1))
    gain = torch.ones(parts.width) if norm is None else norm.weight
    scale = 1 / math.sqrt(parts.head_dim)
    H, G = parts.heads, parts.key_heads
    V, output = _split(attention.value, G, gain), _weight(attention.output)
    O = output.mT.reshape(H, parts.head_dim, -1).contiguous()  # noqa: E741
    queries = _rows(_bias(attention.query), H, parts.head_dim)
    values = _rows(_bias(attention.value), G, parts.head_dim).repeat_interleave(H // G, 0)
    outputs = _bias(attention.output)
    b = torch.einsum("hk,hkm->m", values, O)
    return SubLayer(
        Q=_split(attention.query, H, gain) * scale,
        q=queries * scale,
        K=_split(attention.key, G, gain),
        V=V,
        O=O,
        b=b if outputs is None else b + outputs,
        frequencies=_frequencies(parts),
        epsilon=None if norm is None else float(norm.variance_epsilon),
        residual=residual,
        every_token=every_token,
        causal=parts.causal,
    )


def _weight(linear: nn.Module) -> Tensor:
    return cast("Any", linear).weight.detach().to("cpu", torch.float64)


def _bias(linear: nn.Module) -> Tensor | None:
    bias = cast("Any", linear).bias
    return None if bias is None else bias.detach().to("cpu", torch.float64)


def _split(linear: nn.Module, heads: int, gain: Tensor) -> Tensor:
    """The weight of each head, (heads, d, k), behind a norm with that gain."""
    weight = _weight(linear) * gain.detach().to("cpu", torch.float64)
    return weight.unflatten(0, (heads, -1)).mT.contiguous()


def _rows(bias: Tensor | None, heads: int, k: int) -> Tensor:
    return torch.zeros(heads, k, dtype=torch.float64) if bias is None else bias.view(heads, k)


def _frequencies(parts: Anatomy) -> Tensor:
    if not parts.rotary:
        return torch.zeros(parts.key_heads, 0, dtype=torch.float64)
    config = cast("Any", parts.base.config)
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        raise InputError(f"rotary positions of the kind {kind} are not supported: default is")
    planes = torch.arange(0, parts.head_dim, 2, dtype=torch.float64) / parts.head_dim
    turns = float(config.rope_parameters["rope_theta"]) ** -planes
    return turns.repeat(parts.key_heads, 1)
