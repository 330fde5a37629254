"""What people see while they wait: words and progress bars, on stderr."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from keyhole.progress import Progress, Track

people = Console(stderr=True)


def say(message: str, style: str | None = None) -> None:
    """One line stays one line, and nothing in it is taken for markup."""
    message = message.encode("utf-8", "replace").decode()  # names of files may be any bytes
    people.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


class _Rate(TextColumn):
    """How many a second since the attack began."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")


@contextmanager
def bars(unit: str = "queries") -> Generator[Track]:
    """Bars on stderr, with what is done, rate and time left; silent where nobody looks."""
    shown = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        _Rate(),
        TimeRemainingColumn(),
        console=people,
        transient=True,
        disable=not people.is_terminal or bool(os.environ.get("KEYHOLE_NO_PROGRESS")),
    )

    def track(name: str, total: int | None = None) -> Progress:
        task: TaskID = shown.add_task(name, total=total)
        expected = total

        def progress(done: int, total: int | None = None, note: str = "") -> None:
            whole = expected if total is None else total
            description = f"{name} {note}".strip()
            shown.update(task, completed=done, total=whole, description=description)

        return progress

    with shown:
        yield track
