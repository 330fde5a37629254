"""What tests audited, told to whoever listens: the plugin of the pytest session that runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keyhole.core import Audit

Listener = Callable[["Audit"], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    _listeners.append(listener)


def leave(listener: Listener) -> None:
    """A session that never began, as that of `pytest --help`, has nothing to leave."""
    if listener in _listeners:
        _listeners.remove(listener)


def tell(audit: Audit) -> None:
    """Only the session that began last hears: one that runs inside another keeps its own."""
    if _listeners:
        _listeners[-1](audit)
