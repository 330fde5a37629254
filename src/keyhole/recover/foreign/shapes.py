"""What an array without a telling name can be, by its shape alone: every reading that is possible.

With a model of L layers, width d, h key heads of k numbers and H heads, an array is

- hidden states if its last axis is d: (n, d), (texts, n, d), or all layers of them, (L+1, …);
- keys and values if it ends in (h, n, k): (2, …), or all layers of them, (L, 2, …);
- maps if it ends in (H, n, n), or all layers of them;
- one vector for a text: (d,); logits of the next token: (v,).

Two readings may fit: (7, n, d) of a model of six layers is one text at all layers, or seven texts
at one. Both are given then, and the text that is verified decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from keyhole.models.anatomy import Anatomy
from keyhole.recover.foreign.section import Section, batched

Reading = tuple[Section, ...]  # what a file holds if it is read in one way: a section a layer


def readings_of(array: Tensor, parts: Anatomy, kind: str | None) -> list[Reading]:
    """Every way to read an array; `kind` says what it is, where that is known."""
    if not array.is_floating_point():
        return []
    kinds = _KINDS if kind is None else {kind: _KINDS[kind]}
    return [reading for name, ways in kinds.items() for reading in ways(array, parts, name, kind)]


def _rows(array: Tensor, parts: Anatomy, kind: str, asked: str | None) -> Iterator[Reading]:
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


def _maps(array: Tensor, parts: Anatomy, kind: str, asked: str | None) -> Iterator[Reading]:
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
    "hidden": _rows,
    "kv": _key_values,
    "maps": _maps,
    "pooled": _vectors,
    "logits": _vectors,
    "attention": lambda array, parts, kind, asked: (
        _rows(array, parts, kind, asked) if asked else iter(())
    ),
}
