"""The weight of two checkouts of Keyhole, and whether both behave the same.

Size is counted in tokens of code, without comments, docstrings and layout, because
lines can be won by packing them. Beside it stand figures that show packing: tokens a
line, lines that overrule the formatter, assignments of several values, conditional
expressions.

`--before` is a checkout of an earlier commit. `--same` audits the demo in both and
compares every finding; then it runs a list of commands and compares statuses and exit
codes. `--rows FOLDER FOLDER` compares the rows that quick modes of benchmarks wrote
with `--json`, before and after.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import show
from show import Row

ROOT = Path(__file__).resolve().parent.parent
COMMAND = r"^## `?keyhole [a-z-]+`?$"
OPTION = r"^[- │|`]*(?:-\w,? +)?(--(?!help\b)[a-z][a-z-]*)"


LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
OVERRULED = re.compile("# fmt" + ": (skip|off)")
LONG = 60  # lines of a function, from which on it is counted as long


def weigh_file(path: Path) -> Counter[str]:
    """Count the tokens of code in a file, and the signs of packed lines."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    count = Counter(files=1, overruled=len(OVERRULED.findall(text)))
    docstrings: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                docstrings.add((node.lineno, node.col_offset))
            case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
                count["pairs"] += 1
            case ast.IfExp():
                count["conditionals"] += 1
            case ast.FunctionDef(end_lineno=int(end), lineno=start):
                count["long"] += end - start >= LONG
    holding: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        documents = token.type == tokenize.STRING and token.start in docstrings
        if token.type in LAYOUT or documents:
            continue
        count["tokens"] += 1
        holding.update(range(token.start[0], token.end[0] + 1))
    count["holding"] = len(holding)
    return count


def weigh(folder: Path) -> Counter[str]:
    """Count all Python files below a folder."""
    return sum(map(weigh_file, folder.rglob("*.py")), Counter[str]())


def density(count: Counter[str]) -> float:
    """Return the tokens in a line that holds code."""
    return count["tokens"] / count["holding"]


def conditionals(count: Counter[str]) -> float:
    """Return the conditional expressions per 1,000 tokens."""
    return 1000 * count["conditionals"] / count["tokens"]


class Checkout:
    """The source, documents and benchmarks of one commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        source = root / "src"
        self.modules = {
            ".".join(path.relative_to(source).with_suffix("").parts): path
            for path in source.rglob("*.py")
        }

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The other modules that each module imports, anywhere in its code."""
        return {
            name: set(self._imported(path)) - {name}
            for name, path in self.modules.items()
        }

    def _imported(self, path: Path) -> Iterator[str]:
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):  # imports for type checkers do not count
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [
                    name if self._known(name) else str(node.module) for name in names
                ]
            else:
                continue
            yield from filter(None, map(self._known, names))

    def _known(self, name: str) -> str | None:
        return next((m for m in (name, f"{name}.__init__") if m in self.modules), None)

    @property
    def used_once(self) -> int:
        """The number of modules with exactly one importer."""
        importers = [name for names in self.imports.values() for name in names]
        plain = [name for name in self.modules if not name.endswith("__init__")]
        return sum(importers.count(name) == 1 for name in plain)

    def reached(self, start: str) -> int:
        """Count the modules that can be imported from here, directly or not, with their packages.

        Packages that import commands and names on demand are not followed.
        """
        found = {"keyhole.__init__", "keyhole.cli.__init__"}
        ahead = {start}
        while ahead:
            name = ahead.pop()
            found.add(name)
            package = self._known(name.removesuffix(".__init__").rpartition(".")[0])
            ahead |= (self.imports[name] | ({package} if package else set())) - found
        return len(found) - 2

    def listed(self, pattern: str) -> set[str]:
        """Return the matches of a pattern in the command-line reference: commands or options."""
        return set(
            re.findall(
                pattern, (self.root / "docs" / "cli.md").read_text("utf-8"), re.M
            )
        )

    @property
    def words(self) -> int:
        files = [*(self.root / "docs").rglob("*.md"), self.root / "README.md"]
        return sum(len(path.read_text("utf-8").split()) for path in files)

    def call(self, folder: str, *words: str) -> tuple[int, str]:
        """Run Python with this checkout, and return its exit code and output."""
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src")}
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout

    def findings(self) -> dict[str, object]:
        """Return the findings of the demo's audit, and how each attack ended."""
        with tempfile.TemporaryDirectory() as folder:
            code, printed = self.call(
                folder, "-m", "keyhole", "audit", "demo", "--json"
            )
        audit = json.loads(printed)
        assessed = audit["assessment"]
        found: dict[str, object] = {"exit code": code, "verdict": assessed["verdict"]}
        for row in (*assessed["findings"], *assessed["controls"]):
            what = f"{row['part']}: {row['exposure']}"
            keys = ("rule", "severity", "score", "share", "exact", "proved")
            found[what] = tuple(row[key] for key in keys)
        ends = [
            (row["attack"], row["status"], row["queries"]) for row in audit["findings"]
        ]
        return {
            **found,
            **{f"end {number}": end for number, end in enumerate(sorted(ends))},
        }

    def ends(self) -> dict[str, object]:
        """Return the exit code of each of the commands below, and the status it prints."""
        found: dict[str, object] = {}
        with tempfile.TemporaryDirectory() as folder:
            for command in COMMANDS:
                code, printed = self.call(
                    folder, "-m", "keyhole", *shlex.split(command)
                )
                found[command] = (
                    code,
                    *re.findall(r'"status": "([^"]+)"', printed)[:1],
                )
        return found


COMMANDS = (
    "lab plant head.safetensors -o dim=6",
    "extract head.safetensors --json",
    "extract head.safetensors --method sign-only --json",
    "extract head.safetensors --budget 10 --json",
    "extract missing.safetensors",
    "extract head.safetensors --method nonsense",
    "lab plant layer.safetensors --kind inversion -o dim=4 -o tokens=4",
    "invert layer.safetensors --json",
    'lab capture demo --text "a secret" --expose hidden:3 --out leak.safetensors',
    "recover demo leak.safetensors --json",
    "disrupt demo --examples 1 --json",
    "audit head.safetensors",
    "audit head.safetensors --output json=again.json --baseline keyhole-head.safetensors.json",
    "report keyhole-head.safetensors.json --output markdown=-",
    "audit head.safetensors --fail",
)


def run(
    quick: bool,
    before: Path = ROOT,
    same: bool = False,
    rows: list[Path] = [],  # noqa: B006 - read, never changed
) -> Iterator[Row]:
    del quick
    was = Checkout(before)
    now = Checkout(ROOT)

    def row(what: str, measure: Callable[[Checkout], int]) -> Row:
        return Row(what, f"{measure(was):,} → {measure(now):,}")

    for folder in ("src", "tests", "benchmarks"):
        old = weigh(was.root / folder)
        new = weigh(now.root / folder)
        for what in ("tokens", "overruled", "pairs", "long"):
            yield Row(f"{what} of {folder}", f"{old[what]:,} → {new[what]:,}")
        yield Row(
            f"tokens a line of {folder}", f"{density(old):.1f} → {density(new):.1f}"
        )
        yield Row(
            f"conditional expressions per 1,000 tokens of {folder}",
            f"{conditionals(old):.2f} → {conditionals(new):.2f}",
        )
    yield row("files of src", lambda each: len(each.modules))
    yield row("modules with a single importer", lambda each: each.used_once)
    yield row("commands", lambda each: len(each.listed(COMMAND)))
    yield row("option names", lambda each: len(each.listed(OPTION)))
    yield row(
        "modules in reach of keyhole disrupt",
        lambda each: each.reached("keyhole.cli.disrupt"),
    )
    yield row("words of documents", lambda each: each.words)
    if same:
        yield from compared("finding", was.findings(), now.findings())
        yield from compared("end of a command", was.ends(), now.ends())
    if rows:
        yield from compared("row", *(_rows(folder) for folder in rows))


def _rows(folder: Path) -> dict[str, object]:
    """Return the target of each row in a folder of records, and whether a promise was met.

    Rows are found by name in any file, because they move between programs.
    """
    return {
        row["what"]: (row["target"], row["met"] if row["promise"] else None)
        for file in sorted(folder.glob("*.json"))
        for row in json.loads(file.read_text("utf-8"))["rows"]
    }


def compared(
    what: str, was: dict[str, object], now: dict[str, object]
) -> Iterator[Row]:
    same = sum(now.get(name) == value for name, value in was.items())
    whole = same == len(was) == len(now)
    yield Row(
        f"{what}: the same", f"{same} of {len(was)}, {len(now)} now", "all", whole
    )
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            yield Row(f"{what}: {name}", f"{was.get(name)} → {now.get(name)}")


if __name__ == "__main__":
    show.main(run)
