"""What a model consists of, as attacks use it; discovery.py finds it out by running the model."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.core.machine import memory_of_a_pass
from keyhole.models.discovery import Found, Seen, look
from keyhole.models.pairs import encoder_of, is_pair

NO_LIMIT = sys.maxsize
_ACTIVATIONS = 40  # numbers that a pass holds of a token at once, for each of the model's width


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map: all of what `module` gives, or those `rows` of it, head after head."""

    module: nn.Module
    rows: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        """Of states (…, in), in their own arithmetic."""
        bias = None if self.bias is None else self.bias.to(states)
        return nn.functional.linear(states, self.weight.to(states), bias)

    def of(self, given: Tensor) -> Tensor:
        """Its own part (…, out) of what the module gives."""
        return given if self.rows is None else given[..., self.rows.to(given.device)]

    @property
    def weight(self) -> Tensor:
        """(out, in)."""
        weight = cast("Tensor", self.module.weight).detach()
        outputs_last = weight.mT if isinstance(self.module, nn.Linear) else weight  # or a Conv1D
        return self.of(outputs_last).mT

    @property
    def bias(self) -> Tensor | None:
        bias = cast("Tensor | None", self.module.bias)
        return None if bias is None else self.of(bias.detach())


@dataclass(frozen=True, eq=False)
class Attention:
    """One block's attention: the module that returns (output, maps), and its linear maps.

    `projections` are those of queries, keys and values; None where these are no linear maps of the
    block's input, or not one each.
    """

    module: nn.Module
    output: nn.Module
    projections: tuple[Projection, Projection, Projection] | None

    @property
    def apart(self) -> tuple[Projection, Projection, Projection]:
        """Those of queries, keys and values."""
        if self.projections is None:
            raise InputError("queries, keys and values are not one linear map each in this model")
        return self.projections

    @property
    def query(self) -> Projection:
        return self.apart[0]

    @property
    def key(self) -> Projection:
        return self.apart[1]

    @property
    def value(self) -> Projection:
        return self.apart[2]


@dataclass(frozen=True, eq=False, kw_only=True)
class Anatomy(Found):
    """A model's parts in the order in which a text goes through them."""

    base: nn.Module
    blocks: tuple[nn.Module, ...]
    attentions: tuple[Attention | None, ...]
    tokens: nn.Embedding

    @property
    def table(self) -> Tensor:
        """The embeddings of all tokens, (vocabulary, embedding size), as the model takes them."""
        weight = self.tokens.weight.detach()
        if not self.scaled:
            return weight
        return self.tokens(torch.arange(len(weight), device=weight.device)).detach()

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    def at_once(self, seen: int, kept: float = 0.0, *, modest: bool = True) -> int:
        """How many tokens, each of which sees so many, fit into one pass by the free memory.

        `kept` are the numbers that stay of each until its end. `modest`: little, beside weights.
        """
        weights = sum(each.numel() * each.itemsize for each in self.base.parameters())
        weights = weights if modest else NO_LIMIT
        numbers = kept + 4 * self.heads * seen + _ACTIVATIONS * self.width
        size = self.tokens.weight.dtype.itemsize
        return max(1, int(memory_of_a_pass(self.device, weights) / (size * numbers)))

    @property
    def positions(self) -> tuple[nn.Embedding, int] | None:
        """The table of positions and the number of the first one; None where there is no table."""
        if self.places is None:
            return None
        return cast("nn.Embedding", self.base.get_submodule(self.places[0])), self.places[1]

    @property
    def max_length(self) -> int:
        """How many tokens the model's positions allow; NO_LIMIT where they allow any number."""
        if self.positions is not None:
            return self.positions[0].num_embeddings - self.positions[1]
        most = getattr(self.base.config, "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else NO_LIMIT

    @property
    def first_norm(self) -> nn.Module | None:
        return self.opening_norm(1)

    def opening_norm(self, number: int) -> nn.Module | None:
        """What stands between the input of block `number` (from 1) and its attention."""
        seen = self.seen[number - 1] if self.seen else None
        if seen is None or not seen.opening:
            return None
        return self.blocks[number - 1].get_submodule(seen.opening)

    def closing_norm(self, layer: int) -> nn.Module | None:
        """The normalisation that hidden states of `layer` come straight out of, if there is one.

        Every block of most encoders ends in one; of most causal models only the whole does.
        """
        return self.base.get_submodule(self.closing[layer]) if self.closing[layer] else None

    def unrotated(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys (b, heads, n, k) of a cache's layer (from 0) without their positions (b, n)."""
        rotation = self.rotations[layer]
        return keys if rotation is None else rotation.undo(self.base, keys, positions)

    def rotated(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys (b, heads, n, k) as a cache's layer (from 0) holds them at positions (b, n)."""
        rotation = self.rotations[layer]
        return keys if rotation is None else rotation.turn(self.base, keys, positions)

    def attention(self, number: int) -> Attention:
        """The attention of block `number` (from 1)."""
        seen = self.attentions[number - 1] if self.attentions else None
        if seen is None:
            raise InputError(self.lacks("attention", number))
        return seen

    def lacks(self, kind: str, number: int) -> str:
        """Why block `number` shows no such thing; nothing where it does."""
        block = f"block {number} of {self.family}"
        if kind == "kv" and self.causal:
            return "" if number in self.cached else f"{block} puts no keys and values into a cache"
        if kind not in ("kv", "maps", "attention"):
            return ""
        seen = self.attentions[number - 1] if self.attentions else None
        if seen is None:
            return f"no attention was seen in {block}"
        if kind == "kv" and seen.projections is None:
            return f"keys and values of {block} are not one linear map each"
        return f"{block} returns no maps" if kind == "maps" and number not in self.mapped else ""


_Known = tuple[Found, tuple[nn.Module, ...], tuple[Attention | None, ...]]
# Of parts of a model, not of the model itself: it may be forgotten.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a Hugging Face model, with or without a head on top; looked for once."""
    whole = cast("Any", model)
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise InputError(f"{type(model).__name__} is not a model of the transformers library")
    base = getattr(whole, str(getattr(whole, "base_model_prefix", "")), whole)
    if is_pair(base):
        base = cast("Any", encoder_of(base))
    with _LOCK:
        if base not in _KNOWN:
            found = look(base)
            made = tuple(base.get_submodule(name) for name in found.names)
            _KNOWN[base] = (found, made, tuple(map(_attention, made, found.seen)))
        found, blocks, attentions = _KNOWN[base]
    tokens = base.get_input_embeddings()
    return Anatomy(**vars(found), base=base, blocks=blocks, attentions=attentions, tokens=tokens)


def _attention(block: nn.Module, seen: Seen | None) -> Attention | None:
    if seen is None:
        return None
    part, projections = block.get_submodule, None
    if seen.projections is not None:
        query, key, value = (Projection(part(name), rows) for name, _, rows in seen.projections)
        projections = (query, key, value)
    return Attention(part(seen.module), part(seen.output), projections)


# How many tokens of a text a model can take in: its positions, or what the caller allows.


def positions(model: Any) -> int | None:
    """The longest text that the model has positions for; None where it has no such limit."""
    try:
        most = anatomy(model).max_length
    except InputError:  # a model that does not read text alone
        most = getattr(model.config, "max_position_embeddings", None)
    return most if isinstance(most, int) and 0 < most < NO_LIMIT else None


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


# Norms, found out by running them: N(z) = gain·z + bias for z of mean 0 and mean square 1.


def gain_and_bias(norm: nn.Module) -> tuple[Tensor, Tensor | None]:
    """What a norm multiplies by and adds, in float64: Gemma's multiply by 1 + weight."""
    weight = cast("Tensor", norm.weight).detach().double()
    bias = cast("Tensor | None", getattr(norm, "bias", None))
    bias = None if bias is None else bias.detach().double()
    z = torch.ones_like(weight)
    z[1::2] = -1
    with torch.no_grad():
        made = cast("Any", norm)(z.to(cast("Tensor", norm.weight))).double()
    seen = z * (made if bias is None else made - bias)
    plain = (seen - weight).norm() <= (seen - weight - 1).norm()
    return weight if plain else weight + 1, bias
