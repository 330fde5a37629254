"""Keyhole tells you what a Transformer's attention gives away, before someone else finds out."""

import importlib
from types import ModuleType

_PARTS = (
    "attention", "audit", "data", "disrupt", "extract", "harden", "invert", "models", "oracle",
    "recover", "report", "results",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    # Subpackages load torch; `keyhole --help` should not wait for it.
    if name in _PARTS:
        return importlib.import_module(f"keyhole.{name}")
    raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
