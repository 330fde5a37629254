"""Forward passes of a model under a rewrite: which call of attention is which.

Hooks on the model and the models inside it open and close a pass: whoever is called first opens it.
They come off, and the configurations get back what they held, whatever happens.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from keyhole.core.errors import InputError
from keyhole.models.loading import transformers
from keyhole.models.rewrite import Rewrite, Site, Sites

NAME = "keyhole"  # of the implementation; must hold none of "eager", "sdpa", "flash", "paged"
_CROSS = ("cross", "encoder_attn", "encdec")


class Watch:
    """One model under one rewrite: numbers its attention calls, forward pass by forward pass."""

    def __init__(self, model: nn.Module, rewrite: Rewrite) -> None:
        self.model = model
        self.rewrite = rewrite
        self.sites = Sites()
        self.setting = _Setting(model)
        self.names = {module: name for name, module in model.named_modules()}
        self._kinds = {module: _kind(name, module) for module, name in self.names.items()}
        self._counts: dict[nn.Module, int] = {}
        self._last: dict[nn.Module, Site] = {}
        self._depth = 0
        self._alone = False
        self._thread = 0

    @contextmanager
    def hooks(self) -> Generator[None]:
        # Whoever is called first opens the pass: the model, or its base model, or its encoder.
        library = transformers()
        parts = [m for m in self.names if m is self.model or isinstance(m, library.PreTrainedModel)]
        with ExitStack() as stack:
            for part in parts:
                before = part.register_forward_pre_hook(self._enter, with_kwargs=True)
                stack.callback(before.remove)
                after = part.register_forward_hook(self._leave, always_call=True)
                stack.callback(after.remove)
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1  # first of all: `_leave` comes in any case
        if self._depth > 1:
            if self._thread != threading.get_ident():
                raise InputError("expected one thread a model, got two inside its forward pass")
            return
        self._thread = threading.get_ident()
        self._counts, self._last = {}, {}
        self.sites.calls = []
        self._alone = self.rewrite.begin(_named(module, args, kwargs)) is False
        if self._alone:
            self.setting.put_back()

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._alone:
            self._alone = False
            self.setting.put_ours()
            return
        if output is None:  # the pass raised an error of its own
            return
        self.sites.forwards += 1
        if not self.sites.calls:
            raise InputError(
                "expected a model whose attention goes through transformers' AttentionInterface, "
                f"got {type(self.model).__name__}, which computes it on its own"
            )

    def site(self, module: nn.Module, shape: torch.Size) -> Site:
        if self._depth == 0:
            return self._again(module)
        count = self._counts.get(module, 0)
        site = Site(len(self.sites.calls), self.names[module], count, self._kinds[module])
        self._counts[module] = count + 1
        self._last[module] = site
        self.sites.calls.append((site, shape))
        return site

    def _again(self, module: nn.Module) -> Site:
        """The site of a call in the backward pass: unknown where one module has many."""
        if self._counts.get(module) != 1:
            raise InputError(
                "expected attention inside the model's forward pass, got a call outside of it to "
                f"{self.names[module]} (gradient checkpointing of a module that is called "
                f"{self._counts.get(module, 0)} times?)"
            )
        return self._last[module]


def _kind(name: str, module: nn.Module) -> str:
    path = [*name.lower().split(".")[-2:], type(module).__name__.lower()]
    return "cross" if any(mark in part for mark in _CROSS for part in path) else "self"


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by name, positional ones too where the names are known."""
    order = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return {**dict(zip(order, args, strict=False)), **kwargs}


class _Setting:
    """Our implementation in every configuration of the model; what was there before returns."""

    def __init__(self, model: nn.Module) -> None:
        self.before = [(config, config._attn_implementation) for config in _configurations(model)]

    def put_ours(self) -> None:
        for config, _ in self.before:
            config._attn_implementation = NAME

    def put_back(self) -> None:
        # Setting one sets those inside it too; they come later and get their own back.
        for config, old in self.before:
            config._attn_implementation = old

    def __enter__(self) -> None:
        self.put_ours()

    def __exit__(self, *_: object) -> None:
        self.put_back()


def _configurations(model: nn.Module) -> list[Any]:
    """All of them once, each before those inside it."""
    configurations: dict[int, Any] = {}

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
                configurations.pop(id(inner), None)
                configurations[id(inner)] = inner
    return list(configurations.values())
