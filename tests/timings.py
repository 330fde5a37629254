"""Which tests are slow: what took long when all of them were last timed, in slow.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

QUICK = 0.05  # seconds
TESTS = pytest.StashKey[dict[str, pytest.Item]]()  # all that were collected, by address
_FILE = Path(__file__).parent / "slow.txt"
_HEADER = (
    f"# Tests of which a case took more than {QUICK} s, written by `make timings`: `make check`\n"
    "# leaves them out.\n"
)


def name_of(node: str) -> str:
    """`test_page.py::test_verdicts` of a test's address: folders and cases left out."""
    path, _, rest = node.partition("::")
    return f"{Path(path).name}::{rest.partition('[')[0]}"


def slow_names() -> set[str]:
    """What was slow when it was last timed."""
    lines = _FILE.read_text("utf-8").splitlines()
    return {line.split()[-1] for line in lines if not line.startswith("#")}


def write(seconds: dict[str, float]) -> None:
    """Remember what is slow, from the seconds that each took."""
    slow = sorted((name for name in seconds if seconds[name] > QUICK), key=lambda n: -seconds[n])
    lines = [f"{seconds[name]:6.1f} {name}\n" for name in slow]
    _FILE.write_text(_HEADER + "".join(lines), "utf-8")
