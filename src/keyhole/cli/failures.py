"""How a command ends when something goes wrong: one line on stderr, and a code for whose fault.

2 is for what the caller gave, 3 for what the machine or a server did, and for faults of Keyhole
itself, of which `--debug` shows the traceback.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback

from keyhole.cli.console import say
from keyhole.core.errors import InputError, KeyholeError

USAGE, FAILURE, INTERRUPTED = 2, 3, 130  # 0, 1 and 3 follow from statuses: core/status.py
CLOSED = 141  # nobody reads what is printed: what a shell reports of programs that SIGPIPE ends
_LONGEST = 1000  # letters of a line; what people gave may be longer
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def said(error: BaseException, debug: bool = False) -> int:
    """Say what went wrong in one line; the exit code."""
    if debug:
        traceback.print_exception(error)
    if _interrupted(error):
        say("keyhole: stopped", style="yellow")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        forget_output()
        return CLOSED
    line = f"keyhole: {_shown(_words(error))}"
    hint = "" if isinstance(error, KeyholeError | OSError | MemoryError) or debug else _HINT
    say(line + hint, style="bold red")
    return USAGE if isinstance(error, InputError) else FAILURE


_HINT = "; run again with --debug for the traceback"


def forget_output() -> None:
    """What is left to print goes nowhere: Python would try once more, and complain, as it ends."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # a stdout that is no file, as in tests
        pass


def _words(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, KeyholeError):
        return text
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in _NO_MEMORY):
        return "expected enough memory, got none left: try smaller sizes, or fewer at a time"
    if isinstance(error, OSError):
        place = "" if error.filename is None else f" for {error.filename}"
        what = error.strerror or text
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"expected room to write, got {what}{place}"
        return f"expected files and connections that work, got {what}{place}"
    return f"expected no fault of Keyhole itself, got {type(error).__name__}: {text}"


def _shown(text: str) -> str:
    """One line that a terminal can show, whatever people gave or a library said."""
    line = " ".join(text.split())
    safe = "".join(letter if letter.isprintable() else "�" for letter in line)
    return safe if len(safe) <= _LONGEST else f"{safe[: _LONGEST // 2]} … {safe[-_LONGEST // 2 :]}"


def _interrupted(error: BaseException | None) -> bool:
    """Is it Ctrl-C? Libraries that are stopped while they load may call it something else."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
