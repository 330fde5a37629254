"""What a notebook shows of a result: a slot that results ask, and that the package fills.

Results stand on a floor below the report, which knows how to draw them, so they cannot import it:
`keyhole/__init__.py` says where it is found, and it is loaded when the first result is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

View = Callable[[Any], str]
_views: list[View] = []


def show_with(view: View) -> None:
    """From now on results are shown by `view`."""
    _views[:] = [view]


def shown(result: Any) -> str | None:
    """HTML for a notebook; None, where nobody draws it, leaves it to the result's `repr`."""
    return _views[0](result) if _views else None
