"""Keyhole tells you what a Transformer's attention gives away, before someone else finds out."""

import importlib
from types import ModuleType

__all__ = ["attention", "audit", "extract", "oracle", "results"]


def __getattr__(name: str) -> ModuleType:
    # Subpackages load torch; `keyhole --help` should not wait for it.
    if name in __all__:
        return importlib.import_module(f"keyhole.{name}")
    raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
