"""Through which modules of Keyhole a call came: what a parameter passes on its way down."""

from __future__ import annotations

import sys

SEEN: list[str] = []


def remember() -> None:
    """Note the modules between the command's function and the caller, from the top down."""
    modules: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if (
            name.startswith("keyhole.")
            and name not in modules
            and name != "keyhole.cli.app"
        ):
            modules.append(name)
        frame = frame.f_back
    SEEN[:] = modules[::-1]
