"""What Keyhole weighs: two checkouts side by side.

`--before` is a checkout of an earlier commit. Counted in both: lines, files, modules that one other
module imports, commands, options, what `keyhole disrupt` can import, documents and benchmarks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import show
from show import Row

ROOT = Path(__file__).resolve().parent.parent


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

    @property
    def options(self) -> set[str]:
        """Every option that the reference of the command line lists."""
        text = (self.root / "docs" / "cli.md").read_text("utf-8")
        return set(re.findall(r"^[- │|`]*(?:-\w,? +)?(--[a-z][a-z-]*)", text, re.M)) - {"--help"}

    @property
    def commands(self) -> int:
        text = (self.root / "docs" / "cli.md").read_text("utf-8")
        return len(re.findall(r"^## `?keyhole [a-z-]+`?$", text, re.M))

    def lines(self, pattern: str) -> int:
        files = [path for path in self.root.glob(pattern) if ".venv" not in path.parts]
        return sum(len(path.read_text("utf-8").splitlines()) for path in files)

    @property
    def words(self) -> int:
        files = [*(self.root / "docs").rglob("*.md"), self.root / "README.md"]
        return sum(len(path.read_text("utf-8").split()) for path in files)


def run(quick: bool, before: Path = ROOT) -> Iterator[Row]:
    del quick
    was, now = Checkout(before), Checkout(ROOT)

    def row(what: str, first: int, second: int, target: str = "") -> Row:
        return Row(what, f"{first:,} → {second:,}", target)

    yield row("lines of src", was.lines("src/**/*.py"), now.lines("src/**/*.py"), "<= 46,000")
    yield row("files of src", len(was.modules), len(now.modules), "<= 300")
    yield row("modules that one other imports", was.used_once, now.used_once, "<= 20")
    yield row("commands", was.commands, now.commands, "<= 10")
    yield row("option names", len(was.options), len(now.options), "<= 65")
    disrupt = "keyhole.cli.disrupt"
    yield row("modules in reach of keyhole disrupt", was.reached(disrupt), now.reached(disrupt))
    yield row("words of documents", was.words, now.words, "half")
    yield row("lines of benchmarks", was.lines("benchmarks/*.py"), now.lines("benchmarks/*.py"))
    yield row("lines of tests", was.lines("tests/**/*.py"), now.lines("tests/**/*.py"))


if __name__ == "__main__":
    show.main(run)
