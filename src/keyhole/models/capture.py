"""Read what a model exposes at one layer, by hooks that are always removed.

`capture(model, exposure, …)` runs the model on token ids or on embeddings, stops it as
soon as the exposure has been computed (the layers above never run), and returns the
tensors under the names that the leak types use. Gradients flow from them to
`embeddings`, so recovery compares candidates with a leak by the same computation that
made the leak.

Layers are counted as `output_hidden_states=True` does: hidden states of layer 0 are the
embeddings, those of layer ℓ the output of block ℓ; maps, keys and attention outputs of
layer ℓ are made inside block ℓ = 1 … L. The exception is the KV cache of a causal
model, which counts from 0 as the cache itself does; an encoder has no cache, and its
keys and values count from 1 like its maps.
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
from keyhole.models.hooks import AttentionImplementation, Wanted, hooks, unhooked
from keyhole.models.loading import STORED
from keyhole.models.next_token import last_state, unembedding

KINDS = ("hidden", "kv", "maps", "attention", "pooled", "logits")
POOLINGS = ("mean", "cls", "last", "max", "pooler")


@dataclass(frozen=True)
class Exposure:
    """One thing that a model may expose: `hidden:3`, `kv:0`, `maps:1`, `pooled`, `logits`.

    `pooling` and `normalised` define a pooled embedding: the mean of all states, their
    maximum in each coordinate, the first (`cls`), the last, or what the model's pooler
    makes of the first. `width` and `unit` define what is left of each row of hidden
    states: its first `width` numbers, and then only its direction, as a row of length
    one. With `log_probabilities`, logits are log p.
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
    def parse(cls, text: str | Exposure) -> Exposure:
        """Read `hidden:3` and the like; an exposure stays as it is."""
        if isinstance(text, Exposure):
            return text
        kind, colon, number = text.partition(":")
        whole = kind in ("pooled", "logits")
        if whole and not colon:
            return cls(kind)
        if whole or not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise InputError(
                f"{text} is not an exposure such as hidden:3, pooled or logits"
            )
        return cls(kind, int(number))

    def __str__(self) -> str:
        if self.kind in ("pooled", "logits"):
            return self.kind
        return f"{self.kind}:{self.layer}"

    def block(self, parts: Anatomy) -> int:
        """Return the number (from 1) of the block that computes it; 0 for the embeddings."""
        if self.kind == "logits" and not parts.causal:
            raise InputError(f"{self} needs a causal model, and {parts.family} is none")
        if self.kind in ("pooled", "logits"):
            return parts.layers
        from_zero = self.kind == "kv" and parts.causal
        first = int(self.kind != "hidden" and not from_zero)
        last = parts.layers - from_zero
        if not first <= self.layer <= last:
            raise InputError(f"the layer of {self} must be from {first} to {last}")
        number = self.layer + from_zero
        if reason := parts.lacks(self.kind, number):
            raise InputError(f"{self} is not available: {reason}")
        return number


class _Stop(Exception):
    """Raised by a hook once everything wanted has been read; caught by `capture`."""


def capture(
    model: nn.Module,
    exposure: Exposure,
    *,
    ids: Tensor | None = None,
    embeddings: Tensor | None = None,
    mask: Tensor | None = None,
    **inputs: Any,
) -> dict[str, Tensor]:
    """Return the exposure's tensors, batch first, for `ids` or word `embeddings` (b, n, e).

    Names: `values` for hidden states (b, n, d), maps (b, h, n, n), attention outputs
    (b, n, d), pooled embeddings (b, d) and logits (b, 1, v); `keys` and `values` (b, h,
    n, k) as a KV cache holds them. `mask` (b, n) is 1 on text, 0 on padding. `inputs`
    are passed to the model: `position_ids`, `past_key_values`, `token_type_ids`. A
    model of float16 or bfloat16 computes in its own precision; embeddings may be
    float32, and tensors are returned as float32.
    """
    parts = anatomy(model)
    tensors: dict[str, Tensor] = {}
    wanted = _hooks(parts, exposure, tensors)
    if embeddings is not None:
        embeddings = embeddings.to(parts.tokens.weight.dtype)
    maps = exposure.kind == "maps"
    given = {"input_ids": ids} if embeddings is None else {"inputs_embeds": embeddings}
    if embeddings is not None and not parts.takes_embeddings:
        # Tokens stand in for them, and the output of their table is replaced.
        shape = embeddings.shape[:2]
        stand_in = torch.full(shape, parts.ordinary, device=embeddings.device)
        given = {"input_ids": stand_in}
        wanted.append((parts.tokens.register_forward_hook, lambda *_: embeddings))
    if exposure.kind == "kv" and parts.causal and inputs.get("past_key_values") is None:
        inputs["use_cache"] = True
    if maps:
        inputs["output_attentions"] = True
    if exposure.kind == "hidden" and not _stops(parts, exposure.layer):
        inputs["output_hidden_states"] = True
    asked = "output_attentions" in inputs or "output_hidden_states" in inputs
    with (
        hooks(*wanted),
        AttentionImplementation(parts.base, "eager") if maps else nullcontext(),
        unhooked(parts.base) if asked else nullcontext(),
        suppress(_Stop),
    ):
        parts.base(**given, attention_mask=mask, return_dict=True, **inputs)
    if exposure.kind == "pooled" and exposure.pooling != "pooler":
        tensors["values"] = pool(exposure, tensors.pop("states"), mask)
    if exposure.kind == "logits":
        logits = unembedding(model)(last_state(tensors.pop("states"), mask)[:, None])
        if exposure.log_probabilities:
            logits = logits.log_softmax(-1)
        tensors["values"] = logits
    if exposure.width is not None:
        tensors["values"] = tensors["values"][..., : exposure.width]
    if exposure.unit:
        tensors["values"] = nn.functional.normalize(tensors["values"], dim=-1)
    return {
        name: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        for name, tensor in tensors.items()
    }


def _stops(parts: Anatomy, layer: int) -> bool:
    """Return whether these states are the input of a block, or the model's own output."""
    return bool(parts.blocks) and (layer < parts.layers or parts.tied)


Read = Callable[[tuple[Any, ...], dict[str, Any], Any], dict[str, Tensor]]


def _hooks(
    parts: Anatomy,
    exposure: Exposure,
    tensors: dict[str, Tensor],
) -> list[Wanted]:
    """Return the hooks that fill `tensors` and end the forward pass there."""
    kind = exposure.kind
    number = exposure.block(parts)
    inside = kind not in ("pooled", "logits", "hidden")
    if not inside and (
        kind != "hidden" or number == parts.layers or not _stops(parts, number)
    ):

        def take_output(
            _m: nn.Module,
            _i: Any,
            output: Any,
        ) -> None:
            tensors.update(_of_output(exposure, output, type(parts.base).__name__))

        return [(parts.base.register_forward_hook, take_output)]

    entered = 0  # how many blocks were entered: one module may serve several layers

    def enter(
        _m: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        nonlocal entered
        if kind == "hidden" and entered == number:
            tensors["values"] = cast("Tensor", state_among(args, kwargs))
            raise _Stop
        entered += 1

    def take(read: Read) -> Callable[..., None]:
        def hook(
            _m: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: Any,
        ) -> None:
            if entered == number:
                tensors.update(read(args, kwargs, output))
                if len(tensors) == (2 if kind == "kv" else 1):
                    raise _Stop

        return hook

    blocks = dict.fromkeys(parts.blocks)
    reads = _reads(parts, kind, number) if inside else []
    return [
        *(
            (partial(b.register_forward_pre_hook, with_kwargs=True), enter)
            for b in blocks
        ),
        *(
            (partial(m.register_forward_hook, with_kwargs=True), take(read))
            for m, read in reads
        ),
    ]


def _of_output(
    exposure: Exposure,
    output: Any,
    model: str,
) -> dict[str, Tensor]:
    """Read the model's output: hidden states, those to pool, or what its pooler makes of them."""
    if exposure.kind == "hidden":
        if output.hidden_states is None:
            return {"values": output.last_hidden_state}
        return {"values": output.hidden_states[exposure.layer]}
    if exposure.pooling != "pooler":
        return {"states": output.last_hidden_state}
    if getattr(output, "pooler_output", None) is None:
        raise InputError(f"{model} has no pooler: choose another pooling")
    return {"values": output.pooler_output}


def _reads(
    parts: Anatomy,
    kind: str,
    number: int,
) -> list[tuple[nn.Module, Read]]:
    """Return the modules of block `number` to read, and what to read of their calls."""
    if kind == "attention":
        return [
            (parts.attention(number).output, lambda _a, _k, output: {"values": output})
        ]
    if kind == "maps":
        module = parts.attention(number).module
        return [
            (
                module,
                lambda _a, _k, output: {"values": cast("Tensor", maps_among(output))},
            )
        ]
    if parts.causal:

        def cached(
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            _: Any,
        ) -> dict[str, Tensor]:
            cache = cache_among(args, kwargs)
            if cache is None or cache.layers[number - 1].keys is None:
                return {}
            layer = cache.layers[number - 1]
            return {"keys": layer.keys, "values": layer.values}

        attention = parts.attentions[number - 1]
        modules = [parts.blocks[number - 1]]
        if attention is not None:
            modules.append(attention.module)
        return [(module, cached) for module in modules]

    def projected(name: str, projection: Projection) -> tuple[nn.Module, Read]:
        def read(
            _a: tuple[Any, ...],
            _k: dict[str, Any],
            output: Tensor,
        ) -> dict[str, Tensor]:
            shape = (parts.key_heads, parts.head_dim)
            heads = projection.of(output).unflatten(-1, shape)
            return {name: heads.transpose(1, 2)}

        return projection.module, read

    _, key, value = parts.attention(number).apart
    return [projected("keys", key), projected("values", value)]


def pool(
    exposure: Exposure,
    states: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Return one vector for each text, as sentence-transformers does."""
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


# Arithmetic that is coarser than float32: how far it moves what a model exposes
#
# Servers of quantised weights round the input of a matrix as well. llama.cpp (ggml)
# takes blocks of 32 numbers x, stores d = max |x| / 127 in float16 and x/d as whole
# numbers of eight bits, and multiplies those; for weights of the K or IQ kinds it takes
# blocks of 256 and d in float32; for float16 weights it rounds to float16. The
# dequantised weights are the same, so the difference is rounding alone.
#
# The same rounding does not give the same numbers. It does before the first attention;
# then a difference in the last bit moves some numbers across a half, each by a whole
# step, and after a few layers the two computations differ nearly as if they had rounded
# independently. llama.cpp differs from itself by as much, with and without flash
# attention. So this measures how exact such a server's answers can be, and texts are
# verified within that (`recover/files/contents.py`).
#
# Other servers, such as vLLM, compute in bfloat16.

_BLOCK = 32
_LARGE_BLOCK = 256
_STEPS = 127  # of eight bits with a sign


def in_blocks(numbers: Tensor, size: int = _BLOCK) -> Tensor:
    """Round numbers (…, n) as 8-bit blocks do; they stay as they are if n has no whole blocks."""
    if numbers.shape[-1] % size:
        return numbers
    blocks = numbers.unflatten(-1, (-1, size))
    step = blocks.abs().amax(-1, keepdim=True) / _STEPS
    whole = (blocks / step.clamp(min=torch.finfo(step.dtype).tiny)).round()
    return (whole * (step.half().to(step) if size == _BLOCK else step)).flatten(-2)


def as_multiplied(numbers: Tensor, stored: str) -> Tensor:
    """Round numbers as ggml does before a product with weights that are `stored` as such a type."""
    if stored == "F32":
        return numbers
    if stored == "F16":
        return numbers.half().to(numbers)
    if stored == "BF16":
        return numbers.bfloat16().to(numbers)
    large = stored.endswith("_K") or (stored.startswith("IQ") and stored != "IQ4_NL")
    return in_blocks(numbers, _LARGE_BLOCK if large else _BLOCK)


@contextmanager
def eight_bit_activations(model: nn.Module) -> Generator[None]:
    """Round the input of every linear map as llama.cpp does."""

    def rounded(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (as_multiplied(inputs[0], getattr(module, STORED, "Q8_0")), *inputs[1:])

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with hooks(*((module.register_forward_pre_hook, rounded) for module in linear)):
        yield


@contextmanager
def bfloat16_arithmetic(model: nn.Module) -> Generator[None]:
    """Compute every linear map in bfloat16, and round the output of every module to it."""

    def rounded(
        module: nn.Module,
        inputs: tuple[Any, ...],
        output: Any,
    ) -> Tensor | None:
        if not isinstance(output, Tensor):
            return None
        dtype = output.dtype
        if isinstance(module, nn.Linear):
            bias = cast("Tensor | None", module.bias)
            bias = None if bias is None else bias.bfloat16()
            weight = module.weight.bfloat16()
            output = nn.functional.linear(inputs[0].bfloat16(), weight, bias)
        return output.bfloat16().to(dtype)

    with hooks(
        *((module.register_forward_hook, rounded) for module in model.modules())
    ):
        yield


EIGHT_BITS = "8-bit blocks"
ARITHMETICS = {EIGHT_BITS: eight_bit_activations, "bfloat16": bfloat16_arithmetic}
