"""Outcomes on disk as they come, so that a killed run resumes and attacks nothing twice.

A JSONL file: a first line that says which method on which model, then one line an example, flushed
before the run goes on. A line that was cut off by a crash is dropped. An example is known by what
it says, not by its number, so a longer list of examples continues a shorter one.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from keyhole.data import Example
from keyhole.disrupt.disruption import Control, Outcome
from keyhole.errors import InputError
from keyhole.results import FORMAT


def key(example: Example) -> str:
    """Sixteen hexadecimal digits of everything that the model and the judge see."""
    told = json.dumps([example.id, example.label, example.text, example.second, example.choices])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


class Journal:
    """What is known of a run; `path` None keeps it in memory alone."""

    def __init__(self, path: str | Path | None, method: dict[str, Any], model: str) -> None:
        self.path = None if path is None else Path(path)
        self.outcomes: dict[str, Outcome] = {}
        self.control = Control(0.0, 0.0, 0)
        self.seconds = 0.0
        header = {"format": FORMAT, "method": method, "model": model}
        self._file = None if self.path is None else self._open(self.path, header)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, known: dict[str, Outcome], control: Control, seconds: float) -> None:
        """Outcomes by key, on disk before this returns."""
        self.outcomes |= known
        self.control = self.control.joined(control)
        self.seconds += seconds
        if self._file is None:
            return
        for number, (name, outcome) in enumerate(known.items()):
            line = {
                "key": name, "outcome": outcome.to_dict(), "control": asdict(control),
                "seconds": 0.0 if number else seconds,
            }  # fmt: skip
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _open(self, path: Path, header: dict[str, Any]) -> Any:
        try:
            text = path.read_text("utf-8") if path.exists() else ""
            whole = text[: text.rfind("\n") + 1]  # without a line that a crash cut off
            if whole:
                self._recall(path, whole, header)
            file = path.open("w" if not whole else "r+", encoding="utf-8")
            file.write(whole or json.dumps(header) + "\n")
            file.truncate()
            file.flush()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"expected a file to resume from, got {path}: {error}") from error
        return file

    def _recall(self, path: Path, whole: str, header: dict[str, Any]) -> None:
        lines = whole.splitlines()
        found = _line(path, 1, lines[0])
        # What tuples became on their way through JSON must not count as a difference.
        if found != json.loads(json.dumps(header)):
            raise InputError(
                f"expected outcomes of this method on this model in {path}, got another's: "
                "choose another file to resume from"
            )
        for number, text in enumerate(lines[1:], 2):
            line = _line(path, number, text)
            try:
                self.outcomes[line["key"]] = Outcome.from_dict(line["outcome"])
                self.control = self.control.joined(Control(**line["control"]))
                self.seconds += line["seconds"]
            except (KeyError, TypeError) as error:
                raise InputError(
                    f"expected an outcome in {path}:{number}, got {error!r}"
                ) from error


def _line(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"expected JSON in {path}:{number}, got {text[:40]!r}") from error
    if not isinstance(found, dict):
        raise InputError(f"expected an object in {path}:{number}, got {text[:40]!r}")
    return cast("dict[str, Any]", found)
