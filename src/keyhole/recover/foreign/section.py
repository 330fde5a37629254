"""One exposure of some texts, found in a file: tensors with the texts as their first axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
