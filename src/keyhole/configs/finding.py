"""The results of a check: rules, findings with their lines, and files that could not be read.

registry.py reads each file (`read`), looks for rules in it, and returns everything as
`Checked`.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from keyhole.core.standards import Standard


class Level(IntEnum):
    """How much is exposed: low is counts and settings, medium helps attacks, high is the secret."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Rule:
    """One way in which a configuration may expose something (`opens`), and its `fix`."""

    id: str
    name: str
    level: Level
    opens: str
    fix: str
    attack: str  # the command that would try it for real
    standards: tuple[Standard, ...] = ()  # the entries of other frameworks


@dataclass(frozen=True)
class Finding:
    """A rule that applies at a line of a file; `what` is the setting as the file has it."""

    rule: Rule
    line: int
    what: str
    path: str = ""

    @property
    def message(self) -> str:
        return f"{self.what}: {self.rule.opens}"

    def to_dict(self) -> dict[str, Any]:
        rule = self.rule
        return {
            "rule": rule.id,
            "name": rule.name,
            "level": str(rule.level),
            "path": self.path,
            "line": self.line,
            "setting": self.what,
            "opens": rule.opens,
            "fix": rule.fix,
            "attack": rule.attack,
            "standards": [standard.id for standard in rule.standards],
        }


@dataclass(frozen=True)
class Recognised:
    """A program or file that was recognised, and the findings in its settings."""

    what: str  # a server, a store, a model, a saved file
    name: str
    line: int
    findings: tuple[Finding, ...] = ()
    path: str = ""


@dataclass(frozen=True)
class Unread:
    """A file of a known kind that could not be read, with the reason: the check is not clean."""

    path: str
    reason: str


@dataclass(frozen=True)
class Skipped:
    """A file that was read, and in which nothing was recognised.

    `mentions` lists the programs that it names all the same. `broken` means that it is
    not valid YAML, which is usual for templates.
    """

    path: str
    mentions: tuple[str, ...] = ()
    broken: bool = False


@dataclass(frozen=True)
class Checked:
    """All findings, by file and line.

    `files` counts the files that were read, `ignored` lists the rules that were not
    checked, and `others` counts, by suffix, the files whose names are not those of
    configurations.
    """

    findings: tuple[Finding, ...]
    unread: tuple[Unread, ...]
    files: int
    ignored: tuple[str, ...] = ()
    recognised: tuple[Recognised, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    others: Mapping[str, int] = field(default_factory=dict[str, int])

    def exit_code(self, least: Level = Level.MEDIUM) -> int:
        """Return 1 if something is exposed, 3 if a file could not be read, 0 otherwise."""
        if any(finding.rule.level >= least for finding in self.findings):
            return 1
        return 3 if self.unread else 0

    def to_dict(self, least: Level = Level.MEDIUM) -> dict[str, Any]:
        return {
            "format": 1,
            "kind": "check-config",
            "files": self.files,
            "fail_on": str(least),
            "ignored": list(self.ignored),
            "exit_code": self.exit_code(least),
            "findings": [finding.to_dict() for finding in self.findings],
            "recognised": [
                {
                    "path": known.path,
                    "line": known.line,
                    "what": known.what,
                    "name": known.name,
                }
                for known in self.recognised
            ],
            "not_recognised": [asdict(file) for file in self.skipped],
            "unread": [asdict(file) for file in self.unread],
            "other_files": dict(self.others),
        }


# Files come from anybody, so the size of what is read and parsed is bounded.

MAX_PARSED = 2**20  # bytes; configurations are written by hand
MAX_SEARCHED = 16 * 2**20  # bytes


class Unreadable(Exception):
    """Raised with the reason if a file of a known kind cannot be read."""


@dataclass(frozen=True)
class Source:
    """A file with its text."""

    path: Path
    text: str = ""

    def line_at(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1


def read(path: Path, words: Sequence[str]) -> Source | None:
    """Read a file; return None if it contains none of `words`, even if it is broken."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SEARCHED + 1)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    size = len(data)
    if data.startswith(
        (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    ):  # as PowerShell writes
        data = data.decode("utf-16", "replace").encode()
    # Without the bytes between the letters in text of 16 or 32 bits, whose encoding is
    # unknown.
    lower = data.lower().replace(b"\0", b"")
    if size <= MAX_SEARCHED and not any(
        word.lower().encode() in lower for word in words
    ):
        return None
    if size > MAX_PARSED:
        raise Unreadable(f"more than {MAX_PARSED:,} bytes of configuration")
    if b"\0" in data:
        raise Unreadable("not text: it holds a NUL byte")
    return Source(path, data.decode("utf-8-sig", "replace").replace("\r\n", "\n"))
