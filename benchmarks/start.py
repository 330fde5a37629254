"""How long people wait before anything happens: imports, help, and the Tab key.

Each is a process of its own, the best of several, next to Python's own start in the same run. What
is imported on the way is tested (`tests/cli/test_app.py`): torch is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import show
from keyhole.cli.app import ORDER
from show import Row

TAB = {
    "_KEYHOLE_COMPLETE": "complete_bash",
    "COMP_WORDS": "keyhole extract --meth",
    "COMP_CWORD": "2",
}


@dataclass(frozen=True)
class Start:
    """A process, what it is called, and how many seconds it may take."""

    what: str
    arguments: tuple[str, ...]
    most: float | None = None
    environment: dict[str, str] = field(default_factory=dict)


STARTS = (
    Start("python -c pass", ("-c", "pass")),
    Start("import keyhole", ("-c", "import keyhole"), 0.3),
    Start("keyhole --help", ("-m", "keyhole", "--help"), 0.5),
    Start("keyhole --version", ("-m", "keyhole", "--version"), 0.5),
    Start("keyhole extract --meth<Tab>", ("-m", "keyhole"), 0.5, TAB),
    *(
        Start(f"keyhole {name} --help", ("-m", "keyhole", *name.split(), "--help"), 0.5)
        for name in ORDER
    ),
)


def seconds(start: Start, turns: int) -> tuple[float, float]:
    """On the clock, and of a processor: the first is longer where others are busy."""
    best = computing = float("inf")
    for _ in range(turns):
        began, before = time.perf_counter(), os.times()
        subprocess.run(
            [sys.executable, *start.arguments], env=os.environ | start.environment, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        best, after = min(best, time.perf_counter() - began), os.times()
        spent = (after.children_user - before.children_user) + (
            after.children_system - before.children_system
        )
        computing = min(computing, spent)
    return best, computing


def run(quick: bool) -> Iterator[Row]:
    for start in STARTS[:3] if quick else STARTS:
        took, computing = seconds(start, 1 if quick else 10)
        yield show.ratio(
            start.what,
            f"{took:.2f} s",
            f"< {start.most} s",
            None if quick or start.most is None else took < start.most,
            f"{computing:.2f} s of a processor",
        )


if __name__ == "__main__":
    show.main(run)
