"""A model that somebody holds already, lent to the attacks: afterwards it is as it was.

Attacks take a model in eval mode, in float32, without gradients for its weights. One that is being
trained is put into that state for the length of a block; one in another precision is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from keyhole.core.errors import InputError
from keyhole.models.loading import Loaded, identity


def is_model(thing: object) -> bool:
    """Is this a model of the transformers library, or something that looks like one?"""
    return isinstance(thing, torch.nn.Module) and hasattr(thing, "config")


@contextmanager
def lent(model: Any, tokenizer: Any, name: str | None = None) -> Generator[Loaded]:
    """The model as attacks take it; its mode, gradients and random numbers are given back."""
    if tokenizer is None:
        raise InputError("expected tokenizer=… with a model in memory, got none")
    if any(weight.is_floating_point() and weight.dtype != torch.float32
           for weight in model.parameters()):  # fmt: skip
        model = copy.deepcopy(model).float()
    modes = {part: part.training for part in model.modules()}
    asked = [(weight, weight.requires_grad) for weight in model.parameters()]
    called = name or str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    gpus = {weight.device for weight in model.parameters() if weight.is_cuda}
    with torch.random.fork_rng(devices=sorted(gpus, key=str)):
        try:
            model.eval().requires_grad_(False)
            yield Loaded(model, tokenizer, identity(model), called)
        finally:
            for part, training in modes.items():
                part.training = training
            for weight, gradient in asked:
                weight.requires_grad_(gradient)
