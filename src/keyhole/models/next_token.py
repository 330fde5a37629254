"""The end of a text in a causal model: its last state, the logits, and the tokens that follow.

The logits of the next token are `W·h (+ b)`: h is the state at the text's last position, behind the
final norm, and W the unembedding, which many models share with their token table. The state behind
the next token, which the model holds likeliest, depends on the text once more, and so on.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.anatomy import anatomy
from keyhole.models.loading import Loaded


def unembedding(model: nn.Module) -> nn.Linear:
    """The layer that turns last states into logits."""
    head = cast("Any", model).get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise InputError(
            f"{type(model).__name__} has no head for the next token: load it with task causal"
        )
    return head


class NextTokenLogits:
    """A model in this process as a function of token ids (batch, n), which an attack may ask."""

    def __init__(self, loaded: Loaded) -> None:
        self._model = loaded.model
        self._device = unembedding(loaded.model).weight.device
        self.identity = f"logits of {loaded.name} {loaded.identity}"

    def __call__(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self._model(ids.to(self._device)).logits[:, -1].double().cpu()


def ends(mask: Tensor) -> Tensor:
    """Where (b,) the last token of each text stands: padding may be on either side of it."""
    places = torch.arange(mask.shape[1], device=mask.device)
    return (places * (mask > 0)).argmax(1)


def last_states(states: Tensor, mask: Tensor | None, steps: int = 1) -> Tensor:
    """The states (b, steps, d) of the last tokens of each text, in their order."""
    mask = torch.ones_like(states[..., 0]) if mask is None else mask
    back = torch.arange(1 - steps, 1, device=states.device)
    rows = torch.arange(len(states), device=states.device)
    return states[rows[:, None], ends(mask)[:, None] + back]


def continued(
    model: nn.Module, words: Tensor, mask: Tensor | None, steps: int
) -> tuple[Tensor, Tensor]:
    """Embeddings (b, n, e) with the model's own next tokens behind them, up to logits `steps`.

    Each is the token that the model holds likeliest; gradients flow to the text's own embeddings.
    """
    parts, head = anatomy(model), unembedding(model)
    more = steps - 1
    mask = torch.ones_like(words[..., 0]) if mask is None else mask
    words, mask = nn.functional.pad(words, (0, 0, 0, more)), nn.functional.pad(mask, (0, more))
    places = torch.arange(words.shape[1], device=words.device)
    for _ in range(more):
        last = ends(mask)
        with torch.no_grad():
            states = parts.base(inputs_embeds=words, attention_mask=mask).last_hidden_state
            token = parts.tokens(head(last_states(states, mask)[:, 0]).argmax(-1))
        next_place = places == last[:, None] + 1
        words = torch.where(next_place[..., None], token[:, None], words)
        mask = mask.masked_fill(next_place, 1)
    return words, mask
