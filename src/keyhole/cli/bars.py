"""Bars on stderr while a command runs: one for all of it, and one for what runs now.

Both say what is done, of how much; the first says the time left. Where there is no terminal they
are lines: one for every finished part, and one now and then. KEYHOLE_NO_PROGRESS silences both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from keyhole.cli import outputs
from keyhole.cli.outputs import say, visible
from keyhole.core.progress import Progress, Standing

EVERY = 30.0  # seconds between lines where there is no terminal and no part ends


@contextmanager
def bars(command: str, unit: str = "", *, each: bool = True) -> Generator[Bars]:
    """Bars on stderr while a command runs, lines where that is not a terminal.

    `unit` is what the overall bar counts. `each` says that every step of it is worth a line:
    checks are, queries are not.
    """
    people = outputs.people
    if os.environ.get("KEYHOLE_NO_PROGRESS"):
        shown = Bars(command, unit)
    elif people.is_interactive and people.file.isatty():  # FORCE_COLOR makes no terminal of a file
        shown = _Screen(command, unit)
    else:
        shown = _Lines(command, unit, each)
    finished = False
    try:
        yield shown
        finished = True
    finally:
        shown.close(finished)


def report_resuming(done: int, total: int, unit: str) -> None:
    say(f"resuming: {done} of {total} {unit} are done")


class Bars:
    """A `Track`: the track of the command's own name is its overall bar, the others are parts.

    Work is done one part after the other: a part ends where all of it is done or the next begins.
    This class shows nothing; its subclasses do.
    """

    def __init__(self, command: str, unit: str) -> None:
        self.command, self.unit = command, unit
        self.overall: Standing | None = None
        self.part: Standing | None = None

    def __call__(self, name: str, total: int | None = None) -> Progress:
        is_overall = name == self.command and self.overall is None
        standing = Standing(name, total, self.unit if is_overall else "")
        if is_overall:
            self.overall = standing
        else:
            self._end_part()
            self.part = standing

        def changed(rose: bool) -> None:
            if is_overall and rose:
                self.advanced(standing)
            elif not is_overall and standing.complete:
                self._end_part()

        standing.changed = changed
        return standing

    def close(self, finished: bool) -> None:
        if finished:
            self._end_part()
            if self.overall is not None:
                self.overall.end()

    def _end_part(self) -> None:
        if self.part is not None:
            self.part.end()
            self.part_ended()
        self.part = None

    @contextmanager
    def paused(self) -> Generator[None]:
        """Make way for an answer on the same screen."""
        yield

    def advanced(self, overall: Standing) -> None:
        """More of the whole command is done."""

    def part_ended(self) -> None:
        """The part that ran is complete, and goes."""


class _Screen(Bars):
    """The overall bar, and below it that of the part that runs now."""

    def __init__(self, command: str, unit: str) -> None:
        super().__init__(command, unit)
        self._live = self._started()

    def _started(self) -> Live:
        live = Live(
            get_renderable=self._drawn, console=outputs.people, transient=True,
            redirect_stdout=False,  # it is the answer's, wherever it goes
            refresh_per_second=10,
        )  # fmt: skip
        live.start()
        return live

    def _drawn(self) -> Table:
        wide = outputs.people.width >= 120
        view = Table.grid(padding=(0, 1), expand=True)
        view.add_column(width=44 if wide else 22, no_wrap=True)
        for _ in ("bar", "count", "time"):
            view.add_column(no_wrap=True)
        view.add_column(ratio=1, no_wrap=True)  # the note has what width is left
        for standing in filter(None, (self.overall, self.part)):
            total = None if standing.share is None else 1.0
            bar = ProgressBar(total, standing.share or 0.0, width=24 if wide else 12)
            alone = self.overall is None or standing is self.overall
            words = [standing.count, standing.time if alone else "", standing.note]
            view.add_row(
                Text(visible(standing.name)), bar, *(Text(visible(word)) for word in words)
            )
        return view

    def part_ended(self) -> None:
        self._live.refresh()  # a full bar is seen before it goes

    @contextmanager
    def paused(self) -> Generator[None]:
        self._live.stop()
        try:
            yield
        finally:  # a new one: what was stopped still thinks that it knows where the cursor is
            self._live = self._started()

    def close(self, finished: bool) -> None:
        super().close(finished)
        self._live.transient = not finished  # the full bar stays
        self._live.stop()


class _Lines(Bars):
    """A line for every step worth one, and one now and then where there is none."""

    def __init__(self, command: str, unit: str, each: bool) -> None:
        super().__init__(command, unit)
        self._each, self._reported, self._over = each, threading.Event(), False
        self._watch = threading.Thread(target=self._report_now_and_then, daemon=True)
        self._watch.start()

    def advanced(self, overall: Standing) -> None:
        # The last step is reported at the end, with the time that all of it took.
        if self._each and not overall.complete:
            self._reported.set()
            say(overall.words())

    def close(self, finished: bool) -> None:
        super().close(finished)
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
            # One time left, that of all: a part's own would contradict it.
            now = "" if part is None else f"now {part.words(timed=overall is None)}"
            if overall is not None:
                say(overall.words(now))
            elif part is not None:
                say(f"{self.command}: {now}")
