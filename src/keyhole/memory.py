"""Memory is looked at before it is taken: sizes that cannot fit are refused in one line.

A machine that runs out of memory ends programs, not always the one that asked. What a caller's
sizes would take is known from their shapes, in whole numbers that cannot overflow.
"""

from __future__ import annotations

import os
from pathlib import Path

from keyhole.errors import InputError

_SHARE = 0.8  # of what is free: something must be left for the work itself


def available() -> int:
    """Bytes that can be had without swapping, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        if free:
            return free[0]
    except (OSError, ValueError):
        pass  # not Linux: all memory that the machine has
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # nor any Unix: nothing is known
        return 2**62


def expect_room(needed: int, what: str) -> None:
    """Refuse `what` where it needs more bytes than there are."""
    free = int(_SHARE * available())
    if needed > free:
        raise InputError(
            f"expected what fits into {_shown(free)} of memory, got {what}: {_shown(needed)} needed"
        )


def _shown(size: int) -> str:
    """Bytes as people read them."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if size >= 10**power:
            return (
                f"{size // 10**power:,} {unit}"
                if size >= 10 ** (power + 2)
                else (f"{size / 10**power:.1f} {unit}")
            )
    return f"{size:,} bytes"
