"""Runs that go on where they stopped: what a run is, and the file that remembers what it has done.

Ledgers, journals and checkpoints share one idea of identity: a small dictionary of what determines
the run (the model, the data, the method and its settings). A file of another run is refused with a
line that says what differs; results of two runs are never mixed.

`Journal` is a JSONL file: a first line with that identity, then one record for each finished piece
of work, on disk before the run goes on. A line that a crash cut off is dropped. A piece is known by
what is in it and not by its number, so a longer list continues a shorter one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, TypeVar, cast

from keyhole.core.errors import InputError
from keyhole.core.files import exists, parse, private, read_text, unwritable

Run = Mapping[str, Any]
T = TypeVar("T")
_FIX = "choose another file, or remove this one"
_FORCE = "give --force to begin anew, or remove this file"


class AnotherRun(InputError):
    """A file remembers another run than the one that was to go on from it."""


def digest(*parts: Any) -> str:
    """Sixteen hexadecimal digits of anything that JSON can write, or of bytes."""
    sum_ = hashlib.sha256()
    for part in parts:
        sum_.update(part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode())
    return sum_.hexdigest()[:16]


def expect_same_run(path: str | Path, mine: Run, theirs: object, fix: str = _FIX) -> None:
    """Refuse a file that remembers another run, and say what differs and what to do."""
    # What tuples become on their way through JSON must not count as a difference.
    own = cast("dict[str, Any]", json.loads(json.dumps(dict(mine))))
    saved = cast("dict[str, Any]", theirs) if isinstance(theirs, dict) else {}
    for name in (*own, *(name for name in saved if name not in own)):
        if own.get(name) != saved.get(name):
            ours, others = _difference(name, own.get(name), saved.get(name))
            raise AnotherRun(f"this run has {ours}, that of {path} has {others}: {fix}")


def _difference(name: str, own: Any, saved: Any) -> tuple[str, str]:
    """The innermost setting that differs: its name and value in this run and in the saved one."""
    if isinstance(own, dict) and isinstance(saved, dict):
        ours, others = cast("dict[str, Any]", own), cast("dict[str, Any]", saved)
        for key in (*ours, *others):
            if ours.get(key) != others.get(key):
                return _difference(f"{name} {key}", ours.get(key), others.get(key))
    return f"{name} {own}", f"{name} {saved}"


@contextmanager
def stopping_on_ctrl_c() -> Generator[None]:
    """A solver takes Ctrl-C and hands over what it has by then; the person means the whole run.

    What an interrupted piece of work gave is not kept: it would not be the same another time.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        usual(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if interrupted:
        raise KeyboardInterrupt


def records_in(path: Path) -> int:
    """How many finished pieces a journal holds; 0 where there is none."""
    try:
        return max(0, path.read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


class Journal:
    """What a run has done so far, by key; `path` None keeps it in memory alone.

    Another run's file is refused, or begun anew with `force` (None: the caller has no such option).
    A file that remembers nothing in the end is not left behind.
    """

    def __init__(self, path: str | Path | None, run: Run, *, force: bool | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._force, self._fix = force, _FIX if force is None else _FORCE
        self.records: dict[str, dict[str, Any]] = {}
        self._file = None if self.path is None else self._open(self.path, run)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None and self.path is not None:
            self._file.close()
            if not self.records:
                self.path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, records: Mapping[str, dict[str, Any]]) -> None:
        """Finished pieces by key, on disk before this returns."""
        self.records |= records
        if self._file is None:
            return
        lines = [json.dumps({"key": k, **record}, allow_nan=False) for k, record in records.items()]
        try:
            self._file.write("".join(f"{line}\n" for line in lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:  # what stands there stays; half a line is dropped next time
            raise unwritable(str(self.path), error) from error

    def recall(self, key: str, read: Callable[[dict[str, Any]], T]) -> T:
        """What is remembered under a key, as `read` makes it of the record."""
        try:
            return read(self.records[key])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.path} does not hold what a run wrote under {key} ({error}): {self._fix}"
            ) from error

    def _open(self, path: Path, run: Run) -> IO[str]:
        text = read_text(path, "a file to resume from") if exists(path) else ""
        try:
            whole = text[: text.rfind("\n") + 1]  # without a line that a crash cut off
            if whole and not self._recalls(path, whole, run):
                whole = ""
            private(path)
            file = path.open("w" if not whole else "r+", encoding="utf-8")
            file.write(whole or json.dumps(dict(run)) + "\n")
            file.truncate()
            file.flush()
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise unwritable(path, error) from error
        return file

    def _recalls(self, path: Path, whole: str, run: Run) -> bool:
        """Read what the run has done; False where it is another's, which is to be replaced."""
        lines = whole.rstrip("\n").split("\n")  # texts may hold other ends of lines
        try:
            expect_same_run(path, run, _line(path, 1, lines[0]), self._fix)
        except AnotherRun:
            if self._force:
                return False
            raise
        for number, text in enumerate(lines[1:], 2):
            record = _line(path, number, text)
            if not isinstance(record.get("key"), str):
                raise InputError(f"{path}:{number} has no key: {text[:40]!r}")
            self.records[str(record.pop("key"))] = record
        return True


def _line(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        record = parse(text)
    except ValueError as error:
        raise InputError(f"expected JSON in {path}:{number}, got {text[:40]!r}") from error
    if not isinstance(record, dict):
        raise InputError(f"expected an object in {path}:{number}, got {text[:40]!r}")
    return cast("dict[str, Any]", record)
