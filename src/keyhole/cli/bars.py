"""Bars on stderr while a command runs: one for all of it, and one for what runs now.

Both say what is done, of how much, and the time left. Where there is no terminal they are lines:
one for every finished part, and one now and then. KEYHOLE_NO_PROGRESS silences both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.progress import BarColumn, ProgressColumn, Task, TaskID
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from keyhole.cli import console
from keyhole.cli.console import say, visible
from keyhole.core.progress import Progress, Standing

EVERY = 30.0  # seconds between lines where there is no terminal and no part ends


class _Bar:
    """A `Progress`, which also takes the time that is left."""

    def __init__(self, standing: Standing, changed: Callable[[bool], None]) -> None:
        self._standing, self._changed = standing, changed
        self.expect = standing.expect

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        if not self._standing.ended:
            self._changed(self._standing.report(done, total, note))


class Bars:
    """A `Track`: the track of the command's own name is its overall bar, the others are parts.

    Work is done one part after the other: a part ends where all of it is done or the next begins;
    then its bar is full and disappears.
    """

    def __init__(self, command: str, unit: str, view: _View) -> None:
        self._command, self._unit, self._view = command, unit, view

    def __call__(self, name: str, total: int | None = None) -> Progress:
        overall = name == self._command and self._view.overall is None
        standing = Standing(name, total, self._unit if overall else "")
        if overall:
            self._view.overall = standing
        else:
            self._end_part()
            self._view.part = standing
        self._view.begin(standing)

        def changed(rose: bool) -> None:
            self._view.change(standing, rose)
            if not overall and standing.complete:
                self._end_part()

        return _Bar(standing, changed)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Make way for an answer on the same screen."""
        self._view.pause()
        try:
            yield
        finally:
            self._view.resume()

    def close(self, finished: bool) -> None:
        if finished:
            self._end_part()
            if self._view.overall is not None:
                self._view.overall.end()
                self._view.change(self._view.overall, False)
        self._view.close(finished)

    def _end_part(self) -> None:
        part, self._view.part = self._view.part, None
        if part is not None:
            part.end()
            self._view.end(part)


@contextmanager
def bars(command: str, unit: str = "", *, each: bool = True) -> Generator[Bars]:
    """Bars on stderr while a command runs, lines where that is not a terminal.

    `unit` is what the overall bar counts. `each` says that every step of it is worth a line:
    checks are, queries are not.
    """
    shown = Bars(command, unit, _view(command, each))
    try:
        yield shown
    except BaseException:
        shown.close(finished=False)
        raise
    shown.close(finished=True)


def report_resuming(done: int, total: int) -> None:
    say(f"resuming: {done} of {total} checks are done")


def _view(command: str, each: bool) -> _View:
    if os.environ.get("KEYHOLE_NO_PROGRESS"):
        return _View()
    people = console.people
    # A wish for colours (FORCE_COLOR) makes no terminal of a file.
    is_screen = people.is_interactive and people.file.isatty()
    return _Screen() if is_screen else _Lines(command, each)


class _View:
    """Where it is shown how a command and its running part stand; this one shows nothing."""

    def __init__(self) -> None:
        self.overall: Standing | None = None
        self.part: Standing | None = None

    def begin(self, standing: Standing) -> None: ...

    def change(self, standing: Standing, rose: bool) -> None: ...

    def end(self, part: Standing) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self, finished: bool) -> None: ...


class _Words(ProgressColumn):
    """A property of the standing behind a bar, as it is when the bar is drawn."""

    def __init__(self, name: str, column: Column | None = None) -> None:
        super().__init__(column)
        self._name = name

    def render(self, task: Task) -> Text:
        return Text(visible(getattr(task.fields["standing"], self._name)))


class _Screen(_View):
    """The overall bar, and below it that of the part that runs now."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: dict[Standing, TaskID] = {}
        self._rows = self._started()

    def _started(self) -> RichProgress:
        wide = console.people.width >= 120
        rows = RichProgress(
            _Words("name", Column(width=44 if wide else 22, no_wrap=True)),
            BarColumn(24 if wide else 12),
            _Words("count"),
            _Words("time"),
            _Words("note", Column(ratio=1, no_wrap=True)),  # what width is left
            console=console.people,
            transient=True,
            redirect_stdout=False,  # it is the answer's, wherever it goes
            expand=True,
        )
        rows.start()
        return rows

    def begin(self, standing: Standing) -> None:
        self._tasks[standing] = self._rows.add_task("", total=None, standing=standing)
        self.change(standing, False)

    def change(self, standing: Standing, rose: bool) -> None:  # noqa: ARG002
        if standing.share is not None:
            self._rows.update(self._tasks[standing], total=1.0, completed=standing.share)

    def end(self, part: Standing) -> None:
        self.change(part, False)
        self._rows.refresh()  # a full bar is seen before it goes
        self._rows.remove_task(self._tasks.pop(part))

    def pause(self) -> None:
        self._rows.stop()

    def resume(self) -> None:
        """New rows: those that were stopped still think that they know where the cursor is."""
        self._rows = self._started()
        for standing in list(self._tasks):
            self.begin(standing)

    def close(self, finished: bool) -> None:
        self._rows.live.transient = not finished  # the full bar stays
        self._rows.stop()


class _Lines(_View):
    """A line for every step worth one, and one now and then where there is none."""

    def __init__(self, command: str, each: bool) -> None:
        super().__init__()
        self._command, self._each = command, each
        self._reported, self._over = threading.Event(), False
        self._watch = threading.Thread(target=self._report_now_and_then, daemon=True)
        self._watch.start()

    def change(self, standing: Standing, rose: bool) -> None:
        # The last step is reported at the end, with the time that all of it took.
        if standing is self.overall and rose and self._each and not standing.complete:
            self._reported.set()
            say(standing.words())

    def close(self, finished: bool) -> None:
        self._over = True
        self._reported.set()
        self._watch.join()
        if self.overall is not None and finished:
            say(self.overall.words())

    def _report_now_and_then(self) -> None:
        while not self._over:
            if self._reported.wait(EVERY):
                self._reported.clear()
                continue
            overall, part = self.overall, self.part
            now = "" if part is None else f"now {part.words()}"
            if overall is not None:
                say(overall.words(now))
            elif part is not None:
                say(f"{self._command}: {now}")
