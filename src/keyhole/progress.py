"""How long work says where it stands: one shape for attacks, searches, sweeps and trainings.

Whoever works takes `progress` and calls it with what is done, of how much, and a word about it;
whoever has several parts takes `track` and asks it for a `progress` of each part. The defaults
say nothing. On a terminal both are bars (cli/console.py).
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told where one piece of work stands; `total` is None where nobody knows."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


class Track(Protocol):
    """Begins to follow a piece of work by its name."""

    def __call__(self, name: str, total: int | None = None) -> Progress: ...


def silent(done: int, total: int | None = None, note: str = "") -> None:
    """Nobody looks."""


def untracked(name: str, total: int | None = None) -> Progress:  # noqa: ARG001
    """Nobody looks at any of the parts."""
    return silent
