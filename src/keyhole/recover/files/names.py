"""What names say: those of transformers' outputs and caches, of TransformerLens and of modules.

- transformers: `hidden_states.3`, `last_hidden_state`, `attentions.0`, `logits`,
  `past_key_values.layers.0.keys`, and of older caches `key_cache.0`, `past_key_values.0.1`, `0.1`;
- TransformerLens: `blocks.3.hook_resid_post`, `blocks.3.attn.hook_k`, `blocks.3.attn.hook_pattern`;
- nnsight, and whoever registers hooks: a module's path in the model, `transformer.h.3`,
  `model.layers.3.output.0`.

Blocks count from 0 in all of them, hidden states from 0 as well, where 0 is the embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.models.anatomy import Anatomy, rotate
from keyhole.recover.files.shapes import Section, batched, same_texts

MASKS = ("attention_mask", "mask")
IDS = ("input_ids", "token_ids", "tokens")


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
_ENTERS, _MAKES = 0, 1
_LENS = r"(?:^|\.)blocks\.(\d+)\."
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


# Arrays with telling names as sections: what belongs together, and what is still to be done to it.
#
# A module's output may not be what the model exposes yet: the last block of a causal model is
# followed by a norm, and keys out of a projection by their rotation. Both are done here, with the
# model's own weights.


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
    return [
        Section(
            kind,
            layer,
            same_texts(
                {part: _finished(slot, arrays[name], parts) for part, (name, slot) in taken.items()}
            ),
        )
        for (kind, layer), taken in chosen.items()
        if kind != "kv" or len(taken) == 2  # keys alone are no leak that anything reads
    ]


@torch.no_grad()
def _finished(slot: Slot, tensor: Tensor, parts: Anatomy) -> Tensor:
    """What the model does to raw values before they are the exposure, done here."""
    whole = batched(slot.kind, tensor, parts, positions_first=slot.positions_first)
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
