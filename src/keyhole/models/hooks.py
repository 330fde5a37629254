"""Hooks that always come off, and settings of attention that return to what they were."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_HOOKS = "_forward_hooks"  # where torch keeps them
_ASKED = "_output_capturing_hooks_installed"  # the mark of transformers
Wanted = tuple[Callable[..., RemovableHandle], Callable[..., Any]]  # what registers, and a hook


@contextmanager
def hooks(*wanted: Wanted) -> Generator[None]:
    """Register hooks for the length of a block: `hooks((module.register_forward_hook, f), …)`."""
    handles: list[RemovableHandle] = []
    try:
        for register, hook in wanted:
            handles.append(register(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def configurations(model: nn.Module) -> list[Any]:
    """Those of a model and of models in it once, each before those inside it."""
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
                # Again at the end: inside one and outside another, it must be restored last.
                found.pop(id(inner), None)
                found[id(inner)] = inner
    return list(found.values())


@contextmanager
def eager(base: nn.Module) -> Generator[None]:
    """Run with the implementation of attention that has maps."""
    before = [(config, config._attn_implementation) for config in configurations(base)]
    try:
        for config, _ in before:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


@contextmanager
def unhooked(base: nn.Module) -> Generator[None]:
    """Takes off what the library itself puts on a model that is asked for states or maps."""
    inside = [vars(module) for module in base.modules()]
    before = [(set(each[_HOOKS]), each.get(_ASKED)) for each in inside]
    try:
        yield
    finally:
        for each, (kept, asked) in zip(inside, before, strict=True):
            for key in set(each[_HOOKS]) - kept:
                del each[_HOOKS][key]
            if not asked:
                each.pop(_ASKED, None)
