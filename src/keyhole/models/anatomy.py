"""Where each family of models keeps its parts: blocks, projections, embeddings.

Layers are numbered as `output_hidden_states=True` numbers them: 0 is the embeddings, ℓ what block ℓ
gives, and the last one of a causal model has passed the final norm. A model that uses one block
many times (ALBERT) has that block many times in `blocks`.
"""

from __future__ import annotations

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
    def max_length(self) -> int:
        """How many tokens the model's positions allow."""
        config = cast("Any", self.base.config)
        most = int(config.max_position_embeddings)
        return most - 2 if self.family == "roberta" else most  # the first two are for padding

    def opening_norm(self, number: int) -> nn.Module | None:
        """What stands between the input of block `number` (from 1) and its attention."""
        name = _FAMILIES[self.family].opening_norm
        return self.blocks[number - 1].get_submodule(name) if name else None

    def closing_norm(self, layer: int) -> nn.Module | None:
        """The normalisation that hidden states of `layer` come straight out of, if there is one.

        Every block of these encoders ends in one; of the causal models only the whole does.
        """
        family = _FAMILIES[self.family]
        if self.causal:
            last = layer == self.layers and bool(family.final_norm)
            return self.base.get_submodule(family.final_norm) if last else None
        if layer == 0:  # ALBERT widens its embeddings after their norm
            wider = self.family == "albert"
            return None if wider else self.base.get_submodule("embeddings.LayerNorm")
        return self.blocks[layer - 1].get_submodule(family.closing_norm)


@dataclass(frozen=True)
class _Family:
    """The names of the parts: of blocks and tokens in the base model, of the others in a block."""

    blocks: str
    attention: str
    query: str
    key: str
    value: str
    output: str
    tokens: str = "embeddings.word_embeddings"
    causal: bool = False
    opening_norm: str = ""
    closing_norm: str = ""
    final_norm: str = ""  # in the base model


_BERT = _Family(
    "encoder.layer", "attention.self", "attention.self.query", "attention.self.key",
    "attention.self.value", "attention.output.dense", closing_norm="output.LayerNorm",
)  # fmt: skip
_LLAMA = _Family(
    "layers", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "embed_tokens", causal=True, opening_norm="input_layernorm",
    final_norm="norm",
)  # fmt: skip
_FAMILIES = {
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": _Family(
        "transformer.layer", "attention", "attention.q_lin", "attention.k_lin", "attention.v_lin",
        "attention.out_lin", closing_norm="output_layer_norm",
    ),
    "albert": _Family(
        "encoder.albert_layer_groups", "attention", "attention.query", "attention.key",
        "attention.value", "attention.dense", closing_norm="full_layer_layer_norm",
    ),
    "gpt2": _Family(
        "h", "attn", "attn.c_attn", "attn.c_attn", "attn.c_attn", "attn.c_proj", "wte",
        causal=True, opening_norm="ln_1", final_norm="ln_f",
    ),
    "llama": _LLAMA,
    "qwen3": _LLAMA,
}  # fmt: skip
_ALIASES = {**{name: name for name in _FAMILIES}, "xlm-roberta": "roberta"}


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a Hugging Face model, with or without a head on top."""
    config = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", type(model).__name__))
    if kind not in _ALIASES:
        raise InputError(f"{kind} is not a known family: {', '.join(sorted(_ALIASES))} are")
    base: Any = getattr(model, str(getattr(model, "base_model_prefix", "")), model)
    names, config = _FAMILIES[_ALIASES[kind]], base.config
    blocks = tuple(base.get_submodule(names.blocks))
    if kind == "albert":  # groups of layers, each used several times
        layers = int(config.num_hidden_layers)
        used = [blocks[number * len(blocks) // layers] for number in range(layers)]
        blocks = tuple(layer for group in used for layer in group.albert_layers)
    heads = int(config.num_attention_heads)
    return Anatomy(
        family=_ALIASES[kind],
        base=base,
        blocks=blocks,
        attentions=tuple(_attention(block, names) for block in blocks),
        tokens=base.get_submodule(names.tokens),
        first_norm=blocks[0].get_submodule(names.opening_norm) if names.opening_norm else None,
        heads=heads,
        key_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        causal=names.causal or bool(getattr(config, "is_decoder", False)),
        rotary=hasattr(base, "rotary_emb"),
    )


def _attention(block: nn.Module, names: _Family) -> Attention:
    paths = (names.attention, names.query, names.key, names.value, names.output)
    parts = [block.get_submodule(path) for path in paths]
    return Attention(*parts, fused=names.query == names.key)


# How many tokens of a text a model can take in: its positions, or what the caller allows.


def positions(model: Any) -> int | None:
    """The longest text that the model has positions for; None where it has no such limit."""
    try:
        return anatomy(model).max_length
    except (InputError, AttributeError, TypeError):  # a family whose parts are not known here
        most = getattr(model.config, "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else None


def fitting(model: Any, tokenizer: Any, max_length: int | None) -> int | None:
    """Where a text is cut off: at `max_length`, or where the positions end.

    Something of the text must be left between the tokens that frame it.
    """
    most = positions(model)
    allowed = max_length if most is None else min(most, most if max_length is None else max_length)
    frame = len(tokenizer("")["input_ids"])
    if allowed is not None and allowed <= frame:
        raise InputError(
            f"a text needs more than the {frame} tokens that frame it: {allowed} are allowed"
        )
    return allowed


# Rotary positions, put on keys and undone. RoFormer, arXiv 2104.09864: a cached key is `R_p k`,
# with `R_p` a rotation by the position `p` in each plane of two coordinates. So `k = R_pᵀ (R_p k)`.
# Models that stretch their context multiply the rotation by a factor, which is divided out as well.


def unrotate(parts: Anatomy, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys (b, heads, n, k) of a KV cache without their positions (b, n)."""
    if not parts.rotary:
        return keys
    cos, sin = _turns(parts, keys, positions)
    return _turned(keys, cos, -sin) / (cos.square() + sin.square())


def rotate(parts: Anatomy, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys (b, heads, n, k) as a KV cache holds them at positions (b, n)."""
    return _turned(keys, *_turns(parts, keys, positions)) if parts.rotary else keys


def _turns(parts: Anatomy, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cast("Any", parts.base).rotary_emb(keys.new_zeros(1), positions)
    return cos.unsqueeze(1), sin.unsqueeze(1)


def _turned(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = keys.chunk(2, -1)
    return keys * cos + torch.cat([-second, first], -1) * sin
