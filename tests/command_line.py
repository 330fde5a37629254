"""Runs commands of Keyhole for tests, as a process of their own or in this process.

Tests start all their processes here, so that none is left when a test ends, however it
ends.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keyhole.cli import main
from keyhole.cli.app import command_line

PYTHON = (sys.executable, "-W", "error")
KEYHOLE = (*PYTHON, "-m", "keyhole")


@contextmanager
def started(
    command: Sequence[object], **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a group of its own, which is killed at the end."""
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    } | options
    command = [str(word) for word in command]
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # all of them have ended by themselves
                os.killpg(process.pid, signal.SIGKILL)


def finished(
    command: Sequence[object], timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, and return its exit code and output."""
    with started(command, **options) as process:
        out, words = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, words)


def interrupted(
    line: str,
    cwd: Path,
    ready: Callable[[subprocess.Popen[str]], bool],
    timeout: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Run a command, and send it Ctrl-C as soon as it is `ready`."""
    with started([*KEYHOLE, *line.split()], cwd=cwd) as process:
        deadline = time.monotonic() + timeout
        while not ready(process):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "it was not ready in time"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, words = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, words)


def parts(name: str) -> dict[str, Any]:
    """Return the commands of a group (`lab plant`, `lab same`), or the command itself, by name."""
    made = command_line().get_command(None, name)
    inner: dict[str, Any] = getattr(made, "commands", {})
    return {f"{name} {part}": inner[part] for part in inner} or {name: made}


def inside(
    *words: object, cwd: Path, monkeypatch, capsys
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, without the seconds that torch takes to load.

    Its words may be given together or apart; one with a space in it needs quotes, as in a shell.
    """
    command = ["keyhole", *shlex.split(" ".join(map(str, words)))]
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", command)
    capsys.readouterr()  # drop earlier output
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    return subprocess.CompletedProcess(command, code, *capsys.readouterr())
