"""Count what the rules find in the cases beside them.

    python semgrep/measure.py [SEMGREP]

The exit code is 1 if a closed configuration is accused, or fewer than 80% of the open
ones are found. A case is a line below an annotation: `ruleid` is open, `todoruleid` is
open and missed, `ok` is closed. A file without annotations is closed as a whole.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ANNOTATION = re.compile(r"(?:#|//) ?(ruleid|todoruleid|ok): *([\w, -]+)")


@dataclass(frozen=True)
class Counts:
    """Open cases, those that were found, closed cases, and lines wrongly reported."""

    open: int
    found: int
    closed: int
    accused: tuple[str, ...]

    def __str__(self) -> str:
        share = self.found / self.open
        found = f"open configurations found: {self.found} of {self.open} ({share:.0%})"
        accused = f"closed ones accused: {len(self.accused)} of {self.closed}"
        return f"{found}; {accused}"


def annotations(kind: str, text: str) -> list[str]:
    """Return the rules that annotations of a kind name, once for each line."""
    named = [rules for found, rules in ANNOTATION.findall(text) if found == kind]
    return [rule.strip() for rules in named for rule in rules.split(",")]


def is_case(path: Path) -> bool:
    rules = path.suffix == ".yaml" and not path.name.endswith(".test.yaml")
    return path.is_file() and not rules and path.suffix not in (".md", ".py")


def measure(semgrep: str = "semgrep") -> Counts:
    """Run Semgrep's own test mode on the folder, and count."""
    command = [
        semgrep,
        "scan",
        "--test",
        "--json",
        "--metrics",
        "off",
        "--disable-version-check",
    ]
    done = subprocess.run([*command, str(FOLDER)], capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: a case is not as its annotation says
        sys.exit(done.stderr)
    results: dict[str, Any] = json.loads(done.stdout)["results"]
    checks = [check for file in results.values() for check in file["checks"].items()]
    found = 0
    accused: list[str] = []
    for rule, check in checks:
        for path, lines in check["matches"].items():
            expected = set(lines["expected_lines"])
            reported = set(lines["reported_lines"])
            found += len(expected & reported)
            accused += [
                f"{path}:{line}: {rule}" for line in sorted(reported - expected)
            ]
    texts = [path.read_text("utf-8") for path in FOLDER.rglob("*") if is_case(path)]
    opened = sum(
        len(annotations(k, text)) for text in texts for k in ("ruleid", "todoruleid")
    )
    whole = sum(ANNOTATION.search(text) is None for text in texts)
    closed = whole + sum(len(annotations("ok", text)) for text in texts)
    return Counts(opened, found, closed, tuple(accused))


if __name__ == "__main__":
    counts = measure(*sys.argv[1:2])
    print(counts)
    for line in counts.accused:
        print(line)
    sys.exit(1 if counts.accused or counts.found < 0.8 * counts.open else 0)
