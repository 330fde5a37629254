"""Journals, from which stopped runs resume, and the identity of a run.

A run is identified by a small dictionary of what determines it: the model, the data,
the method and its settings. Ledgers, journals and checkpoints all begin with it. A file
of another run is refused with a line that says what differs, so that results of two
runs are never mixed.

A `Journal` is a JSONL file: a first line with that identity, then one record for each
finished piece of work, which is on disk before the run goes on. A line that a crash cut
off is dropped. The key of a piece comes from its content, not its number, so a longer
list can continue a shorter one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar, cast

from keyhole.core.errors import InputError
from keyhole.core.files import exists, parse, private, read_text, unwritable

Run = Mapping[str, Any]
T = TypeVar("T")
_FIX = "choose another file, or remove this one"
_REPEAT = "remove this line, and only what it kept is repeated"
_FORCE = "give --force to begin anew, or remove this file"


class AnotherRun(InputError):
    """The file to resume from belongs to another run."""


def digest(*parts: Any) -> str:
    """Return sixteen hexadecimal digits that identify bytes, or anything that JSON can write."""
    sha = hashlib.sha256()
    for part in parts:
        if not isinstance(part, bytes):
            part = json.dumps(part, sort_keys=True).encode()
        sha.update(part)
    return sha.hexdigest()[:16]


def expect_same_run(
    path: str | Path,
    mine: Run,
    theirs: object,
    fix: str = _FIX,
) -> None:
    """Raise if a file belongs to another run; the message says what differs and what to do."""
    # JSON turns tuples into lists, which must not count as a difference.
    own = json.loads(json.dumps(dict(mine)))
    saved: Any = {}
    if isinstance(theirs, dict):
        saved = theirs
    difference = next(_differences("", own, saved), None)
    if difference is not None:
        name, ours, others = difference
        raise AnotherRun(
            f"this run has{name} {ours}, that of {path} has{name} {others}: {fix}"
        )


def _differences(
    name: str,
    own: Any,
    saved: Any,
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the innermost settings that differ: the name and the two values."""
    if isinstance(own, dict) and isinstance(saved, dict):
        for key in cast("dict[str, Any]", own | saved):
            yield from _differences(f"{name} {key}", own.get(key), saved.get(key))
    elif own != saved:
        yield name, own, saved


@contextmanager
def stopping_on_ctrl_c() -> Generator[None]:
    """Raise KeyboardInterrupt at the end if Ctrl-C was pressed, even if a solver caught it.

    A solver that is interrupted returns the best it has found so far. That result must
    not be kept, because another run would not give the same.
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
    """Return how many finished pieces a journal holds; 0 if there is no journal."""
    try:
        return max(0, path.read_bytes().count(b"\n") - 1)
    except OSError:
        return 0


class Journal:
    """The finished work of a run, by key; without a `path` it is kept only in memory.

    A file of another run is refused, or replaced if `force` is set. `force` is None if
    the caller offers no such option. A file without records is deleted at the end.
    """

    def __init__(
        self,
        path: str | Path | None,
        run: Run,
        *,
        force: bool | None = None,
    ) -> None:
        self.path: Path | None = None
        self.records: dict[str, dict[str, Any]] = {}
        self._file: IO[str] | None = None
        if path is not None:
            self.path = Path(path)
            self._file = self._open(self.path, run, force)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None and self.path is not None:
            self._file.close()
            if not self.records:
                self.path.unlink(missing_ok=True)

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, records: Mapping[str, dict[str, Any]]) -> None:
        """Add finished pieces by key, and return when they are on disk."""
        self.records |= records
        if self._file is None:
            return
        lines = [
            json.dumps({"key": k, **record}, allow_nan=False)
            for k, record in records.items()
        ]
        try:
            self._file.write("".join(f"{line}\n" for line in lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:  # if half a line was written, the next run drops it
            raise unwritable(str(self.path), error) from error

    def recall(self, key: str, read: Callable[[dict[str, Any]], T]) -> T:
        """Return what `read` makes of the record under a key."""
        try:
            return read(self.records[key])
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ) as error:
            raise InputError(
                f"{self.path} does not hold what a run wrote under {key} ({error}): {_REPEAT}"
            ) from error

    def _open(
        self,
        path: Path,
        run: Run,
        force: bool | None,
    ) -> IO[str]:
        text = ""
        try:
            if exists(path):
                text = read_text(path, "a file to resume from")
        except InputError as error:  # bytes that are no text
            raise InputError(f"{error}: remove it to begin anew") from error
        whole = text[: text.rfind("\n") + 1]  # without a line that a crash cut off
        try:
            if whole:
                self._read_records(path, whole, run, _FIX if force is None else _FORCE)
        except AnotherRun:
            if not force:
                raise
            whole = ""
        try:
            private(path)
            file = path.open("r+", encoding="utf-8")
            file.write(whole or json.dumps(dict(run)) + "\n")
            file.truncate()
            file.flush()
        except (OSError, ValueError) as error:
            raise unwritable(path, error) from error
        return file

    def _read_records(
        self,
        path: Path,
        whole: str,
        run: Run,
        fix: str,
    ) -> None:
        # Not splitlines, because texts may hold other ends of lines.
        first, *lines = whole.rstrip("\n").split("\n")
        expect_same_run(path, run, _line(f"{path}:1", first, AnotherRun, fix), fix)
        for number, text in enumerate(lines, 2):
            where = f"{path}:{number}"
            record = _line(where, text, InputError, _REPEAT)
            key = record.pop("key", None)
            if not isinstance(key, str):
                raise InputError(f"{where} has no key ({text[:40]!r}): {_REPEAT}")
            self.records[key] = record


def _line(
    where: str,
    text: str,
    kind: type[InputError],
    fix: str,
) -> dict[str, Any]:
    """Return the object in a line, or raise an error of this kind, which says the fix."""
    try:
        record = parse(text)
    except ValueError as error:
        raise kind(f"expected JSON in {where}, got {text[:40]!r}: {fix}") from error
    if not isinstance(record, dict):
        raise kind(f"expected an object in {where}, got {text[:40]!r}: {fix}")
    return cast("dict[str, Any]", record)
