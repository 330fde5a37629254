"""The slow tests, recorded in slow.txt when all tests were last timed."""

from __future__ import annotations

from pathlib import Path

import pytest

QUICK = 0.05  # seconds
TESTS = pytest.StashKey[dict[str, pytest.Item]]()  # all collected tests by node id
_FILE = Path(__file__).parent / "slow.txt"
_HEADER = (
    f"# Tests of which a case took more than {QUICK} s, written by `make timings`: `make check`\n"
    "# leaves them out.\n"
)


def name_of(node: str) -> str:
    """Return the file and function of a node id, without folders and cases."""
    path, _, rest = node.partition("::")
    return f"{Path(path).name}::{rest.partition('[')[0]}"


def slow_names() -> set[str]:
    """Return the tests that were slow when last timed."""
    lines = _FILE.read_text("utf-8").splitlines()
    return {line.split()[-1] for line in lines if not line.startswith("#")}


def write(seconds: dict[str, float]) -> None:
    """Record the slow tests, from the seconds that each took."""
    slow = sorted((name for name in seconds if seconds[name] > QUICK), key=lambda n: -seconds[n])
    lines = [f"{seconds[name]:6.1f} {name}\n" for name in slow]
    _FILE.write_text(_HEADER + "".join(lines), "utf-8")
