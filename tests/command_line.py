"""Keyhole as a process, for the tests of its commands; and in this process, where that will do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from keyhole.cli import main


def keyhole(
    *arguments: object, cwd: Path, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "keyhole", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )


def inside(*arguments: object, cwd: Path, monkeypatch, capsys) -> subprocess.CompletedProcess[str]:
    """The whole command, exit code and all, without the seconds that torch takes to load."""
    command = ["keyhole", *map(str, arguments)]
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", command)
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    out, words = capsys.readouterr()
    return subprocess.CompletedProcess(command, code, out, words)
