"""Commands that are killed or interrupted at chosen points, and what must hold afterwards.

A point is a share of a command's run. It is measured by what the command has written
(records in a journal, bytes in a ledger, epochs), which is the same on a slow machine,
or by the time that an undisturbed run took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from safetensors.torch import load_file

import command_line
import warm_process
from keyhole.cli import main
from keyhole.core.journal import records_in
from keyhole.oracle.ledger import answers_in

# What differs between two runs that give the same: times, machines, and who paid for an
# answer.
_OF_THE_RUN = {"seconds", "created", "environment", "remembered", "resumed", "peak"}


def records(name: str) -> Callable[[Path], int]:
    """Measure the growth of a journal; `name` may be a pattern."""
    return lambda folder: sum(map(records_in, folder.glob(name)))


def size(name: str) -> Callable[[Path], int]:
    """Measure the growth of a file."""
    return lambda folder: (
        (folder / name).stat().st_size if (folder / name).exists() else 0
    )


def answers(name: str) -> Callable[[Path], int]:
    """Count the answers in a ledger, which need not be paid for again."""
    return lambda folder: answers_in(folder / name)


def epochs(name: str) -> Callable[[Path], int]:
    """Count the finished epochs of a training."""
    return lambda folder: max(
        (
            int(path.name.removeprefix("epoch-"))
            for path in (folder / name).glob("epoch-*[0-9]")
        ),
        default=0,
    )


@dataclass(frozen=True)
class Case:
    """A command, its output files, and a measure of what it has `grown` while it runs.

    `kept` is the message after Ctrl-C. `done` counts the work that need not be repeated
    (by default what has grown), and `taken_over` how much of it the second run says it
    did not repeat. If the second run does not say that, `journal` is a file whose
    records must stay the same. `own_process` is for a command that starts processes,
    and so needs a process of its own.
    """

    arguments: tuple[object, ...]
    outputs: tuple[str, ...]
    grown: Callable[[Path], int] | None = None
    kept: str = ""
    done: Callable[[Path], int] | None = None
    taken_over: Callable[[Path, str], int] | None = None
    journal: str | None = None
    own_process: bool = False


@dataclass(frozen=True)
class Whole:
    """The outputs of an undisturbed run, its time and its growth."""

    code: int
    outcome: dict[str, Any]
    seconds: float
    growth: int


@dataclass(frozen=True)
class Ended:
    code: int
    words: str


class Running(Protocol):
    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...


def keyhole(begun: str, *arguments: str) -> None:
    """Run a command in a warm process; the file `begun` says that it has started."""
    sys.argv = ["keyhole", *arguments]
    Path(begun).touch()
    main()


@contextmanager
def running(case: Case, folder: Path, *more: str) -> Iterator[Running]:
    """Start a command, whose stderr goes to the file `words`, and wait until it has started."""
    folder.mkdir(exist_ok=True)
    arguments = [*map(str, case.arguments), *more]
    if case.own_process:
        with (
            words_of(folder).open("w") as words,
            command_line.started(
                [*command_line.KEYHOLE, *arguments],
                cwd=folder,
                stdout=words,
                stderr=words,
            ) as process,
        ):
            yield process
        return
    begun = folder.with_suffix(".begun")
    begun.unlink(missing_ok=True)
    with warm_process.started(keyhole, str(begun), *arguments, cwd=folder) as process:
        wait_until(begun.exists, process)
        yield process
        words_of(folder).write_text(process.words)


def words_of(folder: Path) -> Path:
    return folder.with_suffix(".words")


def wait_until(
    condition: Callable[[], bool], process: Running, seconds: float = 200
) -> bool:
    """Return True once a condition holds, or False if the process ends first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return condition()
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)
    return True


def finish(case: Case, folder: Path, *more: str) -> Ended:
    with running(case, folder, *more) as process:
        wait_until(lambda: False, process)
        code = process.poll()
    assert code is not None
    return Ended(code, words_of(folder).read_text())


def undisturbed(case: Case, folder: Path) -> Whole:
    growth = 0
    with running(case, folder) as process:
        began = time.monotonic()

        def watch() -> bool:
            nonlocal growth
            growth = max(growth, case.grown(folder) if case.grown else 0)
            return False

        wait_until(watch, process)
        seconds = time.monotonic() - began
        code = process.poll()
    words = words_of(folder).read_text()
    assert code in (0, 1), words
    expect_complete(case, folder)
    assert all((folder / name).exists() for name in case.outputs), words
    return Whole(code, outcome(case, folder), seconds, growth)


def stopped(
    case: Case, whole: Whole, folder: Path, share: float, number: int, by: str
) -> Ended:
    """Run a command, and send it a signal at a point that is measured by growth or by time."""
    with running(case, folder) as process:
        began = time.monotonic()

        def there() -> bool:
            if by == "growth":
                assert case.grown is not None
                return case.grown(folder) >= max(1, share * whole.growth)
            return time.monotonic() - began >= share * whole.seconds

        wait_until(there, process)
        family = members(process.pid)
        if process.poll() is None:
            os.kill(process.pid, number)
        wait_until(lambda: False, process, 30)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"still there: {alive}"
        code = process.poll()
    assert code is not None
    return Ended(code, words_of(folder).read_text())


def members(session: int) -> list[psutil.Process]:
    """Return a process and all processes that it started, which share its session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.pid != session:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def expect_complete(case: Case, folder: Path) -> None:
    """Check that all output files can be read to their ends."""
    outcome(case, folder)


def outcome(case: Case, folder: Path) -> dict[str, Any]:
    """Return the contents of the outputs, without what differs between runs."""
    found: dict[str, Any] = {}
    for name in case.outputs:
        path = folder / name
        if path.suffix == ".json" and path.exists():
            found[name] = lasting(json.loads(path.read_text()))
        elif path.suffix == ".jsonl" and path.exists():
            lines = path.read_text().splitlines()
            found[name] = sorted(
                json.dumps(lasting(json.loads(line))) for line in lines
            )
        elif path.suffix == ".safetensors" and path.exists():
            found[name] = {
                key: value.tolist() for key, value in load_file(path).items()
            }
        elif path.exists():
            assert path.read_text().rstrip().endswith("</html>"), name
            found[name] = "a whole page"
    return found


def lasting(data: Any) -> Any:
    if isinstance(data, dict):
        return {
            key: lasting(value) for key, value in data.items() if key not in _OF_THE_RUN
        }
    return [lasting(part) for part in data] if isinstance(data, list) else data


def expect_to_go_on(case: Case, whole: Whole, folder: Path) -> None:
    """Run the command again, which must end as if it had not been stopped.

    It is only refused without --force if the first run had already written an output.
    """
    count = case.done or case.grown
    done = count(folder) if count else 0
    before = whole_lines(folder / case.journal) if case.journal else ""
    there = [name for name in case.outputs if (folder / name).exists()]
    end = finish(case, folder)
    if end.code == 2 and "give --force to replace it" in end.words:
        assert there, end.words
        end = finish(case, folder, "--force")
    assert end.code == whole.code, end.words
    assert outcome(case, folder) == whole.outcome
    assert not list(folder.rglob("*.partial"))
    assert not list(folder.rglob("*.journal"))
    if case.journal:
        assert (
            (folder / case.journal).read_text().startswith(before)
        )  # nothing is done twice
        assert records_in(folder / case.journal) == whole.growth
    if case.taken_over and done:
        assert case.taken_over(folder, end.words) >= done


def whole_lines(journal: Path) -> str:
    text = journal.read_text() if journal.exists() else ""
    return text[: text.rfind("\n") + 1]


KILL = signal.SIGKILL
CTRL_C = signal.SIGINT
