"""What people see while they wait: words and progress bars, on stderr."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

people = Console(stderr=True)


def say(message: str, style: str | None = None) -> None:
    """One line stays one line, and nothing in it is taken for markup."""
    people.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


class _Rate(TextColumn):
    """How many a second since the attack began."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")


class Show(Protocol):
    """Moves one bar: how far, of how much, and a word about it."""

    def __call__(self, count: int, total: int | None = ..., remark: str = ...) -> None: ...


@contextmanager
def progress(
    unit: str = "queries",
) -> Generator[Callable[[str, int | None], Show]]:
    """Bars on stderr, with what is done, rate and time left; silent where nobody looks."""
    bar = Progress(
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

    def track(name: str, expected: int | None) -> Show:
        task: TaskID = bar.add_task(name, total=expected)

        def show(count: int, total: int | None = expected, remark: str = "") -> None:
            bar.update(task, completed=count, total=total, description=f"{name} {remark}".strip())

        return show

    with bar:
        yield track
