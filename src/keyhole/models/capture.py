"""What a model exposes at one layer, read by hooks that always come off.

`capture(model, exposure, …)` runs the model on token ids or on embeddings, stops it as soon as the
exposure has been computed (the layers above never run), and returns the tensors under the names
that the leak types use. Gradients flow from them to `embeddings`, so recovery uses the same code as
the leak: what is compared is computed in one way.

Layers are counted as `output_hidden_states=True` does: hidden states of layer 0 are the embeddings,
those of layer ℓ what block ℓ gives; maps, keys and attention outputs of layer ℓ are made inside
block ℓ = 1 … L. The exception is the KV cache of a causal model, which counts from 0 as the cache
itself does; an encoder has no cache, and its keys and values count from 1 like its maps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, expect_among
from keyhole.models.anatomy import Anatomy, Projection, anatomy
from keyhole.models.discovery import cache_among, maps_among, state_among
from keyhole.models.hooks import Wanted, eager, hooks, unhooked
from keyhole.models.loading import STORED
from keyhole.models.next_token import last_state, unembedding

KINDS = ("hidden", "kv", "maps", "attention", "pooled", "logits")
POOLINGS = ("mean", "cls", "last", "max", "pooler")


@dataclass(frozen=True)
class Exposure:
    """One thing a model may give away: `hidden:3`, `kv:0`, `maps:1`, `pooled`, `logits`.

    `pooling` and `normalised` say how a pooled embedding was made: the mean of all states, their
    maximum in each number, the first (`cls`), the last, or what a pooler makes of the first.
    `width` and `unit` say what is left of each row of hidden states: its first `width` numbers, and
    (after that) only its direction, as a row of length one. `log_probabilities` says that logits
    were turned into log p.
    """

    kind: str
    layer: int = 0
    pooling: str = "mean"
    normalised: bool = True
    width: int | None = None
    unit: bool = False
    log_probabilities: bool = False

    def __post_init__(self) -> None:
        expect_among("an exposure", self.kind, KINDS)
        expect_among("pooling", self.pooling, POOLINGS)

    @classmethod
    def parse(cls, text: str) -> Exposure:
        """Read `hidden:3` and the like."""
        kind, colon, number = text.partition(":")
        whole = kind in ("pooled", "logits")
        if whole and not colon:
            return cls(kind)
        if whole or not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise InputError(f"{text} is not an exposure such as hidden:3, pooled or logits")
        return cls(kind, int(number))

    def __str__(self) -> str:
        if self.kind in ("pooled", "logits"):
            return self.kind
        return f"{self.kind}:{self.layer}"

    def block(self, parts: Anatomy) -> int:
        """The number (from 1) of the block that makes it; 0 for the embeddings."""
        first = 0 if self.kind == "hidden" or (self.kind == "kv" and parts.causal) else 1
        if self.kind == "logits" and not parts.causal:
            raise InputError(f"{self} needs a causal model, and {parts.family} is none")
        if self.kind in ("pooled", "logits"):
            return parts.layers
        last = parts.layers - (self.kind == "kv" and parts.causal)
        if not first <= self.layer <= last:
            raise InputError(f"the layer of {self} must be from {first} to {last}")
        number = self.layer + (self.kind == "kv" and parts.causal)
        if reason := parts.lacks(self.kind, number):
            raise InputError(f"{self} cannot be had: {reason}")
        return number


class _Stop(Exception):
    """Raised by a hook once everything wanted has been seen; caught by `capture`."""


def capture(
    model: nn.Module,
    exposure: Exposure,
    *,
    ids: Tensor | None = None,
    embeddings: Tensor | None = None,
    mask: Tensor | None = None,
    **inputs: Any,
) -> dict[str, Tensor]:
    """The exposure's tensors, batch first, for `ids` (b, n) or word `embeddings` (b, n, e).

    Names: `values` for hidden states (b, n, d), maps (b, h, n, n), attention outputs (b, n, d) and
    pooled embeddings (b, d), logits (b, 1, v); `keys` and `values` (b, h, n, k) as they stand
    in a KV cache. `mask` (b, n) is 1 on text, 0 on padding. `inputs` go to the model:
    `position_ids`, `past_key_values`, `token_type_ids`. A model of float16 or bfloat16 computes in
    its own arithmetic; embeddings may be float32, and what it exposes is given as float32.
    """
    parts = anatomy(model)
    tensors: dict[str, Tensor] = {}
    wanted = _hooks(parts, exposure, tensors)
    if embeddings is not None:
        embeddings = embeddings.to(parts.tokens.weight.dtype)
    given = {"input_ids": ids} if embeddings is None else {"inputs_embeds": embeddings}
    if embeddings is not None and not parts.embeds:  # in place of what its own table gives
        stand_in = torch.full(embeddings.shape[:2], parts.ordinary, device=embeddings.device)
        given = {"input_ids": stand_in}
        wanted.append((parts.tokens.register_forward_hook, lambda *_: embeddings))
    if exposure.kind == "kv" and parts.causal and inputs.get("past_key_values") is None:
        inputs["use_cache"] = True
    if exposure.kind == "maps":
        inputs["output_attentions"] = True
    if exposure.kind == "hidden" and not _stops(parts, exposure.layer):
        inputs["output_hidden_states"] = True
    asked = "output_attentions" in inputs or "output_hidden_states" in inputs
    with (
        hooks(*wanted),
        eager(parts.base) if exposure.kind == "maps" else nullcontext(),
        unhooked(parts.base) if asked else nullcontext(),
        suppress(_Stop),
    ):
        parts.base(**given, attention_mask=mask, return_dict=True, **inputs)
    if exposure.kind == "pooled" and exposure.pooling != "pooler":
        tensors["values"] = pool(exposure, tensors.pop("states"), mask)
    if exposure.kind == "logits":
        logits = unembedding(model)(last_state(tensors.pop("states"), mask)[:, None])
        tensors["values"] = logits.log_softmax(-1) if exposure.log_probabilities else logits
    if exposure.width is not None:
        tensors["values"] = tensors["values"][..., : exposure.width]
    if exposure.unit:
        tensors["values"] = nn.functional.normalize(tensors["values"], dim=-1)
    return {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        for name, tensor in tensors.items()
    }


def _hooks(parts: Anatomy, exposure: Exposure, tensors: dict[str, Tensor]) -> list[Wanted]:
    """What to register so that `tensors` fills up and the forward pass ends there."""
    number = exposure.block(parts)
    if exposure.kind == "hidden":
        return _hidden(parts, number, tensors)
    if exposure.kind in ("pooled", "logits"):
        return _returned(parts, exposure, tensors)
    # One block may serve several layers: its number is how often blocks have been entered.
    entered = [0]

    def enter(*_: Any) -> None:
        entered[0] += 1

    counting: list[Wanted] = [
        (block.register_forward_pre_hook, enter) for block in dict.fromkeys(parts.blocks)
    ]

    def take(read: Callable[[Any], Tensor]) -> Callable[..., None]:
        def hook(_m: nn.Module, _i: Any, output: Any) -> None:
            if entered[0] == number:
                tensors["values"] = read(output)
                raise _Stop

        return hook

    if exposure.kind == "attention":
        output = parts.attention(number).output
        return [*counting, (output.register_forward_hook, take(lambda output: output))]
    if exposure.kind == "maps":
        module = parts.attention(number).module
        maps = take(lambda output: cast("Tensor", maps_among(output)))
        return [*counting, (module.register_forward_hook, maps)]
    return [*counting, *_key_values(parts, number, tensors, entered)]


def _stops(parts: Anatomy, layer: int) -> bool:
    """Are these states the input of a block, or what the model returns in the end?"""
    return bool(parts.blocks) and (layer < parts.layers or parts.tied)


def _returned(parts: Anatomy, exposure: Exposure, tensors: dict[str, Tensor]) -> list[Wanted]:
    """What the base model returns: the last states, or what its pooler makes of them."""

    def take(_m: nn.Module, _i: Any, output: Any) -> None:
        if exposure.pooling != "pooler":
            tensors["states"] = output.last_hidden_state
        elif getattr(output, "pooler_output", None) is None:
            name = type(parts.base).__name__
            raise InputError(f"{name} has no pooler: choose another pooling")
        else:
            tensors["values"] = output.pooler_output

    return [(parts.base.register_forward_hook, take)]


def _hidden(parts: Anatomy, number: int, tensors: dict[str, Tensor]) -> list[Wanted]:
    """Hidden states: the input of block ℓ+1, or what the base model returns after the last."""
    if number == parts.layers or not _stops(parts, number):

        def take_last(_m: nn.Module, _i: Any, output: Any) -> None:
            states = output.hidden_states
            tensors["values"] = output.last_hidden_state if states is None else states[number]

        return [(parts.base.register_forward_hook, take_last)]
    entered = [0]

    def take(_m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if entered[0] == number:
            tensors["values"] = cast("Tensor", state_among(args, kwargs))
            raise _Stop
        entered[0] += 1

    return [
        (partial(block.register_forward_pre_hook, with_kwargs=True), take)
        for block in dict.fromkeys(parts.blocks)
    ]


def _key_values(
    parts: Anatomy, number: int, tensors: dict[str, Tensor], entered: list[int]
) -> list[Wanted]:
    """Keys and values: from the cache of a causal model, from the projections of an encoder."""

    if parts.causal:
        block, seen = parts.blocks[number - 1], parts.attentions[number - 1]

        def take_cache(_m: nn.Module, args: Any, kwargs: dict[str, Any], _o: Any) -> None:
            cache = cache_among(args, kwargs) if entered[0] == number else None
            if cache is not None and cache.layers[number - 1].keys is not None:
                layer = cache.layers[number - 1]
                tensors["keys"], tensors["values"] = layer.keys, layer.values
                raise _Stop

        modules = (block,) if seen is None else (seen.module, block)
        return [(partial(each.register_forward_hook, with_kwargs=True), take_cache)
                for each in modules]  # fmt: skip

    def take(name: str, projection: Projection) -> Callable[..., None]:
        def hook(_m: nn.Module, _i: Any, output: Tensor) -> None:
            if entered[0] == number:
                heads = projection.of(output).unflatten(-1, (parts.key_heads, parts.head_dim))
                tensors[name] = heads.transpose(1, 2)
                if len(tensors) == 2:
                    raise _Stop

        return hook

    _, key, value = parts.attention(number).apart
    return [
        (key.module.register_forward_hook, take("keys", key)),
        (value.module.register_forward_hook, take("values", value)),
    ]


def pool(exposure: Exposure, states: Tensor, mask: Tensor | None) -> Tensor:
    """One vector for a text, as sentence-transformers makes it."""
    weights = torch.ones_like(states[..., 0]) if mask is None else mask.to(states)
    if exposure.pooling == "last":
        pooled = last_state(states, mask)
    elif exposure.pooling == "cls":
        pooled = states[:, 0]
    elif exposure.pooling == "max":
        pooled = states.masked_fill(weights.unsqueeze(-1) == 0, -torch.inf).amax(1)
    else:
        total = weights.sum(1, keepdim=True).clamp(min=1)
        pooled = (states * weights.unsqueeze(-1)).sum(1) / total
    if exposure.normalised:
        pooled = nn.functional.normalize(pooled, dim=-1)
    return pooled


# Arithmetic that is coarser than float32: how far it moves what a model exposes.
#
# Servers of quantised weights round what goes into a matrix as well: llama.cpp (ggml) takes blocks
# of 32 numbers x, stores d = max |x| / 127 in float16 and x/d as whole numbers of eight bits, and
# multiplies those; blocks of 256 and d in float32 where the weights are of the K or IQ kinds; and
# float16 for float16. The weights are the same, dequantised, so the difference is rounding alone.
#
# The same rounding here does not give the same numbers. It does before the first attention; then a
# difference in the last bit puts some numbers on the other side of a half, each a whole step away,
# and after a few layers the two differ nearly as if they had rounded independently. llama.cpp
# differs from itself by as much, with and without flash attention. So this says how exact such a
# server's answers can be, and texts are verified within that (`recover/files/contents.py`).
#
# Others, as vLLM, compute in bfloat16.

_BLOCK, _LARGE_BLOCK = 32, 256
_MOST = 127


def in_blocks(numbers: Tensor, size: int = _BLOCK) -> Tensor:
    """Numbers (…, n) as 8-bit blocks hold them; what is no whole number of blocks stays."""
    if numbers.shape[-1] % size:
        return numbers
    blocks = numbers.unflatten(-1, (-1, size))
    step = blocks.abs().amax(-1, keepdim=True) / _MOST
    whole = (blocks / step.clamp(min=torch.finfo(step.dtype).tiny)).round()
    return (whole * (step.half().to(step) if size == _BLOCK else step)).flatten(-2)


def as_multiplied(numbers: Tensor, stored: str) -> Tensor:
    """Numbers as ggml takes them into a product with weights that are stored as such a type."""
    if stored == "F32":
        return numbers
    if stored in ("F16", "BF16"):
        return numbers.to(torch.float16 if stored == "F16" else torch.bfloat16).to(numbers)
    large = stored.endswith("_K") or (stored.startswith("IQ") and stored != "IQ4_NL")
    return in_blocks(numbers, _LARGE_BLOCK if large else _BLOCK)


@contextmanager
def eight_bit_activations(model: nn.Module) -> Generator[None]:
    """Every linear map takes its input as llama.cpp would, for the length of a block."""

    def rounded(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (as_multiplied(inputs[0], getattr(module, STORED, "Q8_0")), *inputs[1:])

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with hooks(*((module.register_forward_pre_hook, rounded) for module in linear)):
        yield


@contextmanager
def bfloat16_arithmetic(model: nn.Module) -> Generator[None]:
    """Every linear map computes in bfloat16, and every module rounds what it gives to it."""

    def rounded(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor | None:
        if not isinstance(output, Tensor):
            return None
        dtype = output.dtype
        if isinstance(module, nn.Linear):
            bias = cast("Tensor | None", module.bias)
            bias = None if bias is None else bias.bfloat16()
            output = nn.functional.linear(inputs[0].bfloat16(), module.weight.bfloat16(), bias)
        return output.bfloat16().to(dtype)

    with hooks(*((module.register_forward_hook, rounded) for module in model.modules())):
        yield


EIGHT_BITS = "8-bit blocks"
ARITHMETICS = {EIGHT_BITS: eight_bit_activations, "bfloat16": bfloat16_arithmetic}
