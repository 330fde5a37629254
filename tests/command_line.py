"""Keyhole as a process, for the tests of its commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def keyhole(
    *arguments: object, cwd: Path, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "keyhole", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )
