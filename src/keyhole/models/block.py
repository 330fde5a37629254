"""A block of a checkpoint, or its attention alone, as an oracle: states in, states out, in float64.

Answers do not come from the model itself: transformers computes the norms, the softmax
and the positions of a Llama in float32 whatever the dtype of the weights. Instead the
weights are put, in float64, into the formulas of oracle/sub_layer.py and
oracle/block.py. The result is compared with the model's own states, and a model that
computes anything else is refused.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.core.float64 import zeros
from keyhole.models.anatomy import Anatomy, Projection, anatomy, gain_and_bias
from keyhole.models.capture import Exposure, capture
from keyhole.oracle.block import ACTIVATIONS, Block
from keyhole.oracle.sub_layer import SubLayer, no_places

_AGREES = 1e-3  # how far float32 may be from float64, relative to the largest number
_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
}


def sub_layer(
    model: nn.Module,
    layer: int,
    *,
    residual: bool = False,
    every_token: bool = False,
) -> SubLayer:
    """Return the attention of block `layer`, counted from 0, with the norm in front of it if any.

    Without `residual` it is self-attention followed by the output projection.
    """
    parts = anatomy(model)
    if not 0 <= layer < parts.layers:
        raise InputError(f"the layer must be from 0 to {parts.layers - 1}, not {layer}")
    attention = parts.attention(layer + 1)
    query, key, value = attention.apart
    if parts.rotary and key.bias is not None:
        raise InputError(
            "rotary positions are read where keys have no bias, and these have one"
        )
    norm = parts.opening_norm(layer + 1)
    gain = torch.ones(parts.width) if norm is None else gain_and_bias(norm)[0]
    scale = 1 / math.sqrt(parts.head_dim)
    H = parts.heads
    G = parts.key_heads
    output = Projection(attention.output, None)
    O = _double(output.weight).mT.reshape(H, parts.head_dim, -1).contiguous()  # noqa: E741
    values = _bias_of_heads(value.bias, G, parts.head_dim).repeat_interleave(H // G, 0)
    b = torch.einsum("hk,hkm->m", values, O)
    made = SubLayer(
        Q=_weight_of_heads(query, H, gain) * scale,
        q=_bias_of_heads(query.bias, H, parts.head_dim) * scale,
        K=_weight_of_heads(key, G, gain),
        V=_weight_of_heads(value, G, gain),
        O=O,
        b=b if output.bias is None else b + _double(output.bias),
        frequencies=_frequencies(parts),
        places=_position_biases(parts),
        epsilon=None if norm is None else _epsilon(norm),
        residual=residual,
        every_token=every_token,
        causal=parts.causal,
    )
    plain = replace(made, residual=False, every_token=not len(made.places))
    behind = Exposure("attention", layer + 1)
    if _agrees(model, parts, layer, plain, behind, tokens=8):
        return made
    # A single token has the weight 1, whatever its score.
    if _agrees(model, parts, layer, plain, behind, tokens=1):
        raise InputError(
            f"the attention of {parts.family} adds a term to its scores that is not read here: "
            "only position biases are, if the model computes them from its states alone"
        )
    raise InputError(
        f"the attention of {parts.family} adds something that is not read here"
    )


def block(model: nn.Module, layer: int) -> Block:
    """Return block `layer`, counted from 0: attention, feed-forward layer, norms, residuals.

    It answers with the state of the last token.
    """
    parts = anatomy(model)
    attention = sub_layer(model, layer)
    norms = _norms(parts, layer)
    activation = _NAMES.get(str(getattr(parts.base.config, "hidden_act", "")))
    maps = _feed_forward_maps(parts, layer)
    if activation is None or len(maps) not in (2, 3):
        raise InputError(
            f"block {layer} of {parts.family} has no feed-forward layer of one of these: "
            f"{', '.join(ACTIVATIONS)}, with or without gates"
        )
    # Which of two maps is the gate does not follow from their shapes: both orders are
    # tried.
    pre_norm = parts.opening_norm(layer + 1) is not None
    for order in permutations(maps[:-1]):
        made = _assembled(attention, norms, [*order, maps[-1]], activation, pre_norm)
        if _agrees(model, parts, layer, made, Exposure("hidden", layer + 1), tokens=8):
            return replace(made, every_token=False)
    raise InputError(
        f"block {layer} of {parts.family} is more than attention, a feed-forward layer and two "
        "norms: it cannot be read"
    )


@torch.no_grad()
def _agrees(
    model: nn.Module,
    parts: Anatomy,
    layer: int,
    made: SubLayer | Block,
    behind: Exposure,
    tokens: int,
) -> bool:
    """Return whether `made` computes what the model does for this many tokens."""
    ids = torch.arange(1, min(tokens + 1, len(parts.table)), device=parts.device)[None]
    given, wanted = (
        _double(capture(model, exposure, ids=ids)["values"])
        for exposure in (Exposure("hidden", layer), behind)
    )
    wanted = wanted if made.every_token else wanted[:, -1]
    return float((made(given) - wanted).abs().max()) <= _AGREES * float(
        wanted.abs().max()
    )


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _weight_of_heads(
    projection: Projection,
    heads: int,
    gain: Tensor,
) -> Tensor:
    """Return the weight of each head, (heads, d, k), times the gain of the norm in front."""
    weight = _double(projection.weight) * _double(gain)
    return weight.unflatten(0, (heads, -1)).mT.contiguous()


def _bias_of_heads(
    bias: Tensor | None,
    heads: int,
    k: int,
) -> Tensor:
    if bias is None:
        return zeros(heads, k)
    return _double(bias).view(heads, k)


def _epsilon(norm: nn.Module) -> float:
    """Return the ε of a norm, whose attribute has one of two names."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def _frequencies(parts: Anatomy) -> Tensor:
    if not parts.rotary:
        return zeros(parts.key_heads, 0)
    settings = cast("Any", parts.base.config).rope_parameters
    kind = settings.get("rope_type")
    if kind != "default":
        raise InputError(
            f"rotary positions of the kind {kind} are not supported: default is"
        )
    planes = torch.arange(0, parts.head_dim, 2, dtype=torch.float64) / parts.head_dim
    turns = float(settings["rope_theta"]) ** -planes
    return turns.repeat(parts.key_heads, 1)


@torch.no_grad()
def _position_biases(parts: Anatomy) -> Tensor:
    """Return the position bias of each distance, up to the one from which it is constant."""
    compute = getattr(
        getattr(parts.base, "encoder", None), "compute_position_bias", None
    )
    if compute is None:
        return no_places()
    longest = int(cast("Any", parts.base.config).max_position_embeddings)
    states = parts.table.new_zeros(1, longest, parts.width)
    biases = _double(compute(states))[0, :, -1].flip(-1)
    changes = torch.nonzero((biases[:, 1:] != biases[:, :-1]).any(0))
    return biases[:, : int(changes.max()) + 2 if len(changes) else 1].contiguous()


def _norms(parts: Anatomy, layer: int) -> tuple[nn.Module, nn.Module]:
    """Return the block's two norms, in the order in which they are applied."""
    norms = [
        module
        for module in parts.blocks[layer].modules()
        if getattr(module, "weight", None) is not None
        and module.weight.shape == (parts.width,)
    ]
    if len(norms) != 2:
        raise InputError(
            f"block {layer} of {parts.family} has {len(norms)} norms: only blocks with two are read"
        )
    return norms[0], norms[1]


def _feed_forward_maps(parts: Anatomy, layer: int) -> list[nn.Linear]:
    """Return the linear maps of the feed-forward layer; the one back to the width comes last."""
    attention = parts.attention(layer + 1)
    inside = {*attention.module.modules(), attention.output}
    maps = [
        module
        for module in parts.blocks[layer].modules()
        if isinstance(module, nn.Linear) and module not in inside
    ]
    return sorted(maps, key=lambda each: each.out_features == parts.width)


def _assembled(
    attention: SubLayer,
    norms: tuple[nn.Module, nn.Module],
    maps: list[nn.Linear],
    activation: str,
    pre_norm: bool,
) -> Block:
    """Return the block; `maps` are A, the gates G if there are any, and C."""
    first, second = norms
    zero = zeros(attention.dim)

    def gain_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
        gain, shift = gain_and_bias(norm)
        return _double(gain), zero if shift is None else _double(shift)

    # The gain and bias of the norm in front of the feed-forward layer go into its maps.
    gain, shift = gain_and_shift(second if pre_norm else first)
    rows = [
        (_double(each.weight) * gain, _double(each.weight) @ shift + _bias(each))
        for each in maps[:-1]
    ]
    (A, a) = rows[0]
    (G, g) = rows[1] if len(rows) > 1 else (zero.new_zeros(0, len(zero)), zero[:0])
    c = zero + _bias(maps[-1])
    norm: dict[str, Any] = {"norm": "rms"}
    if not pre_norm:
        E, e = gain_and_shift(second)
        norm = {"norm": "behind", "D": gain, "E": E, "e": e}
        c = c + shift
    heads = {name: getattr(attention, name) for name in SubLayer.NAMES}
    return Block(
        **heads,
        A=A,
        a=a,
        G=G,
        g=g,
        C=_double(maps[-1].weight),
        c=c,
        activation=activation,
        **norm,
        epsilon=_epsilon(first),
        epsilon_behind=_epsilon(second),
        every_token=not len(attention.places),
        causal=attention.causal,
    )


def _bias(linear: nn.Linear) -> Tensor:
    bias = cast("Tensor | None", linear.bias)
    return zeros() if bias is None else _double(bias)
