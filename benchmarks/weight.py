"""The size of two checkouts of Keyhole, and whether both behave the same.

`--before` is a checkout of an earlier commit. Counted in both are lines, files, modules
with a single importer, commands, options, modules that `keyhole disrupt` can import,
and the words of documents. `--same` audits the demo in both, counts the modules whose
functions run, and compares every finding; then it runs a list of commands and compares
statuses and exit codes. `--rows FOLDER FOLDER` compares the rows that quick modes of
benchmarks wrote with `--json`, before and after.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import show
from show import Row

ROOT = Path(__file__).resolve().parent.parent
COMMAND = r"^## `?keyhole [a-z-]+`?$"
OPTION = r"^[- │|`]*(?:-\w,? +)?(--(?!help\b)[a-z][a-z-]*)"


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

    def lines(self, pattern: str) -> int:
        files = [path for path in self.root.glob(pattern) if ".venv" not in path.parts]
        return sum(len(path.read_text("utf-8").splitlines()) for path in files)

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

    def entered(self) -> list[str]:
        """Return the package of each module in which the demo's audit runs a function."""
        with tempfile.TemporaryDirectory() as folder:
            paths = json.loads(self.call(folder, "-c", PROFILED)[1].splitlines()[-1])
        source = self.root / "src" / "keyhole"
        return [Path(path).relative_to(source).parts[0] for path in paths]

    def ends(self) -> dict[str, object]:
        """Return the exit code of each of the commands below, and the status it prints."""
        found: dict[str, object] = {}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "vllm.sh").write_text(
                "vllm serve m --host 0.0.0.0\n", "utf-8"
            )
            for command in COMMANDS:
                code, printed = self.call(
                    folder, "-m", "keyhole", *shlex.split(command)
                )
                found[command] = (
                    code,
                    *re.findall(r'"status": "([^"]+)"', printed)[:1],
                )
        return found


PROFILED = """
import json, runpy, sys, threading
entered = set()
def profile(frame, event, _):
    code = frame.f_code  # flag 1 marks functions, not bodies of modules and classes
    if event == "call" and code.co_flags & 1 and "/keyhole/" in code.co_filename:
        entered.add(code.co_filename)
threading.setprofile(profile)
sys.setprofile(profile)
sys.argv = ["keyhole", "audit", "demo", "--json"]
try:
    runpy.run_module("keyhole", run_name="__main__")
except SystemExit:
    pass
sys.setprofile(None)
print(json.dumps([path for path in entered if path.endswith(".py")]))
"""

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
    "check-config vllm.sh",
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

    for folder in ("src", "benchmarks", "tests"):
        yield row(
            f"lines of {folder}",
            lambda each, folder=folder: each.lines(f"{folder}/**/*.py"),
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
        entered = {checkout: checkout.entered() for checkout in (was, now)}
        yield row("modules that audit demo enters", lambda each: len(entered[each]))
        frame = {"cli", "audit", "assess", "report"}
        yield row(
            "of them in cli, audit, assess and report",
            lambda each: sum(name in frame for name in entered[each]),
        )
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
