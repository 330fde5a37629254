"""The parts of a model as attacks use them; discovery.py finds them by running the model.

`anatomy(model)` takes any Hugging Face model and returns its blocks, attentions, token
table, norms and rotations. So no attack has to know what a family of models calls them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.core.machine import memory_of_a_pass
from keyhole.models.discovery import AttentionPaths, Structure, structure_of
from keyhole.models.pairs import is_pair

NO_LIMIT = sys.maxsize
# numbers that a pass holds at once for a token, relative to the model's width
_ACTIVATIONS = 40


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map: all of a module's output, or those `rows` of it, head after head."""

    module: nn.Module
    rows: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        """Map states (…, in) in their own precision."""
        bias = None if self.bias is None else self.bias.to(states)
        return nn.functional.linear(states, self.weight.to(states), bias)

    def of(self, output: Tensor) -> Tensor:
        """Return this projection's part (…, out) of the module's output."""
        return output if self.rows is None else output[..., self.rows.to(output.device)]

    @property
    def weight(self) -> Tensor:
        """(out, in)."""
        weight = cast("Tensor", self.module.weight).detach()
        if isinstance(self.module, nn.Linear):  # and not a Conv1D
            weight = weight.mT
        return self.of(weight).mT

    @property
    def bias(self) -> Tensor | None:
        bias = cast("Tensor | None", self.module.bias)
        return None if bias is None else self.of(bias.detach())


@dataclass(frozen=True, eq=False)
class Attention:
    """One block's attention: the module that returns (output, maps), and its linear maps.

    `projections` are those of queries, keys and values, or None where these are not one
    linear map each of the block's input.
    """

    module: nn.Module
    output: nn.Module
    projections: tuple[Projection, Projection, Projection] | None

    @property
    def apart(self) -> tuple[Projection, Projection, Projection]:
        """Those of queries, keys and values; InputError where there are none."""
        if self.projections is None:
            raise InputError(
                "queries, keys and values are not one linear map each in this model"
            )
        return self.projections


@dataclass(frozen=True, eq=False, kw_only=True)
class Anatomy(Structure):
    """The parts of a model in the order in which a text passes through them."""

    base: nn.Module
    blocks: tuple[nn.Module, ...]
    attentions: tuple[Attention | None, ...]
    tokens: nn.Embedding

    @property
    def table(self) -> Tensor:
        """The embeddings of all tokens, (vocabulary, embedding size), as the model uses them."""
        weight = self.tokens.weight.detach()
        if not self.scaled:
            return weight
        return self.tokens(torch.arange(len(weight), device=weight.device)).detach()

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    def at_once(
        self,
        seen: int,
        kept: float = 0.0,
        *,
        modest: bool = True,
    ) -> int:
        """Return how many tokens that attend to `seen` others fit into one pass by the free memory.

        `kept` is how many numbers are kept of each token until the end of the pass. A
        `modest` pass takes little memory compared with the weights.
        """
        weights = sum(each.numel() * each.itemsize for each in self.base.parameters())
        weights = weights if modest else NO_LIMIT
        numbers = kept + 4 * self.heads * seen + _ACTIVATIONS * self.width
        size = self.tokens.weight.dtype.itemsize
        return max(1, int(memory_of_a_pass(self.device, weights) / (size * numbers)))

    @property
    def positions(self) -> tuple[nn.Embedding, int] | None:
        """The table of positions and the number of the first one; None where there is no table."""
        if self.position_table is None:
            return None
        path, first = self.position_table
        return cast("nn.Embedding", self.base.get_submodule(path)), first

    @property
    def max_length(self) -> int:
        """How many tokens the model's positions allow; NO_LIMIT where they allow any number."""
        if self.positions is not None:
            return self.positions[0].num_embeddings - self.positions[1]
        configured = getattr(self.base.config, "max_position_embeddings", None)
        if isinstance(configured, int) and configured > 0:
            return configured
        return NO_LIMIT

    def opening_norm(self, number: int) -> nn.Module | None:
        """Return the norm between the input of block `number` (from 1) and its attention."""
        paths = self.attention_paths[number - 1] if self.attention_paths else None
        if paths is None or not paths.norm:
            return None
        return self.blocks[number - 1].get_submodule(paths.norm)

    def closing_norm(self, layer: int) -> nn.Module | None:
        """Return the norm whose output the hidden states of `layer` are, or None.

        Every block of most encoders ends in one; of most causal models only the whole
        does.
        """
        path = self.closing_paths[layer]
        return self.base.get_submodule(path) if path else None

    def unrotated(
        self,
        layer: int,
        keys: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Remove positions (b, n) from the keys (b, heads, n, k) of a cache's layer (from 0)."""
        rotation = self.rotations[layer]
        return keys if rotation is None else rotation.undo(self.base, keys, positions)

    def rotated(
        self,
        layer: int,
        keys: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Rotate keys (b, heads, n, k) to positions (b, n), as in a cache's layer (from 0)."""
        rotation = self.rotations[layer]
        return keys if rotation is None else rotation.turn(self.base, keys, positions)

    def attention(self, number: int) -> Attention:
        """Return the attention of block `number` (from 1)."""
        if reason := self.lacks("attention", number):
            raise InputError(reason)
        return cast("Attention", self.attentions[number - 1])

    def lacks(self, kind: str, number: int) -> str:
        """Return why block `number` shows no such thing; an empty text where it does."""
        block = f"block {number} of {self.family}"
        if kind == "kv" and self.causal:
            if number in self.cached:
                return ""
            return f"{block} puts no keys and values into a cache"
        if kind not in ("kv", "maps", "attention"):
            return ""
        attention = self.attentions[number - 1] if self.attentions else None
        if attention is None:
            return f"no attention was found in {block}"
        if kind == "kv" and attention.projections is None:
            return f"keys and values of {block} are not one linear map each"
        if kind == "maps" and number not in self.mapped:
            return f"{block} returns no maps"
        return ""


# What is known of parts of a model, so that it does not keep the model itself alive.
_KNOWN = weakref.WeakKeyDictionary[nn.Module, dict[str, Any]]()
_LOCK = threading.Lock()


def anatomy(model: Any) -> Anatomy:
    """Return the parts of a Hugging Face model, with or without a head; they are found once."""
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise InputError(
            f"{type(model).__name__} is not a model of the transformers library"
        )
    base = getattr(model, str(getattr(model, "base_model_prefix", "")), model)
    if is_pair(base):
        base = base.get_encoder()
    with _LOCK:
        if base not in _KNOWN:
            found = structure_of(base)
            blocks = tuple(map(base.get_submodule, found.block_paths))
            attentions = tuple(map(_attention, blocks, found.attention_paths))
            _KNOWN[base] = {**vars(found), "blocks": blocks, "attentions": attentions}
        return Anatomy(**_KNOWN[base], base=base, tokens=base.get_input_embeddings())


def _attention(block: nn.Module, paths: AttentionPaths | None) -> Attention | None:
    if paths is None:
        return None
    part = block.get_submodule
    projections: Any = None
    if paths.projections is not None:
        projections = tuple(
            Projection(part(name), rows) for name, _, rows in paths.projections
        )
    return Attention(part(paths.module), part(paths.output), projections)


# The maximum length of a text: the model's positions limit it, or the caller does


def positions(model: Any) -> int | None:
    """Return how many positions the model has; None where it has no such limit."""
    try:
        limit = anatomy(model).max_length
    except InputError:  # a model that does not read text alone
        limit = getattr(model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and 0 < limit < NO_LIMIT else None


def fitting(
    model: Any,
    tokenizer: Any,
    max_length: int | None,
) -> int | None:
    """Return the length at which a text is cut off: `max_length`, or where the positions end.

    It must leave tokens of the text between the special tokens that frame it.
    """
    limits = [each for each in (positions(model), max_length) if each is not None]
    frame = len(tokenizer("")["input_ids"])
    if limits and min(limits) <= frame:
        raise InputError(
            f"a text needs more than the {frame} tokens that frame it: {min(limits)} are allowed"
        )
    return min(limits, default=None)


# Norms: the gain and the bias are measured, N(z) = gain·z + bias for z of mean 0 and
# mean square 1.


def gain_and_bias(norm: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return a norm's gain and bias in float64; Gemma's norms multiply by 1 + weight."""
    own = cast("Tensor", norm.weight).detach()
    weight = own.double()
    z = torch.ones_like(weight)
    z[1::2] = -1
    with torch.no_grad():
        output = norm(z.to(own)).double()
    bias = getattr(norm, "bias", None)
    if bias is not None:
        bias = bias.detach().double()
        output = output - bias
    difference = z * output - weight
    if difference.norm() > (difference - 1).norm():
        weight = weight + 1
    return weight, bias


def expect_numbers(model: nn.Module, given: Iterable[Tensor]) -> None:
    """Raise InputError if a model gave NaN or infinity, which leak nothing and are no answer."""
    if all(each.isfinite().all() for each in given):
        return
    cause = "its numbers overflow"
    if name := not_finite(model):
        cause = f"its weights hold some, in {name}"
    raise InputError(f"the model gives NaN or infinity: {cause}")


def not_finite(model: nn.Module) -> str | None:
    """Return the name of the first weight that holds NaN or infinity."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            return name
    return None
