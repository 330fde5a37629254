"""Which figures the documents quote, and the records that they come from.

A table or paragraph with measured figures has a mark in front of it,

    <!-- figures: NAME -->

with one or more names, separated by commas. docs/figures/NAME.json is the record: the
measurements (`rows`), their `command`, `commit` and `machine`, and whether the record
is `kept` as the command wrote it, with the raw measurements under `runs`, or was
transcribed from a document, for a `reason`. If the program has changed since, `again`
is today's command. The mark of a paragraph also covers a table directly after it. A
table whose numbers were not measured (formulas, settings, names) says so, with the
reason:

    <!-- not measured: REASON -->

Records have the form of benchmarks/show.py. `make bench` measures on the reader's own
machine and writes into benchmarks/results/, which is not committed.
tests/test_figures.py compares documents with records, and docs/generate.py makes
docs/benchmarks.md from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent / "figures"
TRANSCRIBED = "transcribed from the document"
WRITTEN = "as the command wrote it"
MARK = re.compile(r"<!-- (figures|not measured): (.+?) -->")
NUMBER = re.compile(
    r"(?<![\w/#])(?<!\w[-.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+−]?\d+)?(?!\w|[.,]\d)"
)
# Numbers that are not figures: in code, addresses, pictures, papers and their
# statements, commits and numbered lists.
ASIDE = re.compile(
    r"`[^`]*`|!\[[^\]]*\]|\]\([^)]*\)|<!--.*?-->|^\s*\d+\. |commit\s+[0-9a-f]{7,}|"
    r"arXiv \d+\.\d+|(?:Theorem|Lemma|Proposition|Definition|Section) \d+\.\d+",
    re.DOTALL | re.MULTILINE,
)


def numbers(text: str) -> list[str]:
    """Return the numbers of a text as written, but without commas between thousands."""
    return [
        number.replace(",", "").replace("−", "-") for number in NUMBER.findall(text)
    ]


@dataclass(frozen=True)
class Block:
    """A paragraph, list, table or fenced block of a document, and the mark in front of it."""

    document: Path
    line: int
    text: str
    records: tuple[str, ...] = ()
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.document.name}:{self.line}"

    @property
    def table(self) -> bool:
        return self.text.lstrip().startswith("|")

    @property
    def fenced(self) -> bool:
        return self.text.lstrip().startswith("```")

    @property
    def lines(self) -> list[list[str]]:
        """The numbers of each row of a table, or all numbers of anything else in one list."""
        if not self.table:
            text = self.text if self.fenced else ASIDE.sub("", self.text)
            return [numbers(text)]
        rows = [ASIDE.sub("", row) for row in self.text.splitlines()]
        return [numbers(row) for row in (rows[0], *rows[2:])]

    @property
    def measured(self) -> bool:
        """Whether it looks measured: a number in prose, or in a cell after the first."""
        if self.fenced or self.text.startswith("#"):
            return False
        if not self.table:
            return any(self.lines)
        rows = [
            ASIDE.sub("", row).strip().strip("|") for row in self.text.splitlines()[2:]
        ]
        return any(numbers(cell) for row in rows for cell in row.split("|")[1:])


def blocks(document: Path) -> Iterator[Block]:
    """Yield the blocks of a document, with the marks in front of them."""
    mark: dict[str, Any] = {}
    ahead = False  # whether a mark waits for its block
    for line, text in _pieces(document.read_text("utf-8")):
        if (found := MARK.fullmatch(text.strip())) is not None:
            names = tuple(name.strip() for name in found[2].split(","))
            mark = {"records": names} if found[1] == "figures" else {"reason": found[2]}
            ahead = True
            continue
        block = Block(document, line, text)
        yield replace(block, **mark) if ahead or block.table else block
        mark = mark if ahead and not block.table else {}
        ahead = False
    if ahead:
        raise ValueError(f"nothing follows the last mark of {document.name}")


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Yield runs of lines between empty ones with the number of the first; fences stay whole."""
    held: list[str] = []
    fenced = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        if held and not fenced and (not line.strip() or fence):
            yield number - len(held), "\n".join(held)
            held = []
        if line.strip() or fenced:
            held.append(line)
        if fence and fenced:
            yield number + 1 - len(held), "\n".join(held)
            held = []
        fenced ^= fence


@dataclass(frozen=True)
class Record:
    """One run of one command: what it measured, and where."""

    name: str
    title: str
    command: str
    commit: str
    machine: str
    kept: str
    rows: list[dict[str, Any]]
    note: str = ""
    reason: str = ""
    runs: Sequence[dict[str, Any]] = ()

    @classmethod
    def load(cls, name: str) -> Record:
        path = FIGURES / f"{name}.json"
        if not path.is_file():
            raise FileNotFoundError(f"there is no record {path.name} in docs/figures")
        data = json.loads(path.read_text("utf-8"))
        fields = ("title", "command", "commit", "machine", "kept", "rows")
        if missing := [field for field in fields if not data.get(field)]:
            raise ValueError(f"{path.name} lacks {', '.join(missing)}")
        if data["kept"] not in (TRANSCRIBED, WRITTEN):
            raise ValueError(
                f"kept must be {TRANSCRIBED!r} or {WRITTEN!r} in {path.name}"
            )
        more = {name: data[name] for name in ("note", "reason", "runs") if name in data}
        return cls(name, *(data[field] for field in fields), **more)

    @cached_property
    def values(self) -> list[list[Decimal]]:
        """The numbers of each row, from strings, numbers and the names of columns."""
        return [list(_decimals(row)) for row in self.rows]

    def missing(self, wanted: list[str], *, in_one_row: bool = False) -> list[str]:
        """Return the numbers that the record lacks, to the digits written.

        With `in_one_row` they are the numbers that the best row lacks.
        """
        about = [
            *_decimals([self.title, self.note, self.machine, self.command, self.commit])
        ]
        rows = self.values if in_one_row else [sum(self.values, about)]
        lacking = (
            [n for n in wanted if not any(agree(n, v) for v in row)] for row in rows
        )
        return min(lacking, key=len)


def all_records() -> list[Record]:
    return [Record.load(path.stem) for path in sorted(FIGURES.glob("*.json"))]


def agree(written: str, value: Decimal) -> bool:
    """Return whether a number is the value, rounded to the digits written."""
    number = Decimal(written)
    if number == value:
        return True
    digit = Decimal(1).scaleb(int(number.as_tuple().exponent))
    if digit == 1 and (number < 10 or value == value.to_integral_value()):
        return False  # counts are exact
    return abs(number - value) <= digit / 2


def _decimals(data: object) -> Iterator[Decimal]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _decimals(key)
            yield from _decimals(value)
    elif isinstance(data, list):
        for value in data:
            yield from _decimals(value)
    elif isinstance(data, str):
        yield from map(Decimal, numbers(ASIDE.sub("", data)))
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield Decimal(repr(data))
        yield Decimal(repr(data)) * 100  # a share that is quoted in percent
