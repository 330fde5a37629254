"""What Keyhole weighs, and whether it still does the same: two checkouts side by side.

`--before` is a checkout of an earlier commit. Counted in both: lines, files, modules that one other
module imports, commands, options, what `keyhole disrupt` can import, documents and benchmarks.
`--same` audits the demo in both, counts the modules that this enters and compares every finding,
then runs a list of commands and compares statuses and exit codes; `--rows FOLDER FOLDER` compares
what quick modes of benchmarks wrote with `--json`, before and after.
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
from collections.abc import Iterator
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
        self.root, source = root, root / "src"
        self.modules = {
            ".".join(path.relative_to(source).with_suffix("").parts): path
            for path in source.rglob("*.py")
        }

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """What each module imports of the others, anywhere in it."""
        return {name: set(self._imported(path)) - {name} for name, path in self.modules.items()}

    def _imported(self, path: Path) -> Iterator[str]:
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):  # what only type checkers see is not imported
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if self._known(name) else str(node.module) for name in names]
            else:
                continue
            yield from filter(None, map(self._known, names))

    def _known(self, name: str) -> str | None:
        return next((m for m in (name, f"{name}.__init__") if m in self.modules), None)

    @property
    def used_once(self) -> int:
        """Modules that exactly one other imports."""
        importers = [name for names in self.imports.values() for name in names]
        plain = [name for name in self.modules if not name.endswith("__init__")]
        return sum(importers.count(name) == 1 for name in plain)

    def reached(self, start: str) -> int:
        """Modules that can be imported from here on whatever way, with their packages.

        The packages that look up commands and names on demand are not followed.
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
        """What the reference of the command line has of a pattern: commands or options."""
        return set(re.findall(pattern, (self.root / "docs" / "cli.md").read_text("utf-8"), re.M))

    def lines(self, pattern: str) -> int:
        files = [path for path in self.root.glob(pattern) if ".venv" not in path.parts]
        return sum(len(path.read_text("utf-8").splitlines()) for path in files)

    @property
    def words(self) -> int:
        files = [*(self.root / "docs").rglob("*.md"), self.root / "README.md"]
        return sum(len(path.read_text("utf-8").split()) for path in files)

    def call(self, folder: str, *words: str) -> tuple[int, str]:
        """The exit code of Python with this checkout, and what it prints."""
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src")}
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout

    def findings(self) -> dict[str, object]:
        """What the audit of the demo says of each exposure, and how each attack ended."""
        with tempfile.TemporaryDirectory() as folder:
            code, printed = self.call(folder, "-m", "keyhole", "audit", "demo", "--json")
        audit = json.loads(printed)
        assessed = audit["assessment"]
        found: dict[str, object] = {"exit code": code, "verdict": assessed["verdict"]}
        for row in (*assessed["findings"], *assessed["controls"]):
            what = f"{row.get('part', row.get('surface'))}: {row['exposure']}"
            keys = ("rule", "severity", "score", "share", "exact", "proved")
            found[what] = tuple(row[key] for key in keys)
        ends = [(row["attack"], row["status"], row["queries"]) for row in audit["findings"]]
        return {**found, **{f"end {number}": end for number, end in enumerate(sorted(ends))}}

    def entered(self) -> list[str]:
        """The packages of the modules of which the audit of the demo runs a function."""
        with tempfile.TemporaryDirectory() as folder:
            paths = json.loads(self.call(folder, "-c", PROFILED)[1].splitlines()[-1])
        source = self.root / "src" / "keyhole"
        return [Path(path).relative_to(source).parts[0] for path in paths]

    def ends(self) -> dict[str, object]:
        """How each of the commands below ends: its exit code and the status it prints."""
        found: dict[str, object] = {}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "vllm.sh").write_text("vllm serve m --host 0.0.0.0\n", "utf-8")
            for command in COMMANDS:
                code, printed = self.call(folder, "-m", "keyhole", *shlex.split(command))
                found[command] = (code, *re.findall(r'"status": "([^"]+)"', printed)[:1])
        return found


PROFILED = """
import json, runpy, sys, threading
entered = set()
def profile(frame, event, _):
    code = frame.f_code  # a module's and a class's body are no functions
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
    "audit head.safetensors --force --baseline keyhole-head.safetensors.json",
    "report keyhole-head.safetensors.json --output markdown=-",
    "check-config vllm.sh",
    "audit head.safetensors --fail",
)


def run(
    quick: bool, before: Path = ROOT, same: bool = False, rows: list[Path] | None = None
) -> Iterator[Row]:
    del quick
    was, now = Checkout(before), Checkout(ROOT)

    def row(what: str, first: int, second: int, target: str = "") -> Row:
        return Row(what, f"{first:,} → {second:,}", target)

    yield row("lines of src", was.lines("src/**/*.py"), now.lines("src/**/*.py"), "<= 46,000")
    yield row("files of src", len(was.modules), len(now.modules), "<= 300")
    yield row("modules that one other imports", was.used_once, now.used_once, "<= 20")
    for what, pattern, most in (("commands", COMMAND, 10), ("option names", OPTION, 65)):
        yield row(what, len(was.listed(pattern)), len(now.listed(pattern)), f"<= {most}")
    disrupt = "keyhole.cli.disrupt"
    yield row("modules in reach of keyhole disrupt", was.reached(disrupt), now.reached(disrupt))
    yield row("words of documents", was.words, now.words, "half")
    yield row("lines of benchmarks", was.lines("benchmarks/*.py"), now.lines("benchmarks/*.py"))
    yield row("lines of tests", was.lines("tests/**/*.py"), now.lines("tests/**/*.py"))
    if same:
        entered = was.entered(), now.entered()
        yield row("modules that audit demo enters", *map(len, entered))
        frame = ("cli", "audit", "assess", "report")
        parts = [sum(name in frame for name in names) for names in entered]
        yield row("of them in cli, audit, assess and report", *parts, "<= 25")
        yield from compared("finding", was.findings(), now.findings())
        yield from compared("end of a command", was.ends(), now.ends())
    if rows:
        yield from compared("row", *(_rows(folder) for folder in rows))


def _rows(folder: Path) -> dict[str, object]:
    """The rows of every record in a folder: the promise and whether it was met, not the seconds.

    Whichever program wrote them: rows move from one to another.
    """
    return {
        row["what"]: (row["target"], row["met"] if row["promise"] else None)
        for file in sorted(folder.glob("*.json"))
        for row in json.loads(file.read_text("utf-8"))["rows"]
    }


def compared(what: str, was: dict[str, object], now: dict[str, object]) -> Iterator[Row]:
    same = sum(now.get(name) == value for name, value in was.items())
    whole = same == len(was) == len(now)
    yield Row(f"{what}: the same", f"{same} of {len(was)}, {len(now)} now", "all", whole)
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            yield Row(f"{what}: {name}", f"{was.get(name)} → {now.get(name)}")


if __name__ == "__main__":
    show.main(run)
