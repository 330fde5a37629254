"""Tests that fail if a model gives something away: an assertion, and a plugin for pytest.

    from keyhole.testing import assert_withstands

    def test_hidden_states_stay_inside():
        assert_withstands("./my-model", "hidden:3", ["a secret of mine"])

pytest loads the plugin (plugin.py) in every run wherever Keyhole is installed, so
nothing here loads torch before it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keyhole.testing.withstands import CouldNotCheck, assert_withstands

__all__ = ["CouldNotCheck", "assert_withstands"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("keyhole.testing.withstands"), name)
    raise AttributeError(f"module 'keyhole.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
