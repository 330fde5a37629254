"""One exposure of some texts, found in a file: tensors with the texts as their first axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.models.anatomy import Anatomy
from keyhole.models.capture import Exposure


@dataclass(frozen=True, eq=False)
class Section:
    """Tensors (texts, …) under the names that leaks use; `layer` is None where it is not known."""

    kind: str
    layer: int | None
    tensors: Mapping[str, Tensor]

    @property
    def texts(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def exposure(self) -> Exposure:
        return Exposure(self.kind, self.layer or 0)


def batched(kind: str, tensor: Tensor, parts: Anatomy, *, positions_first: bool = False) -> Tensor:
    """A tensor in its leak's own order of axes, the texts first.

    `positions_first`: keys come as (n, heads, numbers), as libraries of hooks give them; rows of
    all heads side by side are taken apart.
    """
    if not tensor.is_floating_point():
        raise InputError(f"expected floating-point numbers, got {_type(tensor)}")
    try:
        return _ORDERS[kind](tensor, parts, positions_first)
    except KeyError:
        raise InputError(f"expected a kind among {', '.join(_ORDERS)}, got {kind}") from None


def _rows(tensor: Tensor, parts: Anatomy, _: bool) -> Tensor:
    return _with_texts("rows", tensor, 3, tensor.shape[-1] <= parts.width)


def _keys(tensor: Tensor, parts: Anatomy, positions_first: bool) -> Tensor:
    heads, size = parts.key_heads, parts.head_dim
    if tensor.shape[-1] == heads * size and (heads == 1 or tensor.shape[-1] != size):
        flat = _with_texts("keys or values", tensor, 3, right=True)
        return flat.unflatten(-1, (heads, size)).transpose(1, 2)
    sizes = tensor.shape[-3:]
    whole = _with_texts("keys or values", tensor, 4, size == sizes[-1] and heads in sizes[:-1])
    if heads not in (sizes[0], sizes[1]) or (sizes[1] == heads and positions_first):
        return whole.transpose(1, 2)
    return whole if sizes[0] == heads else whole.transpose(1, 2)


def _maps(tensor: Tensor, parts: Anatomy, _: bool) -> Tensor:
    square = tensor.ndim >= 3 and tensor.shape[-1] == tensor.shape[-2]
    return _with_texts("maps", tensor, 4, square and tensor.shape[-3] == parts.heads)


def _vector(tensor: Tensor, parts: Anatomy, _: bool) -> Tensor:
    return _with_texts("a vector", tensor, 2, tensor.shape[-1] <= parts.width)


def _logits(tensor: Tensor, parts: Anatomy, _: bool) -> Tensor:
    """(v,) or (texts, v): those of the next token; (texts, n, v): of all, the last of which is."""
    right = tensor.shape[-1] == len(parts.table)
    if tensor.ndim == 3:
        return _with_texts("logits", tensor, 3, right)
    return _with_texts("logits", tensor, 2, right)[:, None]


_ORDERS: dict[str, Callable[[Tensor, Anatomy, bool], Tensor]] = {
    "hidden": _rows, "attention": _rows, "kv": _keys, "maps": _maps, "pooled": _vector,
    "logits": _logits,
}  # fmt: skip


def _with_texts(what: str, tensor: Tensor, axes: int, right: bool) -> Tensor:
    if tensor.ndim == axes - 1:
        tensor = tensor[None]
    if tensor.ndim != axes or not right or 0 in tensor.shape:
        raise InputError(f"expected {what} of this model, got shape {tuple(tensor.shape)}")
    return tensor


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def same_texts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Refuse parts of one exposure that are not of the same shape."""
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    if len(shapes) > 1:
        raise InputError(
            f"expected keys and values of one shape, got {' and '.join(map(str, shapes))}"
        )
    return {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}


# What an array without a telling name can be, by its shape alone: every reading that is possible.
#
# With a model of L layers, width d, h key heads of k numbers and H heads, an array is
#
# - hidden states if its last axis is d: (n, d), (texts, n, d), or all layers of them, (L+1, …);
# - keys and values if it ends in (h, n, k): (2, …), or all layers of them, (L, 2, …);
# - maps if it ends in (H, n, n), or all layers of them;
# - one vector for a text: (d,); logits of the next token: (v,).
#
# Two readings may fit: (7, n, d) of a model of six layers is one text at all layers, or seven texts
# at one. Both are given then, and the text that is verified decides.

Reading = tuple[Section, ...]  # what a file holds if it is read in one way: a section a layer


def readings_of(array: Tensor, parts: Anatomy, kind: str | None) -> list[Reading]:
    """Every way to read an array; `kind` says what it is, where that is known."""
    if not array.is_floating_point():
        return []
    kinds = _KINDS if kind is None else {kind: _KINDS[kind]}
    return [reading for name, ways in kinds.items() for reading in ways(array, parts, name, kind)]


def _shapes_rows(array: Tensor, parts: Anatomy, kind: str, asked: str | None) -> Iterator[Reading]:
    if array.shape[-1] != parts.width and (asked is None or array.shape[-1] > parts.width):
        return  # rows may be cut, but only where somebody says that they are rows
    count = parts.layers + 1
    for axis in range(array.ndim - 2):
        if array.shape[axis] == count and array.ndim in (3, 4) and kind == "hidden":
            layers = array.movedim(axis, 0)
            yield tuple(_section(kind, layer, layers[layer], parts) for layer in range(count))
    if array.ndim in (2, 3):
        yield (_section(kind, None, array, parts),)


def _key_values(array: Tensor, parts: Anatomy, kind: str, asked: str | None) -> Iterator[Reading]:
    del asked
    if array.ndim < 4 or (array.shape[-1], array.shape[-3]) != (parts.head_dim, parts.key_heads):
        return
    if array.shape[0] == parts.layers and array.ndim in (5, 6) and array.shape[1] == 2:
        first = 0 if parts.causal else 1
        yield tuple(_pair(kind, first + at, array[at], parts) for at in range(parts.layers))
    if array.shape[0] == 2 and array.ndim in (4, 5):
        yield (_pair(kind, None, array, parts),)


def _shapes_maps(array: Tensor, parts: Anatomy, kind: str, asked: str | None) -> Iterator[Reading]:
    del asked
    square = array.ndim >= 3 and array.shape[-1] == array.shape[-2]
    if not square or array.shape[-3] != parts.heads:
        return
    if array.shape[0] == parts.layers and array.ndim in (4, 5):
        yield tuple(_section(kind, at + 1, array[at], parts) for at in range(parts.layers))
    if array.ndim in (3, 4):
        yield (_section(kind, None, array, parts),)


def _vectors(array: Tensor, parts: Anatomy, kind: str, asked: str | None) -> Iterator[Reading]:
    width = len(parts.table) if kind == "logits" else parts.width
    most = 3 if kind == "logits" else 1 if asked is None else 2
    if array.shape[-1] == width and array.ndim <= most:
        yield (_section(kind, 0, array, parts),)


def _section(kind: str, layer: int | None, array: Tensor, parts: Anatomy) -> Section:
    return Section(kind, layer, {"values": batched(kind, array, parts)})


def _pair(kind: str, layer: int | None, array: Tensor, parts: Anatomy) -> Section:
    tensors = zip(("keys", "values"), array, strict=True)
    return Section(kind, layer, {name: batched(kind, part, parts) for name, part in tensors})


_KINDS: dict[str, Callable[[Tensor, Anatomy, str, str | None], Iterator[Reading]]] = {
    "hidden": _shapes_rows,
    "kv": _key_values,
    "maps": _shapes_maps,
    "pooled": _vectors,
    "logits": _vectors,
    "attention": lambda array, parts, kind, asked: (
        _shapes_rows(array, parts, kind, asked) if asked else iter(())
    ),
}


# Hidden states that vLLM saved: its connector for speculative decoding writes one file a prompt.
#
# As documented (`extract_hidden_states`, ExampleHiddenStatesConnector), not tried on vLLM itself: a
# .safetensors file with `token_ids` (n,), the prompt in the clear, and `hidden_states` (n, k, d),
# the states between blocks at k layers, which the file does not name. Those of the last layer are
# before the final norm, which is done here.

_STATES, _IDS = "hidden_states", "token_ids"


@torch.no_grad()
def vllm_readings(
    arrays: Mapping[str, Tensor], parts: Anatomy, expose: Exposure | None
) -> list[Reading]:
    """Every layer by itself, none of them known; then the last as the model's last layer.

    Where `expose` says which layer is meant, one of the two alone.
    """
    if set(arrays) != {_STATES, _IDS}:
        return []
    states, ids = arrays[_STATES], arrays[_IDS]
    if not states.is_floating_point() or states.ndim != 3 or ids.ndim != 1:
        return []
    if (len(states), states.shape[2]) != (len(ids), parts.width):
        return []
    rows = states.movedim(1, 0)[:, None].float()  # (k, 1, n, d)
    readings: list[Reading] = [(Section("hidden", None, {"values": layer}),) for layer in rows]
    norm = parts.closing_norm(parts.layers)
    last = rows[-1] if norm is None else norm(rows[-1].to(parts.device)).cpu()
    whole: list[Reading] = [(Section("hidden", parts.layers, {"values": last}),)]
    if expose is None:
        return readings + whole
    return whole if expose.layer == parts.layers else readings
