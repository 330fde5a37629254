"""Servers that a benchmark starts as processes of their own, waits for, and kills."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(command: list[str], ready: str, folder: Path) -> Iterator[None]:
    """A command that serves until the end of the block, from when `ready` answers."""
    log = folder / "log"
    with log.open("w") as lines, subprocess.Popen(command, stdout=lines, stderr=lines) as process:
        try:
            if not wait_for(ready, lambda: process.poll() is None):
                raise SystemExit(f"the server did not start: {log.read_text()[-500:]}")
            yield
        finally:
            process.kill()


def wait_for(url: str, alive: Callable[[], bool]) -> bool:
    """Whether the address answers within two minutes, and before its server ends."""
    for _ in range(1200):
        if not alive():
            return False
        with suppress(httpx.TransportError):
            if httpx.get(url).is_success:
                return True
        time.sleep(0.1)
    return False
