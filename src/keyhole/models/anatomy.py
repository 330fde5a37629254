"""Where each family of models keeps its parts: blocks, projections, embeddings.

Layers are numbered as `output_hidden_states=True` numbers them: 0 is the embeddings, ℓ what block ℓ
gives, and the last one of a causal model has passed the final norm. A model that uses one block
many times (ALBERT) has that block many times in `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError


@dataclass(frozen=True, eq=False)
class Attention:
    """One block's attention: the module that returns (output, maps), and its linear maps.

    `fused` says that `query`, `key` and `value` are one projection that gives all three.
    """

    module: nn.Module
    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    fused: bool = False


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A model's parts in the order in which a text goes through them."""

    family: str
    base: nn.Module
    blocks: tuple[nn.Module, ...]
    attentions: tuple[Attention, ...]
    tokens: nn.Embedding
    first_norm: nn.Module | None  # what stands between a block's input and its attention
    heads: int
    key_heads: int
    head_dim: int
    causal: bool
    rotary: bool

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def width(self) -> int:
        return int(cast("Any", self.base.config).hidden_size)

    @property
    def table(self) -> Tensor:
        """The token table, (vocabulary, embedding size)."""
        return self.tokens.weight.detach()

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    @property
    def longest(self) -> int:
        """How many tokens the model's positions allow."""
        config = cast("Any", self.base.config)
        most = int(config.max_position_embeddings)
        return most - 2 if self.family == "roberta" else most  # the first two are for padding

    def opening_norm(self, number: int) -> nn.Module | None:
        """What stands between the input of block `number` (from 1) and its attention."""
        if self.first_norm is None:
            return None
        return self.blocks[number - 1].get_submodule(_NORMS[self.family])

    def closing_norm(self, layer: int) -> nn.Module | None:
        """The normalisation that hidden states of `layer` come straight out of, if there is one.

        Every block of these encoders ends in one; of the causal models only the whole does.
        """
        if self.causal:
            name = _FINAL_NORMS.get(self.family)
            return None if name is None or layer != self.layers else self.base.get_submodule(name)
        if layer == 0:  # ALBERT widens its embeddings after their norm
            return (
                None if self.family == "albert" else self.base.get_submodule("embeddings.LayerNorm")
            )
        return self.blocks[layer - 1].get_submodule(_CLOSING_NORMS[self.family])


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a Hugging Face model, with or without a head on top."""
    config = getattr(model, "config", None)
    family = _ALIASES.get(str(getattr(config, "model_type", "")), "")
    if family not in _FAMILIES:
        kind = getattr(config, "model_type", type(model).__name__)
        raise InputError(f"expected a model among {', '.join(sorted(_ALIASES))}, got {kind}")
    base = getattr(model, str(getattr(model, "base_model_prefix", "")), model)
    return _FAMILIES[family](family, cast("Any", base))


def _bert(family: str, base: Any) -> Anatomy:
    blocks = tuple(base.encoder.layer)
    attentions = tuple(
        Attention(b.attention.self, b.attention.self.query, b.attention.self.key,
                  b.attention.self.value, b.attention.output.dense) for b in blocks
    )  # fmt: skip
    return _assemble(family, base, blocks, attentions, base.embeddings.word_embeddings)


def _distilbert(family: str, base: Any) -> Anatomy:
    blocks = tuple(base.transformer.layer)
    attentions = tuple(
        Attention(b.attention, b.attention.q_lin, b.attention.k_lin, b.attention.v_lin,
                  b.attention.out_lin) for b in blocks
    )  # fmt: skip
    return _assemble(family, base, blocks, attentions, base.embeddings.word_embeddings)


def _albert(family: str, base: Any) -> Anatomy:
    groups, layers = base.encoder.albert_layer_groups, int(base.config.num_hidden_layers)
    used = [groups[i * len(groups) // layers] for i in range(layers)]
    blocks = tuple(layer for group in used for layer in group.albert_layers)
    attentions = tuple(
        Attention(b.attention, b.attention.query, b.attention.key, b.attention.value,
                  b.attention.dense) for b in blocks
    )  # fmt: skip
    return _assemble(family, base, blocks, attentions, base.embeddings.word_embeddings)


def _gpt2(family: str, base: Any) -> Anatomy:
    blocks = tuple(base.h)
    attentions = tuple(
        Attention(b.attn, b.attn.c_attn, b.attn.c_attn, b.attn.c_attn, b.attn.c_proj, fused=True)
        for b in blocks
    )
    return _assemble(family, base, blocks, attentions, base.wte, causal=True)


def _llama(family: str, base: Any) -> Anatomy:
    blocks = tuple(base.layers)
    attentions = tuple(
        Attention(b.self_attn, b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj,
                  b.self_attn.o_proj) for b in blocks
    )  # fmt: skip
    return _assemble(family, base, blocks, attentions, base.embed_tokens, causal=True)


def _assemble(
    family: str,
    base: Any,
    blocks: tuple[nn.Module, ...],
    attentions: tuple[Attention, ...],
    tokens: nn.Embedding,
    causal: bool = False,
) -> Anatomy:
    config = base.config
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Anatomy(
        family=family,
        base=base,
        blocks=blocks,
        attentions=attentions,
        tokens=tokens,
        first_norm=None if not causal else getattr(blocks[0], _NORMS[family]),
        heads=heads,
        key_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        causal=causal or bool(getattr(config, "is_decoder", False)),
        rotary=hasattr(base, "rotary_emb"),
    )


_NORMS = {"gpt2": "ln_1", "llama": "input_layernorm", "qwen3": "input_layernorm"}
_FINAL_NORMS = {"gpt2": "ln_f", "llama": "norm", "qwen3": "norm"}
_CLOSING_NORMS = {
    "bert": "output.LayerNorm", "roberta": "output.LayerNorm",
    "distilbert": "output_layer_norm", "albert": "full_layer_layer_norm",
}  # fmt: skip
_FAMILIES: dict[str, Callable[[str, Any], Anatomy]] = {
    "bert": _bert,
    "roberta": _bert,
    "distilbert": _distilbert,
    "albert": _albert,
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen3": _llama,
}
_ALIASES = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "distilbert": "distilbert",
    "albert": "albert",
    "gpt2": "gpt2",
    "llama": "llama",
    "qwen3": "qwen3",
}


# How many tokens of a text a model can take in: its positions, or what the caller allows.


def positions(model: Any) -> int | None:
    """The longest text that the model has positions for; None where it has no such limit."""
    try:
        return anatomy(model).longest
    except (InputError, AttributeError, TypeError):  # a family whose parts are not known here
        most = getattr(model.config, "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else None


def fitting(model: Any, tokenizer: Any, longest: int | None) -> int | None:
    """Where a text is cut off: at `longest`, or where the positions end.

    Something of the text must be left beside the tokens that frame it.
    """
    most = positions(model)
    allowed = longest if most is None else min(most, most if longest is None else longest)
    frame = len(tokenizer("")["input_ids"])
    if allowed is not None and allowed <= frame:
        raise InputError(
            f"expected room for more than the {frame} tokens that frame a text, got {allowed}"
        )
    return allowed


# Rotary positions undone: the key that a token would have at position 0.
#
# `RoFormer`, arXiv 2104.09864: a cached key is `R_p k`, with `R_p` a rotation by the position `p`
# in each plane of two coordinates. So `k = R_pᵀ (R_p k)`. Models that stretch their context
# multiply the rotation by a factor, which is divided out as well.


def unrotate(parts: Anatomy, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys (b, heads, n, k) of a KV cache without their positions (b, n)."""
    if not parts.rotary:
        return keys
    rotary = cast("Any", parts.base).rotary_emb
    cos, sin = (part.unsqueeze(1) for part in rotary(keys.new_zeros(1), positions))
    half = keys.shape[-1] // 2
    turned = torch.cat([keys[..., half:], -keys[..., :half]], -1)
    return (keys * cos + turned * sin) / (cos.square() + sin.square())


def rotate(parts: Anatomy, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys (b, heads, n, k) as a KV cache holds them at positions (b, n)."""
    if not parts.rotary:
        return keys
    rotary = cast("Any", parts.base).rotary_emb
    cos, sin = (part.unsqueeze(1) for part in rotary(keys.new_zeros(1), positions))
    half = keys.shape[-1] // 2
    turned = torch.cat([-keys[..., half:], keys[..., :half]], -1)
    return keys * cos + turned * sin
