"""Every benchmark runs in its quick mode, so that none rots; speed is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SHARED = {"show", "texts", "mismatches"}
BENCHMARKS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_quick(name, tmp_path):
    command = [sys.executable, "-W", "error", f"{name}.py", "--quick", "--json"]
    done = subprocess.run(
        [*command, str(tmp_path / "rows.json")],
        cwd=FOLDER, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows
    assert all(row["what"] in done.stdout for row in rows)
