"""A client that asks a hostile server, and the time and memory that this costs."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import torch
from hostile import DIM, Server
from hostile_cases import Case

from keyhole.oracle import OpenInference


def resident(field: str) -> int:
    """Return VmRSS or its peak VmHWM, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def attack(case: Case) -> tuple[Exception | None, float, int]:
    """Return the error, the seconds until it was raised, and the peak of memory above the start."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    started = time.monotonic()
    caught = None
    with Server(case.behave, case.where, reads=case.reads) as server:
        try:
            _ask(server.url, case)
        except Exception as error:
            caught = error
        seconds = time.monotonic() - started
    return caught, seconds, resident("VmHWM") - before


def _ask(url: str, case: Case) -> None:
    length = 3 if case.reads else 400_000  # larger than the kernel's buffers
    with closing(
        OpenInference(url, "m", batch=2, timeout=case.timeout, retries=case.retries)
    ) as remote:
        remote(torch.zeros(4, length, DIM, dtype=torch.float64))
