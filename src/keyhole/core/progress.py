"""Reports of progress, of one form for all attacks, searches, sweeps and trainings.

A function that works for long takes a `progress` and calls it with the count done, the
total and a note. A function whose work has several parts takes a `track` and asks it
for a `progress` for each part. The defaults ignore all reports. The track of a
command's own name counts its parts, as its overall bar. Where a run resumes, its first
report says how much an earlier run had done.

`ProgressState` adds such reports up; cli/bars.py shows it as a bar or as lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable


class Progress(Protocol):
    """Called with how much of one piece of work is done; `total` is None if nobody knows."""

    def __call__(
        self,
        done: int,
        total: int | None = None,
        note: str = "",
    ) -> None: ...


@runtime_checkable
class Expecting(Protocol):
    """A progress that also takes the seconds left, for work whose count says little about time."""

    def expect(self, left: float) -> None: ...


class Track(Protocol):
    """Called with the name of a piece of work that begins; returns its progress."""

    def __call__(self, name: str, total: int | None = None) -> Progress: ...


def silent(
    done: int,
    total: int | None = None,
    note: str = "",
) -> None:
    """Ignore a report."""


def untracked(name: str, total: int | None = None) -> Progress:  # noqa: ARG001
    """Ignore the reports of every part."""
    return silent


class ProgressState:
    """The progress of one piece of work, which never decreases and ends at 100%.

    It is called as a `Progress`, and also takes the seconds left. After each report it
    calls `changed` with whether the count rose. The time left follows from the rate
    since the first report, because whatever was done before that may come from an
    earlier run.
    """

    def __init__(
        self,
        name: str,
        total: int | None = None,
        unit: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0
        self.note = ""
        self.ended = False
        self._clock, self._began, self._share = clock, clock(), 0.0
        self._first: tuple[float, int] | None = None
        self._left: tuple[float, float] | None = (
            None  # when it was reported, and the seconds
        )
        self.changed: Callable[[bool], object] = bool

    def __call__(
        self,
        done: int,
        total: int | None = None,
        note: str = "",
    ) -> None:
        if not self.ended:
            self.changed(self.report(done, total, note))

    def expect(self, left: float) -> None:
        """Take the seconds left from the work itself, in place of an estimate from the count."""
        self._left = self._clock(), left

    def report(
        self,
        done: int,
        total: int | None = None,
        note: str = "",
    ) -> bool:
        """Take in a report; return whether more is done than before."""
        rose = done > self.done
        self.done = max(done, self.done)
        self.note = note or self.note
        if total is not None:
            self.total = total
        if self.total is not None:
            self.total = max(
                self.total, self.done
            )  # an attack may need more than was expected
            self._share = max(self._share, self.done / max(1, self.total))
        if self._first is None:
            self._first = self._clock(), self.done
        return rose

    def end(self) -> None:
        """Mark the work as complete, even if less of it was needed than expected."""
        self.total = self.done
        self.ended = True
        self._share = 1.0

    @property
    def share(self) -> float | None:
        """The share that is done, from 0 to 1; None if the total is not known."""
        return None if self.total is None else self._share

    @property
    def complete(self) -> bool:
        return self.ended or (self.total is not None and 0 < self.total <= self.done)

    @property
    def count(self) -> str:
        """The count done and the total in words; empty if neither is known yet."""
        if not self.done and (self.ended or self.total is None):
            return "done" if self.ended else ""
        whole = "" if self.total is None else f" of {self.total:,}"
        return f"{self.done:,}{whole} {self.unit}".rstrip()

    @property
    def time(self) -> str:
        """The time left in words, or the time taken once the work has ended; empty if unknown."""
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
        """Return everything in one line; `now` describes the part that is running."""
        # A count without a unit takes it from the note: 12 of 256 starts.
        if self.unit:
            counted = [self.count, self.note]
        else:
            counted = [f"{self.count} {self.note}".strip()]
        parts = ", ".join(
            part for part in (*counted, now, self.time if timed else "") if part
        )
        return f"{self.name}: {parts}" if parts else self.name


def duration(seconds: float) -> str:
    """Return a length of time in words, to about a tenth."""
    if seconds < 60:
        return _counted(seconds if seconds < 10 else 5 * round(seconds / 5), "second")
    if seconds < 5400:
        return _counted(seconds / 60, "minute")
    return _counted(seconds / 3600, "hour")


def _counted(number: float, unit: str) -> str:
    whole = max(1, math.floor(number + 0.5))
    return f"{whole} {unit}{'' if whole == 1 else 's'}"
