"""How long work reports its progress: one shape for attacks, searches, sweeps and trainings.

Whoever works takes `progress` and calls it with what is done, of how much, and a word about it;
whoever has several parts takes `track` and asks it for a `progress` of each part. The defaults
say nothing. A command opens one track of its own name, which counts its parts: its overall bar.
Where work goes on that an earlier run began, the first call says how much was done by then.

`Standing` is what such calls add up to; on a terminal it is a bar, else a line (cli/outputs.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable


class Progress(Protocol):
    """Called with how much of one piece of work is done; `total` is None where nobody knows."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


@runtime_checkable
class Expecting(Protocol):
    """A progress that also takes the seconds to come, where a count says little of them."""

    def expect(self, left: float) -> None: ...


class Track(Protocol):
    """Begins to follow a piece of work by its name."""

    def __call__(self, name: str, total: int | None = None) -> Progress: ...


def silent(done: int, total: int | None = None, note: str = "") -> None:
    """Nobody looks."""


def untracked(name: str, total: int | None = None) -> Progress:  # noqa: ARG001
    """Nobody looks at any of the parts."""
    return silent


class Standing:
    """Where one piece of work stands: it never goes back, and its end is all of it.

    A `Progress`, which also takes the time that is left; `changed` is told whether more is done.
    Time left is measured from the first report on: what was done by then may have cost nothing.
    """

    def __init__(
        self,
        name: str,
        total: int | None = None,
        unit: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done, self.note, self.ended = 0, "", False
        self._clock, self._began, self._share = clock, clock(), 0.0
        self._first: tuple[float, int] | None = None
        self._left: tuple[float, float] | None = None  # when it was reported, and what
        self.changed: Callable[[bool], object] = bool

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        if not self.ended:
            self.changed(self.report(done, total, note))

    def expect(self, left: float) -> None:
        """Whoever works knows better than a count tells how many seconds are to come."""
        self._left = self._clock(), left

    def report(self, done: int, total: int | None = None, note: str = "") -> bool:
        """Take in a report; True if more is done than before."""
        rose = done > self.done
        self.done, self.note = max(done, self.done), note or self.note
        self.total = self.total if total is None else total
        if self.total is not None:
            self.total = max(self.total, self.done)  # an attack may need more than was expected
            self._share = max(self._share, self.done / max(1, self.total))
        if self._first is None:
            self._first = self._clock(), self.done
        return rose

    def end(self) -> None:
        """What was asked for is there, perhaps with less work than was expected."""
        self.total, self.ended, self._share = self.done, True, 1.0

    @property
    def share(self) -> float | None:
        """From 0 to 1, for a bar; None where nobody knows."""
        return None if self.total is None else self._share

    @property
    def complete(self) -> bool:
        return self.ended or (self.total is not None and 0 < self.total <= self.done)

    @property
    def count(self) -> str:
        """What is done, of how much; nothing where neither is known yet."""
        if not self.done and (self.ended or self.total is None):
            return "done" if self.ended else ""
        whole = "" if self.total is None else f" of {self.total:,}"
        return f"{self.done:,}{whole} {self.unit}".rstrip()

    @property
    def time(self) -> str:
        """The time left, in words, or at the end the time that it took; empty if nobody knows."""
        now = self._clock()
        if self.ended:
            return f"in {duration(now - self._began)}"
        if self._left is not None:
            since, left = self._left
            return f"about {duration(max(0.0, left - (now - since)))} left"
        if self._first is None or self.total is None or self.done <= self._first[1]:
            return ""
        since, before = self._first
        left = (self.total - self.done) * (now - since) / (self.done - before)
        return f"about {duration(left)} left"

    def words(self, now: str = "", *, timed: bool = True) -> str:
        """All of it in one line; `now` is what runs at the moment."""
        # Where a count has no unit of its own, the note begins with it: 12 of 256 starts.
        counted = [self.count, self.note] if self.unit else [f"{self.count} {self.note}".strip()]
        parts = ", ".join(part for part in (*counted, now, self.time if timed else "") if part)
        return f"{self.name}: {parts}" if parts else self.name


def duration(seconds: float) -> str:
    """A length of time as people say it, to about a tenth."""
    if seconds < 60:
        return _counted(seconds if seconds < 10 else 5 * round(seconds / 5), "second")
    if seconds < 5400:
        return _counted(seconds / 60, "minute")
    return _counted(seconds / 3600, "hour")


def _counted(number: float, unit: str) -> str:
    whole = max(1, math.floor(number + 0.5))
    return f"{whole} {unit}{'' if whole == 1 else 's'}"
