"""What people see while they wait: words and progress bars, on stderr."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager

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
    """Queries per second since the attack began."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")


@contextmanager
def progress() -> Generator[Callable[[str, int | None], Callable[[int], None]]]:
    """Bars on stderr, with queries done, rate and time left; silent where nobody looks."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("queries"),
        _Rate(),
        TimeRemainingColumn(),
        console=people,
        transient=True,
        disable=not people.is_terminal or bool(os.environ.get("KEYHOLE_NO_PROGRESS")),
    )

    def track(name: str, expected: int | None) -> Callable[[int], None]:
        task: TaskID = bar.add_task(name, total=expected)
        return lambda count: bar.update(task, completed=count)

    with bar:
        yield track
