"""Labels as an attack needs them: known to the model, and its own answer where there is none.

An example without a label is held to be one that the model gets right: what is asked then is not
whether a right answer can be made wrong, but whether the answer can be changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.data import NO_LABEL, Batch


def settled(model: Any, batch: Batch, labels: Tensor, target: int | None = None) -> Tensor:
    """The labels of a classifier's (or a multiple-choice model's) batch, all of them known."""
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in batch.items()}
    inputs.pop("special_tokens_mask", None)
    with torch.no_grad():
        logits = model(**inputs).logits
    classes = logits.shape[-1]
    for what, number in (("labels", int(labels.max())), ("a target", target)):
        if number is not None and not NO_LABEL <= number < classes:
            raise InputError(f"expected {what} from 0 to {classes - 1}, got {number}")
    return torch.where(labels == NO_LABEL, logits.argmax(-1).to(labels.device), labels)
