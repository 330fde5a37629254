"""Views of results in a notebook, by the kind of result; without one, the summary is shown.

`Result` (core/result.py) looks a view up here. Packages above `core` make views, and
`keyhole/__init__.py`, which may import every package, registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VIEWS: dict[str, Callable[[Any], str]] = {}
