"""What the arrays of a file are, by their names or else by their shapes: every possible reading.

Names say it in the outputs of
- transformers: `hidden_states.3`, `last_hidden_state`, `attentions.0`, `logits`,
  `past_key_values.layers.0.keys`, and of older caches `key_cache.0`, `past_key_values.0.1`, `0.1`;
- TransformerLens: `blocks.3.hook_resid_post`, `blocks.3.attn.hook_k`, `blocks.3.attn.hook_pattern`;
- nnsight, and whoever registers hooks: a module's path in the model, `transformer.h.3`,
  `model.layers.3.output.0`.

Blocks count from 0 in all of them, hidden states from 0 as well, where 0 is the embeddings. A
module's output may not be what the model exposes yet: the last block of a causal model is followed
by a norm, and keys out of a projection by their rotation. Both are done here, with the model's own
weights.

Without a telling name the shape decides. With a model of L layers, width d, h key heads of k
numbers and H heads, an array is
- hidden states if its last axis is d: (n, d), (texts, n, d), or all layers of them, (L+1, …);
- keys and values if it ends in (h, n, k): (2, …), or all layers of them, (L, 2, …);
- maps if it ends in (H, n, n), or all layers of them;
- one vector for a text: (d,); logits of the next token: (v,).

Two readings may fit: (7, n, d) of a model of six layers is one text at all layers, or seven texts
at one. Both are given then, and the text that is verified decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.anatomy import Anatomy, rotate
from keyhole.models.capture import Exposure

MASKS = ("attention_mask", "mask")
IDS = ("input_ids", "token_ids", "tokens")
_ENTERS, _MAKES = 0, 1
_LENS = r"(?:^|\.)blocks\.(\d+)\."


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


Reading = tuple[Section, ...]  # what a file holds if it is read in one way: a section a layer


def readings_of(
    arrays: Mapping[str, Tensor], parts: Anatomy, expose: Exposure | None
) -> tuple[list[Reading], Tensor | None]:
    """Every way to read arrays, and a mask where they are texts of several lengths."""
    readings = _of_vllm(arrays, parts, expose)
    if readings:
        return readings, None
    sections = sections_by_name(arrays, parts)
    if sections:
        return [tuple(sections)], None
    array, lengths = _joined(arrays)
    return _by_shape(array, parts, None if expose is None else expose.kind), lengths


def _joined(every: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Arrays whose names say nothing as one array; a mask, if they are texts of many lengths."""
    arrays = {
        name: tensor
        for name, tensor in every.items()
        if tensor.is_floating_point() and name.rpartition(".")[2] not in MASKS
    }
    tensors = list(arrays.values())
    if set(arrays) == {"keys", "values"}:
        tensors = [arrays["keys"], arrays["values"]]
    if len(tensors) < 2:
        return (tensors or list(every.values()))[0], None
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(tensors), None
    if len({(tensor.ndim, tensor.shape[-1]) for tensor in tensors}) > 1 or tensors[0].ndim != 2:
        names = ", ".join(list(arrays)[:4])
        raise InputError(f"{names} are of several kinds: save what leaked by itself")
    ones = [torch.ones(len(tensor), dtype=torch.long) for tensor in tensors]
    padded = [nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (tensors, ones)]
    return padded[0], padded[1]


def _batched(kind: str, tensor: Tensor, parts: Anatomy, *, positions_first: bool = False) -> Tensor:
    """A tensor in its leak's own order of axes, the texts first.

    `positions_first`: keys come as (n, heads, numbers), as libraries of hooks give them; rows of
    all heads side by side are taken apart.
    """
    if not tensor.is_floating_point():
        raise InputError(
            f"expected floating-point numbers, got {str(tensor.dtype).removeprefix('torch.')}"
        )
    return _ORDERS[kind](tensor, parts, positions_first)


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


def _by_shape(array: Tensor, parts: Anatomy, asked: str | None) -> list[Reading]:
    """Every way to read an array; `asked` is the kind that it is, where that is known."""
    if not array.is_floating_point():
        return []
    kinds = ("hidden", "kv", "maps", "pooled", "logits") if asked is None else (asked,)
    return [
        reading for kind in kinds for reading in _as_kind(array, parts, kind, asked is not None)
    ]


def _as_kind(array: Tensor, parts: Anatomy, kind: str, asked: bool) -> Iterator[Reading]:
    """The ways to read an array as one kind: all layers of it, or one that is not known."""
    shape, axes = tuple(array.shape), array.ndim
    if kind in ("pooled", "logits"):
        width = len(parts.table) if kind == "logits" else parts.width
        most = 3 if kind == "logits" else 1 + asked
        if shape[-1] == width and axes <= most:
            yield (_section(kind, 0, array, parts),)
        return
    layers, first = parts.layers, 1 - (kind == "kv" and parts.causal)
    stacked = [0]  # axes that the layers may be along
    if kind == "kv":
        right = axes >= 4 and (shape[-1], shape[-3]) == (parts.head_dim, parts.key_heads)
        least, single, pairs = 4, shape[0] == 2, axes > 1 and shape[1] == 2
    elif kind == "maps":
        right = axes >= 3 and shape[-1] == shape[-2] and shape[-3] == parts.heads
        least, single, pairs = 3, True, True
    else:  # rows may be cut, but only where somebody says that they are rows
        right = shape[-1] == parts.width or (asked and shape[-1] < parts.width)
        least, single, pairs = 2, True, kind == "hidden"
        layers, first, stacked = layers + 1, 0, list(range(axes - 2))
    if not right:
        return
    for axis in stacked:
        if pairs and shape[axis] == layers and axes in (least + 1, least + 2):
            each = array.movedim(axis, 0)
            yield tuple(_section(kind, first + at, each[at], parts) for at in range(layers))
    if single and axes in (least, least + 1):
        yield (_section(kind, None, array, parts),)


def _section(kind: str, layer: int | None, array: Tensor, parts: Anatomy) -> Section:
    tensors = (
        {"values": array} if kind != "kv" else dict(zip(("keys", "values"), array, strict=True))
    )
    made = {name: _batched(kind, each, parts) for name, each in tensors.items()}
    return Section(kind, layer, made)


@torch.no_grad()
def _of_vllm(
    arrays: Mapping[str, Tensor], parts: Anatomy, expose: Exposure | None
) -> list[Reading]:
    """Hidden states that vLLM's connector for speculative decoding saved, one file a prompt.

    As documented (`extract_hidden_states`, ExampleHiddenStatesConnector), not tried on vLLM itself:
    `token_ids` (n,), the prompt in the clear, and `hidden_states` (n, k, d), the states between
    blocks at k layers, which the file does not name. Every layer is a reading by itself, none of
    them known; then the last as the model's last layer, after the final norm, which is done
    here. Where `expose` says which layer is meant, one of the two alone.
    """
    if set(arrays) != {"hidden_states", "token_ids"}:
        return []
    states, ids = arrays["hidden_states"], arrays["token_ids"]
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


@dataclass(frozen=True)
class Slot:
    """Where an array belongs: `part` of the exposure `kind` of `layer`.

    `raw`: it is still to pass what the model does to it before it is that exposure: the final norm
    of a causal model after its last block, the rotation of keys. `positions_first`: axes are
    (texts, positions, heads, numbers). `paired`: the two numbers of each rotated plane stand side
    by side, as GGUF files of the llama family have them.
    """

    kind: str
    layer: int
    part: str = "values"
    raw: bool = False
    positions_first: bool = False
    paired: bool = False


# Pattern, kind, part, how the number counts: the state that enters a block, or what a block makes.
_PATTERNS: tuple[tuple[str, str, str, int], ...] = (
    (r"(?:^|\.)hidden_states\.(\d+)$", "hidden", "values", _ENTERS),
    (r"(?:^|\.)attentions\.(\d+)$", "maps", "values", _MAKES),
    (r"(?:^|\.)layers\.(\d+)\.keys$", "kv", "keys", _MAKES),
    (r"(?:^|\.)layers\.(\d+)\.values$", "kv", "values", _MAKES),
    (r"(?:^|\.)key_cache\.(\d+)$", "kv", "keys", _MAKES),
    (r"(?:^|\.)value_cache\.(\d+)$", "kv", "values", _MAKES),
    (r"(?:^|past_key_values\.)(\d+)\.0$", "kv", "keys", _MAKES),
    (r"(?:^|past_key_values\.)(\d+)\.1$", "kv", "values", _MAKES),
    (_LENS + r"hook_(?:resid_pre|in)$", "hidden", "values", _ENTERS),
    (_LENS + r"hook_(?:resid_post|out)$", "hidden", "after", _MAKES),
    (_LENS + r"hook_normalized_resid_post$", "hidden", "values", _MAKES),
    (_LENS + r"(?:hook_attn_out|attn\.hook_out)$", "attention", "values", _MAKES),
    (_LENS + r"attn\.hook_rot_k$", "kv", "rotated", _MAKES),
    (_LENS + r"attn\.(?:hook_k|k\.hook_out)$", "kv", "raw", _MAKES),
    (_LENS + r"attn\.(?:hook_v|v\.hook_out)$", "kv", "rows", _MAKES),
    (_LENS + r"attn\.hook_pattern$", "maps", "values", _MAKES),
    (r"^gguf\.(\d+)\.keys$", "kv", "paired", _MAKES),
    (r"^gguf\.(\d+)\.values$", "kv", "rows", _MAKES),
)
_FINAL = re.compile(r"(?:^|\.)(last_hidden_state|logits)$")
_OUTPUT = re.compile(r"\.(?:output|out)s?(?:\.0)?$")
_INPUT = re.compile(r"\.(?:input|inp)s?(?:\.0)?(?:\.0)?$")


def slot_of(name: str, parts: Anatomy) -> Slot | None:
    """What an array of that name is; None where the name says nothing."""
    final = _FINAL.search(name)
    if final is not None:
        return Slot("logits", 0) if final[1] == "logits" else Slot("hidden", parts.layers)
    for pattern, kind, part, counts in _PATTERNS:
        match = re.search(pattern, name)
        if match is not None:
            return _slot(kind, part, int(match[1]) + counts, parts)
    return _of_module(name, parts)


def _slot(kind: str, part: str, number: int, parts: Anatomy) -> Slot:
    """`number`: the block that makes it, from 1, or that hidden states come out of."""
    if part == "after":  # what the last block of a causal model gives has yet to be normalised
        return Slot(kind, number, raw=parts.causal and number == parts.layers)
    if kind != "kv":
        return Slot(kind, number, part)
    layer = number - parts.causal
    name = "values" if part in ("values", "rows") else "keys"
    paired = part == "paired" and parts.family == "llama"
    first = part not in ("keys", "values")
    return Slot(kind, layer, name, raw=part == "raw", positions_first=first, paired=paired)


def _of_module(name: str, parts: Anatomy) -> Slot | None:
    """The path of a module, as hooks and nnsight name what it gave or was given."""
    given = _INPUT.search(name) is not None
    path = _INPUT.sub("", name) if given else _OUTPUT.sub("", name)
    module = _module(path, parts.base)
    if module is None:
        return None
    for index, block in enumerate(parts.blocks):
        if module is block and parts.blocks.count(block) == 1:
            return (
                _slot("hidden", "values", index, parts)
                if given
                else _slot("hidden", "after", index + 1, parts)
            )
    if given:
        return None
    if module is parts.closing_norm(parts.layers) and parts.causal:
        return Slot("hidden", parts.layers)
    if module is getattr(parts.base, "embeddings", None):
        return Slot("hidden", 0)
    for index, attention in enumerate(parts.attentions):
        names = {id(attention.output): ("attention", "values")}
        if not attention.fused:
            names |= {id(attention.key): ("kv", "raw"), id(attention.value): ("kv", "rows")}
        if id(module) in names:
            return _slot(*names[id(module)], index + 1, parts)
    return None


def _module(path: str, base: nn.Module) -> nn.Module | None:
    """The module at a path that may begin above the base model: `model.layers.3`, `layers.3`."""
    steps = path.split(".")
    for start in range(len(steps)):
        try:
            return base.get_submodule(".".join(steps[start:]))
        except AttributeError:
            continue
    return None


def sections_by_name(arrays: Mapping[str, Tensor], parts: Anatomy) -> list[Section]:
    """What is known by its name, layer by layer."""
    slots = {
        name: slot_of(name, parts) for name, tensor in arrays.items() if tensor.is_floating_point()
    }
    chosen: dict[tuple[str, int], dict[str, tuple[str, Slot]]] = {}
    for name, slot in slots.items():
        if slot is not None:
            taken = chosen.setdefault((slot.kind, slot.layer), {})
            if slot.part not in taken or not slot.raw:  # rather keys after their rotation
                taken[slot.part] = (name, slot)
    sections: list[Section] = []
    for (kind, layer), taken in chosen.items():
        if kind == "kv" and len(taken) < 2:  # keys alone are no leak that anything reads
            continue
        tensors = {
            part: _finished(slot, arrays[name], parts) for part, (name, slot) in taken.items()
        }
        shapes = {tuple(tensor.shape) for tensor in tensors.values()}
        if len(shapes) > 1:
            words = " and ".join(map(str, shapes))
            raise InputError(f"keys and values must have the same shape, not {words}")
        sections.append(Section(kind, layer, tensors))
    return sections


@torch.no_grad()
def _finished(slot: Slot, tensor: Tensor, parts: Anatomy) -> Tensor:
    """What the model does to raw values before they are the exposure, done here."""
    whole = _batched(slot.kind, tensor, parts, positions_first=slot.positions_first)
    if slot.paired:
        return whole.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    if not slot.raw:
        return whole
    if slot.kind == "hidden":
        norm = parts.closing_norm(parts.layers)
        return whole if norm is None else norm(whole.float().to(parts.device)).cpu()
    module = cast("Any", parts.attentions[slot.layer - (not parts.causal)].module)
    keys = whole.float().to(parts.device)
    norm = getattr(module, "k_norm", None)  # Qwen3 normalises keys, head by head
    keys = keys if norm is None else norm(keys)
    positions = torch.arange(keys.shape[-2], device=keys.device)[None]
    return rotate(parts, keys, positions).cpu()
