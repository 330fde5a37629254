"""Context managers that change how a model runs, and restore it: hooks, eval mode, attention."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_HOOKS = "_forward_hooks"  # where torch keeps them
_CAPTURING = "_output_capturing_hooks_installed"  # the mark of transformers
# a register method and a hook
Wanted = tuple[Callable[..., RemovableHandle], Callable[..., Any]]


@contextmanager
def hooks(*wanted: Wanted) -> Generator[None]:
    """Register hooks for the length of a block: `hooks((module.register_forward_hook, f), …)`."""
    with ExitStack() as stack:
        for register, hook in wanted:
            stack.enter_context(register(hook))
        yield


@contextmanager
def unhooked(base: nn.Module) -> Generator[None]:
    """Remove the hooks that transformers installs on a model that is asked for states or maps."""
    modules = [vars(module) for module in base.modules()]
    before = [(set(each[_HOOKS]), each.get(_CAPTURING)) for each in modules]
    try:
        yield
    finally:
        for each, (kept, capturing) in zip(modules, before, strict=True):
            for key in set(each[_HOOKS]) - kept:
                del each[_HOOKS][key]
            if not capturing:
                each.pop(_CAPTURING, None)


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Run in eval mode, and restore the mode of every module and the state of random numbers."""
    modes = {part: part.training for part in model.modules()}
    gpus = {weight.device for weight in model.parameters() if weight.is_cuda}
    with torch.random.fork_rng(devices=sorted(gpus, key=str)):
        try:
            model.eval()
            yield
        finally:
            for part, training in modes.items():
                part.training = training


class AttentionImplementation:
    """Sets the attention implementation of a model and all models in it; a reusable context."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._name = name
        self._before = [
            (config, config._attn_implementation) for config in _configs(model)
        ]

    def __enter__(self) -> None:
        for config, _ in self._before:
            config._attn_implementation = self._name

    def __exit__(self, *_: object) -> None:
        # Setting one also sets those inside it, which come later in the list.
        for config, implementation in self._before:
            config._attn_implementation = implementation


def _configs(model: nn.Module) -> list[Any]:
    """Return the configurations of a model and of models in it, each before those inside it."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> Iterator[Any]:
        yield config
        for key in config.sub_configs:
            if getattr(config, key, None) is not None:
                yield from visit(getattr(config, key))

    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            for inner in visit(config):
                # One that is inside several must come after all of these.
                found.pop(id(inner), None)
                found[id(inner)] = inner
    return list(found.values())
