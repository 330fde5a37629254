"""A checkpoint's whole block as an oracle: embeddings in, hidden states out, in float64.

Attention is that of sub_layer.py. The feed-forward layer is found by the shapes of its maps, and
everything is held against what the model itself gives.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.anatomy import Anatomy, anatomy, gain_and_bias
from keyhole.models.capture import Exposure, capture
from keyhole.models.sub_layer import double, epsilon_of, sub_layer
from keyhole.oracle.block import ACTIVATIONS, Block
from keyhole.oracle.sub_layer import SubLayer

_AGREES = 1e-3  # of the largest number: how far float32 may be from float64
_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "gelu_new": "gelu-tanh",
          "gelu_pytorch_tanh": "gelu-tanh"}  # fmt: skip


def block(model: nn.Module, layer: int, *, every_token: bool = False) -> Block:
    """Block `layer`, counted from 0: attention, feed-forward layer, norms, residuals."""
    parts = anatomy(model)
    attention = sub_layer(model, layer)
    first, second = _norms(parts, layer)
    before = parts.opening_norm(layer + 1) is not None
    activation = _NAMES.get(str(getattr(parts.base.config, "hidden_act", "")))
    maps = _maps(parts, layer)
    if activation is None or len(maps) not in (2, 3):
        raise InputError(
            f"block {layer} of {parts.family} has no feed-forward layer of one of these: "
            f"{', '.join(ACTIVATIONS)}, with or without gates"
        )
    for order in permutations(maps[:-1]):
        made = _made(attention, first, second, [*order, maps[-1]], activation, before)
        if _agrees(model, parts, layer, made):
            kept = {name: getattr(made, name) for name in Block.NAMES}
            return Block(**kept, activation=activation, norm=made.norm, epsilon=made.epsilon,
                         epsilon_behind=made.epsilon_behind, every_token=every_token,
                         causal=made.causal)  # fmt: skip
    raise InputError(
        f"block {layer} of {parts.family} is more than attention, a feed-forward layer and two "
        "norms: it cannot be read"
    )


def _norms(parts: Anatomy, layer: int) -> tuple[nn.Module, nn.Module]:
    """The two norms, in the order in which they stand."""
    norms = [
        module for module in parts.blocks[layer].modules()
        if getattr(module, "weight", None) is not None
        and cast("Tensor", module.weight).shape == (parts.width,)
    ]  # fmt: skip
    if len(norms) != 2:
        raise InputError(
            f"block {layer} of {parts.family} has {len(norms)} norms: only blocks with two are read"
        )
    return norms[0], norms[1]


def _maps(parts: Anatomy, layer: int) -> list[nn.Linear]:
    """The maps of the feed-forward layer; the one that leads back is the last."""
    inside = set(parts.attention(layer + 1).module.modules()) | {parts.attention(layer + 1).output}
    maps = [
        module for module in parts.blocks[layer].modules()
        if isinstance(module, nn.Linear) and module not in inside
    ]  # fmt: skip
    return sorted(maps, key=lambda each: each.out_features == parts.width)


def _made(
    attention: SubLayer, first: nn.Module, second: nn.Module, maps: list[nn.Linear],
    activation: str, before: bool,
) -> Block:  # fmt: skip
    inner, inner_shift = gain_and_bias(second if before else first)
    out, offset = gain_and_bias(second)
    zero = torch.zeros(attention.dim, dtype=torch.float64)
    inner, inner_shift = double(inner), zero if inner_shift is None else double(inner_shift)
    rows: list[tuple[Tensor, Tensor]] = []
    for each in maps[:-1]:
        weight = double(each.weight)
        bias = weight @ inner_shift
        rows.append((weight * inner, bias + _bias(each)))
    C, c = double(maps[-1].weight), zero + _bias(maps[-1])
    (A, a), (G, g) = rows[0], rows[1] if len(rows) > 1 else (zero.new_zeros(0, len(zero)), zero[:0])
    norm: dict[str, Any] = {"norm": "rms"}
    if not before:
        shifted = zero if offset is None else double(offset)
        norm = {"norm": "behind", "D": inner, "E": double(out), "e": shifted}
        c = c + inner_shift
    parts = {name: getattr(attention, name) for name in SubLayer.NAMES}
    return Block(**parts, A=A, a=a, G=G, g=g, C=C, c=c, activation=activation, **norm,
                 epsilon=epsilon_of(first), epsilon_behind=epsilon_of(second),
                 every_token=not len(attention.places), causal=attention.causal)  # fmt: skip


def _bias(linear: nn.Linear) -> Tensor:
    bias = cast("Tensor | None", linear.bias)
    return linear.weight.new_zeros(()).to("cpu", torch.float64) if bias is None else double(bias)


@torch.no_grad()
def _agrees(model: nn.Module, parts: Anatomy, layer: int, made: Block) -> bool:
    """Does it give for some tokens what the model itself does?"""
    ids = torch.arange(1, min(9, len(parts.table)), device=parts.device)[None]
    given, wanted = (
        double(capture(model, Exposure("hidden", number), ids=ids)["values"])
        for number in (layer, layer + 1)
    )
    off = made(given) - (wanted if made.every_token else wanted[:, -1])
    return float(off.abs().max()) <= _AGREES * float(wanted.abs().max())
