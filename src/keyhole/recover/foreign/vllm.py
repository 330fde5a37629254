"""Hidden states that vLLM saved: its connector for speculative decoding writes one file a prompt.

As documented (`extract_hidden_states`, ExampleHiddenStatesConnector), not tried on vLLM itself: a
.safetensors file with `token_ids` (n,), the prompt in the clear, and `hidden_states` (n, k, d), the
states between blocks at k layers, which the file does not name. Those of the last layer are before
the final norm, which is done here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from keyhole.models.anatomy import Anatomy
from keyhole.models.capture import Exposure
from keyhole.recover.foreign.section import Section
from keyhole.recover.foreign.shapes import Reading

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
