"""Progress bars on stderr: one for the whole command, and one for the part that is running.

Both show counts, and the first also the time left. If stderr is no terminal, lines are
printed instead: one for every finished part, and one now and then. KEYHOLE_NO_PROGRESS
silences both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from keyhole.cli import outputs
from keyhole.cli.outputs import say, visible
from keyhole.core.progress import Progress, ProgressState

EVERY = 30.0  # seconds between lines while no step ends


@contextmanager
def bars(
    command: str,
    unit: str = "",
    *,
    each: bool = True,
) -> Generator[Bars]:
    """Show progress on stderr while a command runs.

    `unit` is what the overall bar counts. `each` says that every step is worth a line
    if stderr is no terminal: checks are, queries are not.
    """
    people = outputs.people
    if os.environ.get("KEYHOLE_NO_PROGRESS"):
        shown = Bars(command, unit)
    elif people.is_interactive and people.file.isatty():  # with FORCE_COLOR a file is
        shown = _Screen(command, unit)
    else:
        shown = _Lines(command, unit, each)
    finished = False
    try:
        yield shown
        finished = True
    finally:
        shown.close(finished)


class Bars:
    """A `Track` whose overall bar is the track with the command's own name; the others are parts.

    Parts run one after the other: a part ends when all of it is done, or when the next
    one begins. This class shows nothing; its subclasses do.
    """

    def __init__(self, command: str, unit: str) -> None:
        self.command = command
        self.unit = unit
        self.overall: ProgressState | None = None
        self.part: ProgressState | None = None

    def __call__(self, name: str, total: int | None = None) -> Progress:
        if name == self.command and self.overall is None:
            state = self.overall = ProgressState(name, total, self.unit)
        else:
            self._end_part()
            state = self.part = ProgressState(name, total)
        state.changed = partial(self.changed, state)
        return state

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
        """Remove the bars while a result is printed to the same terminal."""
        yield

    def changed(self, state: ProgressState, rose: bool) -> None:  # noqa: ARG002
        """Called after every report, with whether more is done than before."""
        if state is self.part and state.complete:
            self._end_part()

    def part_ended(self) -> None:
        """Called when the running part is complete, before its bar is removed."""


class _Screen(Bars):
    """Shows the overall bar, and below it the bar of the running part."""

    def __init__(self, command: str, unit: str) -> None:
        super().__init__(command, unit)
        self._live = self._start()

    def _start(self) -> Live:
        live = Live(
            get_renderable=self._drawn,
            console=outputs.people,
            transient=True,
            redirect_stdout=False,  # stdout is for results
            refresh_per_second=10,
        )
        live.start()
        return live

    def _drawn(self) -> Table:
        width = 24 if outputs.people.width >= 120 else 12
        view = Table.grid(padding=(0, 1), expand=True)
        view.add_column(width=2 * width, no_wrap=True)
        for _ in ("bar", "count", "time"):
            view.add_column(no_wrap=True)
        view.add_column(ratio=1, no_wrap=True)  # the note takes the rest of the width
        for state in filter(None, (self.overall, self.part)):
            bar = ProgressBar(None, 0.0, width=width)
            if state.share is not None:
                bar = ProgressBar(1.0, state.share, width=width)
            left = state.time
            if state is self.part and self.overall is not None:
                left = ""
            words = (state.count, left, state.note)
            view.add_row(
                Text(visible(state.name)), bar, *(Text(visible(word)) for word in words)
            )
        return view

    def part_ended(self) -> None:
        self._live.refresh()  # shows the full bar before it is removed

    @contextmanager
    def paused(self) -> Generator[None]:
        self._live.stop()
        try:
            yield
        finally:  # a new display, because the old one remembers where the cursor was
            self._live = self._start()

    def close(self, finished: bool) -> None:
        super().close(finished)
        self._live.transient = not finished  # a full bar stays on the screen
        self._live.stop()


class _Lines(Bars):
    """Prints a line for every step if `each`, and otherwise one now and then."""

    def __init__(
        self,
        command: str,
        unit: str,
        each: bool,
    ) -> None:
        super().__init__(command, unit)
        self._each = each
        self._said = time.monotonic()

    def changed(self, state: ProgressState, rose: bool) -> None:
        overall = self.overall
        part = self.part
        # The last step is reported at the end, with the total time.
        if self._each and rose and state is overall and not state.complete:
            self._say(state.words())
        elif time.monotonic() - self._said > EVERY:
            # The line has one time left, that of the whole command.
            now = ""
            if part is not None:
                now = f"now {part.words(timed=overall is None)}"
            if overall is None:
                self._say(f"{self.command}: {now}")
            else:
                self._say(overall.words(now))
        super().changed(state, rose)

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        say(line)

    def close(self, finished: bool) -> None:
        super().close(finished)
        if self.overall is not None and finished:
            say(self.overall.words())
