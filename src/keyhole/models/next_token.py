"""The last state of a text in a causal model, and the logits of the next token.

The logits are `W·h (+ b)`: h is the state at the text's last position, after the final
norm, and W the unembedding, which many models share with their token table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.loading import Loaded


def unembedding(model: Any) -> nn.Linear:
    """Return the layer that maps last states to logits."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InputError(
            f"{type(model).__name__} has no head for the next token: load it with task causal"
        )
    return head


class NextTokenLogits:
    """A model in this process as a function of token ids (batch, n), which an attack may query."""

    def __init__(self, loaded: Loaded) -> None:
        self._model = loaded.model
        self._device = unembedding(loaded.model).weight.device
        self.identity = f"logits of {loaded.name} {loaded.identity}"

    def __call__(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self._model(ids.to(self._device)).logits[:, -1].double().cpu()


def last_state(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return the state (b, d) of each text's last token; padding may be on either side of it."""
    if mask is None:
        return states[:, -1]
    places = torch.arange(mask.shape[1], device=mask.device)
    ends = (places * (mask > 0)).argmax(1)
    return states[torch.arange(len(states), device=states.device), ends]
