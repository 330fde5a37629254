"""What a configuration opens: rules, findings with their lines, and files that were not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from keyhole.core.standards import Standard


class Level(IntEnum):
    """How much is opened: counts and settings, some of what attacks need, or the secret itself."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Rule:
    """Something that a configuration may open: what that is, what closes it, what tries it."""

    id: str
    name: str
    level: Level
    opens: str
    fix: str
    attack: str  # the command that would try it for real
    standards: tuple[Standard, ...] = ()  # what other people's frameworks call it


@dataclass(frozen=True)
class Finding:
    """A rule that applies at a line of a file; `what` is the setting as it stands there."""

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
            "rule": rule.id, "name": rule.name, "level": str(rule.level), "path": self.path,
            "line": self.line, "setting": self.what, "opens": rule.opens, "fix": rule.fix,
            "attack": rule.attack, "standards": [standard.id for standard in rule.standards],
        }  # fmt: skip


@dataclass(frozen=True)
class Recognised:
    """Something in a file that was read, and the settings of it that open something."""

    what: str  # a server, a store, a model, a saved file
    name: str
    line: int
    findings: tuple[Finding, ...] = ()
    path: str = ""


@dataclass(frozen=True)
class Unread:
    """A file of a known kind that could not be looked at, and why: it is not called clean."""

    path: str
    reason: str


@dataclass(frozen=True)
class Skipped:
    """A file that was read, and in which nothing was recognised.

    `mentions` are the programs whose names stand in it all the same; `broken` says that it is not
    valid YAML, as templates are not.
    """

    path: str
    mentions: tuple[str, ...] = ()
    broken: bool = False


@dataclass(frozen=True)
class Checked:
    """All findings, by file and line; `files` is how many were read.

    `ignored` are the rules that were not looked for, `others` how many files are no configurations
    by their names, by the end of the name.
    """

    findings: tuple[Finding, ...]
    unread: tuple[Unread, ...]
    files: int
    ignored: tuple[str, ...] = ()
    recognised: tuple[Recognised, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    others: Mapping[str, int] = field(default_factory=dict[str, int])

    def failing(self, least: Level = Level.MEDIUM) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.rule.level >= least)

    def exit_code(self, least: Level = Level.MEDIUM) -> int:
        """0 nothing is opened, 1 something is, 3 something could not be read."""
        if self.failing(least):
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
                {"path": known.path, "line": known.line, "what": known.what, "name": known.name}
                for known in self.recognised
            ],
            "not_recognised": [asdict(file) for file in self.skipped],
            "unread": [{"path": file.path, "reason": file.reason} for file in self.unread],
            "other_files": dict(self.others),
        }


# A file that may be anybody's, read within bounds: only plain files, only so much of them.
#
# A file is looked through for words of its kind first. One that has none of them is done with,
# however large or broken it is; one that has them must be small enough to be taken apart.

LARGEST = 2**20  # bytes of a text that is taken apart: configurations are written by hand
FURTHEST = 16 * 2**20  # bytes that are looked through for words


class Unreadable(Exception):
    """Why a file of a known kind cannot be looked at."""


@dataclass(frozen=True)
class Source:
    """A text with its lines counted."""

    path: Path
    text: str

    def line_at(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1


def read(path: Path, words: Sequence[str]) -> Source | None:
    """The text, if any of `words` is in it; None if there is nothing to take apart."""
    try:
        with path.open("rb") as file:
            data = file.read(FURTHEST + 1)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    small = data.lower()
    if len(data) <= FURTHEST and not any(word.lower().encode() in small for word in words):
        return None
    if len(data) > LARGEST:
        raise Unreadable(f"more than {LARGEST:,} bytes of configuration")
    return Source(path, _decoded(data))


def _decoded(data: bytes) -> str:
    if b"\0" in data:
        raise Unreadable("not text: it holds a NUL byte")
    return data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
