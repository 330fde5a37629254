"""Arrays with telling names as sections: what belongs together, and what is still to be done to it.

A module's output may not be what the model exposes yet: the last block of a causal model is
followed by a norm, and keys out of a projection by their rotation. Both are done here, with the
model's own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.models.anatomy import Anatomy, rotate
from keyhole.recover.foreign.names import Slot, slot_of
from keyhole.recover.foreign.section import Section, batched, same_texts


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
