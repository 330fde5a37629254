"""Every possible reading of a file's arrays, by their names or else by their shapes.

`readings_of` takes arrays by name and the model's anatomy, and returns for every
reading the kind, the layer and the tensors, in the form that leaks have (`Section`).
contents.py chooses among them.

The names are known of the outputs of

- transformers: `hidden_states.3`, `last_hidden_state`, `attentions.0`, `logits`,
  `past_key_values.layers.0.keys`, and of older caches `key_cache.0`,
  `past_key_values.0.1`, `0.1`;
- TransformerLens: `blocks.3.hook_resid_post`, `blocks.3.attn.hook_k`, `blocks.3.attn.hook_pattern`.

Blocks count from 0 in both, and so do hidden states, where 0 is the embeddings. Arrays
that are not yet what the model exposes are skipped: a causal model's last block before
the final norm, and keys before their rotation.

Where names are unknown, the shape decides. With a model of L layers, width d, h key
heads of k numbers and H heads, an array is

- hidden states if its last axis is d: (n, d), (texts, n, d), or all layers of them, (L+1, …);
- keys and values if it ends in (h, n, k): (2, …), or all layers of them, (L, 2, …);
- maps if it ends in (H, n, n), or all layers of them;
- one vector for a text: (d,); logits of the next token: (v,).

Two readings may be possible: (7, n, d) of a model of six layers is one text at all
layers, or seven texts at one layer. Both are returned then, and the text that is
verified decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from scipy.linalg import hadamard
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.core.tensors import row_numbers
from keyhole.models.anatomy import Anatomy
from keyhole.models.capture import Exposure, capture

MASKS = ("attention_mask", "mask")
IDS = ("input_ids", "token_ids", "tokens")
_COMPARED = 32  # tokens whose keys are compared with the model's
# added to a block's number: the state before the block, or its output
_BEFORE = 0
_AFTER = 1
_TOKENS = 4096  # in one pass
_TURN = 64  # least numbers that newer llama.cpp multiplies by one Hadamard matrix
_LENS = r"(?:^|\.)blocks\.(\d+)\."


@dataclass(frozen=True, eq=False)
class Section:
    """Tensors (texts, …) under the names that leaks use; `layer` is None where it is not known.

    `noise` is the size of their error, where the numbers do not show how they were
    rounded.
    """

    kind: str
    layer: int | None
    tensors: Mapping[str, Tensor]
    noise: float | None = None

    @property
    def texts(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def exposure(self) -> Exposure:
        return Exposure(self.kind, self.layer or 0)


Reading = tuple[Section, ...]  # one reading of a file: a section for each layer


def readings_of(
    arrays: Mapping[str, Tensor],
    parts: Anatomy,
    expose: Exposure | None,
) -> tuple[list[Reading], Tensor | None]:
    """Return every reading of the arrays, and a mask where they are texts of several lengths."""
    readings = _of_vllm(arrays, parts, expose) or _of_chunk(arrays, parts, expose)
    if readings:
        return readings, None
    sections = sections_by_name(arrays, parts)
    if sections:
        return [tuple(sections)], None
    array, lengths = _joined(arrays)
    return _by_shape(array, parts, None if expose is None else expose.kind), lengths


def turned(reading: Reading) -> Reading:
    """Undo the Hadamard transform in a quantised cache of newer llama.cpp.

    Before rounding, each head is multiplied by a Hadamard matrix, so that no number is
    much larger than the others: of the largest power of two that divides a key, and of
    64 for values. The matrix is its own inverse.
    """
    return tuple(
        replace(
            section,
            tensors={
                name: _hadamard(tensor.float(), None if name == "keys" else _TURN)
                for name, tensor in section.tensors.items()
            },
        )
        for section in reading
    )


def _hadamard(numbers: Tensor, size: int | None) -> Tensor:
    """Multiply each `size` numbers, a power of two, by Sylvester's Hadamard matrix."""
    width = numbers.shape[-1]
    if width % _TURN:
        return numbers
    size = size or width & -width
    matrix = torch.from_numpy(hadamard(size)).to(numbers) / size**0.5
    return (numbers.unflatten(-1, (-1, size)) @ matrix).flatten(-2)


def _joined(every: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return arrays of unknown names as one array, and a mask if the texts' lengths differ."""
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
    if (
        len({(tensor.ndim, tensor.shape[-1]) for tensor in tensors}) > 1
        or tensors[0].ndim != 2
    ):
        names = ", ".join(list(arrays)[:4])
        raise InputError(f"{names} are of several kinds: save what leaked by itself")
    ones = [torch.ones(len(tensor), dtype=torch.long) for tensor in tensors]
    padded = [
        nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (tensors, ones)
    ]
    return padded[0], padded[1]


def _batched(
    kind: str,
    tensor: Tensor,
    parts: Anatomy,
    *,
    positions_first: bool = False,
) -> Tensor:
    """Return a tensor with its axes in the order of leaks, and the texts first.

    With `positions_first`, keys come as (n, heads, numbers), as hooks give them, or as
    (n, heads · numbers).
    """
    if not tensor.is_floating_point():
        raise InputError(
            f"expected floating-point numbers, got {str(tensor.dtype).removeprefix('torch.')}"
        )
    if kind == "kv":
        return _keys(tensor, parts, positions_first)
    shape = tensor.shape
    axes = tensor.ndim
    if kind == "maps":
        square = axes >= 3 and shape[-1] == shape[-2]
        return _with_texts("maps", tensor, 4, square and shape[-3] == parts.heads)
    # of the next token (v,) or (texts, v), or of every token (texts, n, v)
    if kind == "logits":
        right = shape[-1] == len(parts.table)
        given = _with_texts("logits", tensor, 3 if axes == 3 else 2, right)
        return given if axes == 3 else given[:, None]
    axes = 2 if kind == "pooled" else 3
    return _with_texts("rows", tensor, axes, shape[-1] <= parts.width)


def _keys(
    tensor: Tensor,
    parts: Anatomy,
    positions_first: bool,
) -> Tensor:
    heads = parts.key_heads
    size = parts.head_dim
    if tensor.shape[-1] == heads * size and (heads == 1 or tensor.shape[-1] != size):
        flat = _with_texts("keys or values", tensor, 3, right=True)
        return flat.unflatten(-1, (heads, size)).transpose(1, 2)
    sizes = tensor.shape[-3:]
    whole = _with_texts(
        "keys or values", tensor, 4, size == sizes[-1] and heads in sizes[:-1]
    )
    first = sizes[0] == heads and not (positions_first and sizes[1] == heads)
    return whole if first else whole.transpose(1, 2)


def _with_texts(
    what: str,
    tensor: Tensor,
    axes: int,
    right: bool,
) -> Tensor:
    if tensor.ndim == axes - 1:
        tensor = tensor[None]
    if tensor.ndim != axes or not right or 0 in tensor.shape:
        raise InputError(
            f"expected {what} of this model, got shape {tuple(tensor.shape)}"
        )
    return tensor


def _by_shape(
    array: Tensor,
    parts: Anatomy,
    asked: str | None,
) -> list[Reading]:
    """Return every reading of an array by its shape; `asked` is its kind, if that is known."""
    if not array.is_floating_point():
        return []
    kinds = ("hidden", "kv", "maps", "pooled", "logits") if asked is None else (asked,)
    return [
        reading
        for kind in kinds
        for reading in _as_kind(array, parts, kind, asked is not None)
    ]


def _as_kind(
    array: Tensor,
    parts: Anatomy,
    kind: str,
    asked: bool,
) -> Iterator[Reading]:
    """Yield the readings of an array as one kind: as all layers of it, or as one unknown layer.

    Each of these may be of one text or, with one axis more, of several.
    """
    shape = tuple(array.shape)
    axes = array.ndim
    if kind in ("pooled", "logits"):
        width = len(parts.table) if kind == "logits" else parts.width
        if kind == "logits":
            max_axes = 3
        elif asked:
            max_axes = 2
        else:
            max_axes = 1
        if shape[-1] == width and axes <= max_axes:
            yield (_section(kind, 0, array, parts),)
        return
    layers = parts.layers
    first_layer = 0 if kind == "kv" and parts.causal else 1
    layer_axes = [0]  # axes that the layers may be along
    one_layer = all_layers = True  # which of the two readings the shape allows
    if kind == "kv":
        fits = axes >= 4 and (shape[-1], shape[-3]) == (parts.head_dim, parts.key_heads)
        text_axes = 4
        one_layer = shape[0] == 2
        all_layers = axes > 1 and shape[1] == 2
    elif kind == "maps":
        fits = axes >= 3 and shape[-1] == shape[-2] and shape[-3] == parts.heads
        text_axes = 3
    else:  # rows may be cut short, but only where the kind is given
        fits = shape[-1] == parts.width or (asked and shape[-1] < parts.width)
        text_axes = 2
        all_layers = kind == "hidden"
        layers = layers + 1
        first_layer = 0
        layer_axes = list(range(axes - 2))
    if not fits:
        return
    for axis in layer_axes:
        if (
            all_layers
            and shape[axis] == layers
            and axes in (text_axes + 1, text_axes + 2)
        ):
            each = array.movedim(axis, 0)
            yield tuple(
                _section(kind, first_layer + at, each[at], parts)
                for at in range(layers)
            )
    if one_layer and axes in (text_axes, text_axes + 1):
        yield (_section(kind, None, array, parts),)


def _section(
    kind: str,
    layer: int | None,
    array: Tensor,
    parts: Anatomy,
) -> Section:
    if kind != "kv":
        tensors = {"values": array}
    else:
        tensors = dict(zip(("keys", "values"), array, strict=True))
    made = {name: _batched(kind, each, parts) for name, each in tensors.items()}
    return Section(kind, layer, made)


@torch.no_grad()
def _of_vllm(
    arrays: Mapping[str, Tensor],
    parts: Anatomy,
    expose: Exposure | None,
) -> list[Reading]:
    """Read hidden states that vLLM's connector for speculative decoding saved, a file per prompt.

    As documented (`extract_hidden_states`, ExampleHiddenStatesConnector), not tried on
    vLLM itself: `token_ids` (n,), the prompt in plain text, and `hidden_states` (n, k,
    d), the states between blocks at k layers, which the file does not name. Each is
    read as one unknown layer, and the last one also as the model's last layer, after
    the final norm is applied. If `expose` names the layer, only one of these two
    readings is returned.
    """
    if set(arrays) != {"hidden_states", "token_ids"}:
        return []
    states = arrays["hidden_states"]
    ids = arrays["token_ids"]
    if not states.is_floating_point() or states.ndim != 3 or ids.ndim != 1:
        return []
    if (len(states), states.shape[2]) != (len(ids), parts.width):
        return []
    rows = states.movedim(1, 0)[:, None].float()  # (k, 1, n, d)
    readings: list[Reading] = [
        (Section("hidden", None, {"values": layer}),) for layer in rows
    ]
    norm = parts.closing_norm(parts.layers)
    last = rows[-1] if norm is None else norm(rows[-1].to(parts.device)).cpu()
    whole: list[Reading] = [(Section("hidden", parts.layers, {"values": last}),)]
    if expose is None:
        return readings + whole
    return whole if expose.layer == parts.layers else readings


# The types that LMCache's server may have stored; its files do not say which.
_STORED = (
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float32,
)
_CHUNK = 256  # LMCache's default number of tokens in a chunk


def _of_chunk(
    arrays: Mapping[str, Tensor],
    parts: Anatomy,
    expose: Exposure | None,
) -> list[Reading]:
    """Read a chunk of LMCache or vLLM (arrays.py), of all layers or of one that it names.

    Of all layers, the one that `expose` names is taken, or the first. Keys and values
    are as wide as the model's if one worker served it. Bytes are read as every type
    that gives finite numbers and a whole number of tokens. Encrypted bytes are taken
    for 16-bit numbers: they show the length of the text, and nothing else.

    A chunk may be from the middle of a text. In the first layer, only the rotation of
    its keys depends on the position; they are rotated back to the start of a text.
    """
    name, array = next(iter(arrays.items()))
    if not re.fullmatch(r"chunk(\.(sealed|\d+))?", name):
        return []
    _, _, which = name.partition(".")
    sealed = which == "sealed"
    alone = which.isdecimal()
    if alone:
        layers = 1
        layer = 0
    else:
        layers = parts.layers
        layer = expose.layer if expose else 0
    each = parts.key_heads * parts.head_dim
    size = array.numel() * array.element_size()
    readings: list[Reading] = []
    unknown = _STORED[:1] if sealed else _STORED
    for dtype in unknown if array.dtype == torch.uint8 else (array.dtype,):
        tokens, left = divmod(size, 2 * layers * each * dtype.itemsize)
        if left or not 0 < tokens <= parts.max_length or not layer < layers:
            continue
        flat = array[: len(array) // 2].float() if sealed else array.view(dtype)
        orders = [flat.view(2, layers, tokens, each)[:, layer]]
        if alone:
            orders.append(flat.view(tokens, 2, each).transpose(0, 1))
        for both in orders:
            if both.float().isfinite().all():
                parted = zip(("keys", "values"), both, strict=True)
                tensors = {
                    part: _batched("kv", numbers, parts, positions_first=True)
                    for part, numbers in parted
                }
                number = int(which) if alone else layer
                start = 0 if sealed or number else _start_of(tensors, parts)
                section = Section("kv", number, tensors)
                readings.append(
                    (_moved_to_start(section, start, parts) if start else section,)
                )
    if not readings:
        raise InputError(
            f"expected {2 * layers * each} numbers for each token of this model's cache, got "
            f"{size} bytes: is it another model's, or of one of several workers?"
        )
    return sorted(readings, key=_spread_of_magnitudes)


def _spread_of_magnitudes(reading: Reading) -> float:
    """Return how far the sizes of numbers vary, which is far if bytes are read as a wrong type."""
    numbers = torch.cat(
        [part.float().flatten() for part in reading[0].tensors.values()]
    )
    return float(numbers[numbers != 0].abs().log2().std())


@torch.no_grad()
def _start_of(tensors: Mapping[str, Tensor], parts: Anatomy) -> int:
    """Return the position of a chunk's first token in its text, from the first layer.

    Its values identify the tokens at any position, as the nearest of all tokens' own
    values. The keys of these tokens are then rotated by every number of whole chunks,
    and the nearest to the chunk's keys show where it starts.
    """
    if not parts.rotary:
        return 0
    keys, values = (
        tensors[part][:, :, :_COMPARED].float() for part in ("keys", "values")
    )
    every = row_numbers(parts.table)[:, None]
    table = torch.cat(
        [
            capture(parts.base, Exposure("kv", 0), ids=some)["values"]
            .flatten(1)
            .float()
            .cpu()
            for some in every.split(_TOKENS)
        ]
    )
    ids = torch.cdist(values[0].transpose(0, 1).flatten(1), table).argmin(-1)
    own = capture(parts.base, Exposure("kv", 0), ids=ids[None].to(parts.device))[
        "keys"
    ].cpu()
    tokens = tensors["keys"].shape[-2]
    last = min(parts.max_length, 2**16) - tokens
    starts = sorted({*range(0, last + 1, tokens), *range(0, last + 1, _CHUNK)})
    return min(
        starts, key=lambda start: float((_rotated(own, start, parts) - keys).norm())
    )


def _moved_to_start(
    section: Section,
    start: int,
    parts: Anatomy,
) -> Section:
    """Return the chunk as if its text began with it.

    Numbers that were rounded and then rotated are no longer on a grid, so their noise
    is stated: the largest error of a position, for rounding in steps of ε times a
    number.
    """
    keys, values = (section.tensors[part].float() for part in ("keys", "values"))
    step = torch.finfo(section.tensors["keys"].dtype).eps
    error = (torch.cat([keys, values], -1) * step).square().mean((1, 3)).max() / 12
    tensors = {"keys": _rotated(keys, -start, parts), "values": values}
    return replace(section, tensors=tensors, noise=float(error.sqrt()))


def _rotated(
    keys: Tensor,
    by: int,
    parts: Anatomy,
) -> Tensor:
    """Return the first layer's keys as they would be `by` positions later."""
    positions = torch.full((1, keys.shape[-2]), by, device=parts.device)
    return parts.rotated(0, keys.to(parts.device), positions).cpu()


# Pattern, kind, form, and whether the state is that before the block or after it. The
# form:
#
# | form | the array is | |---|---| | values | as the model exposes it | | keys | keys
# of a cache, heads first | | rotated, raw | keys with positions first, after and before
# their rotation, if there is one | | paired | keys of a GGUF file, positions first | |
# rows | values with positions first | | after | a block's output, perhaps before the
# final norm |
_PATTERNS: tuple[tuple[str, str, str, int], ...] = (
    (r"(?:^|\.)hidden_states\.(\d+)$", "hidden", "values", _BEFORE),
    (r"(?:^|\.)attentions\.(\d+)$", "maps", "values", _AFTER),
    (r"(?:^|\.)layers\.(\d+)\.keys$", "kv", "keys", _AFTER),
    (r"(?:^|\.)layers\.(\d+)\.values$", "kv", "values", _AFTER),
    (r"(?:^|\.)key_cache\.(\d+)$", "kv", "keys", _AFTER),
    (r"(?:^|\.)value_cache\.(\d+)$", "kv", "values", _AFTER),
    (r"(?:^|past_key_values\.)(\d+)\.0$", "kv", "keys", _AFTER),
    (r"(?:^|past_key_values\.)(\d+)\.1$", "kv", "values", _AFTER),
    (_LENS + r"hook_(?:resid_pre|in)$", "hidden", "values", _BEFORE),
    (_LENS + r"hook_(?:resid_post|out)$", "hidden", "after", _AFTER),
    (_LENS + r"hook_normalized_resid_post$", "hidden", "values", _AFTER),
    (_LENS + r"(?:hook_attn_out|attn\.hook_out)$", "attention", "values", _AFTER),
    (_LENS + r"attn\.hook_rot_k$", "kv", "rotated", _AFTER),
    (_LENS + r"attn\.(?:hook_k|k\.hook_out)$", "kv", "raw", _AFTER),
    (_LENS + r"attn\.(?:hook_v|v\.hook_out)$", "kv", "rows", _AFTER),
    (_LENS + r"attn\.hook_pattern$", "maps", "values", _AFTER),
    (r"^gguf\.(\d+)\.keys(?:\.(\w+))?$", "kv", "paired", _AFTER),
    (r"^gguf\.(\d+)\.values(?:\.(\w+))?$", "kv", "rows", _AFTER),
)
_FINAL = re.compile(r"(?:^|\.)(last_hidden_state|logits)$")


_KEYS = ("keys", "rotated", "raw", "paired")  # the forms that are keys
_POSITIONS_FIRST = ("rotated", "raw", "paired", "rows")


def role_of(name: str, parts: Anatomy) -> tuple[str, int, str] | None:
    """Return the kind, the layer and the form of an array by its name; None if it is unknown."""
    final = _FINAL.search(name)
    if final is not None:
        if final[1] == "logits":
            kind = "logits"
            layer = 0
        else:
            kind = "hidden"
            layer = parts.layers
        return kind, layer, "values"
    for pattern, kind, form, side in _PATTERNS:
        match = re.search(pattern, name)
        if match is None:
            continue
        number = int(match[1])
        # it counts the layers of one type, such as sliding_attention
        if match.lastindex == 2:
            types = getattr(parts.base.config, "layer_types", None) or ()
            layers = [at for at, each in enumerate(types) if each == match[2]]
            if number >= len(layers):
                return None
            number = layers[number]
        number += side  # of the block, from 1
        # The final norm follows the last block of a causal model.
        before_norm = form == "after" and parts.causal and number == parts.layers
        if before_norm or (form == "raw" and parts.rotary):
            return None
        return kind, number - (kind == "kv" and parts.causal), form
    return None


def sections_by_name(arrays: Mapping[str, Tensor], parts: Anatomy) -> list[Section]:
    """Return the arrays with known names, as a section for each kind and layer."""
    chosen: dict[
        tuple[str, int], dict[str, tuple[str, str]]
    ] = {}  # by part, the name and the form
    for name, tensor in arrays.items():
        role = role_of(name, parts) if tensor.is_floating_point() else None
        if role is not None:
            part = "keys" if role[2] in _KEYS else "values"
            chosen.setdefault(role[:2], {})[part] = (name, role[2])
    sections: list[Section] = []
    name, form = chosen.get(("kv", 0), {}).get("keys", ("", ""))
    ids = arrays.get("input_ids")
    paired = (
        form == "paired" and ids is not None and _interleaved(arrays[name], ids, parts)
    )
    for (kind, layer), taken in chosen.items():
        if kind == "kv" and len(taken) < 2:  # no attack reads keys or values alone
            continue
        tensors: dict[str, Tensor] = {}
        for part, (name, form) in taken.items():
            first = form in _POSITIONS_FIRST
            whole = _batched(kind, arrays[name], parts, positions_first=first)
            tensors[part] = _unpaired(whole) if form == "paired" and paired else whole
        shapes = {tuple(tensor.shape) for tensor in tensors.values()}
        if len(shapes) > 1:
            words = " and ".join(map(str, shapes))
            raise InputError(f"keys and values must have the same shape, not {words}")
        sections.append(Section(kind, layer, tensors))
    return sections


@torch.no_grad()
def _interleaved(
    keys: Tensor,
    ids: Tensor,
    parts: Anatomy,
) -> bool:
    """Return whether the two numbers of a rotated plane are neighbours in keys of llama.cpp.

    It depends on the model's architecture, which neither the file nor the family's name
    shows: a Mistral is converted like a Llama, a Qwen is not. So the first layer's
    `keys` are compared with the model's own for the ids in the file, in both orders, as
    they are and transformed (`turned`).
    """
    if not parts.rotary or 1 not in parts.cached:
        return False
    ids = ids[: min(_COMPARED, parts.max_length)].to(parts.device)[None]
    if not ((ids >= 0) & (ids < len(parts.table))).all():
        return False
    own = capture(parts.base, Exposure("kv", 0), ids=ids)["keys"].cpu()
    kept = _batched("kv", keys[: ids.shape[1]], parts, positions_first=True).float()
    ways = [kept, _hadamard(kept, None)]
    apart = [
        min(float((way - own).norm()) for way in tried)
        for tried in (map(_unpaired, ways), ways)
    ]
    return apart[0] < apart[1]


def _unpaired(keys: Tensor) -> Tensor:
    """Return keys (…, k) with the first numbers of all planes before the second ones."""
    return keys.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
