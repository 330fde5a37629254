"""How long people wait before anything happens: imports, help, and the Tab key.

Each is a process of its own, the best of several, next to Python's own start in the same run. What
is imported on the way is tested (`tests/cli/test_app.py`): torch is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import show
from keyhole.cli.app import ORDER
from show import Row

TAB = {
    "_KEYHOLE_COMPLETE": "complete_bash",
    "COMP_WORDS": "keyhole extract --meth",
    "COMP_CWORD": "2",
}


# What is started, with what, and how many seconds it may take.
STARTS: dict[str, tuple[list[str], dict[str, str], float | None]] = {
    "python -c pass": (["-c", "pass"], {}, None),
    "import keyhole": (["-c", "import keyhole"], {}, 0.3),
    "keyhole --help": (["-m", "keyhole", "--help"], {}, 0.5),
    "keyhole --version": (["-m", "keyhole", "--version"], {}, 0.5),
    "keyhole extract --meth<Tab>": (["-m", "keyhole"], TAB, 0.5),
    **{
        f"keyhole {name} --help": (["-m", "keyhole", *name.split(), "--help"], {}, 0.5)
        for name in ORDER
    },
}


def run(quick: bool) -> Iterator[Row]:
    for what, (arguments, environment, most) in list(STARTS.items())[: 3 if quick else None]:
        command = [sys.executable, *arguments]
        settings = {"env": os.environ | environment, "check": True, "stdout": subprocess.DEVNULL}
        took = min(
            show.timed(lambda: subprocess.run(command, **settings))[1]  # noqa: B023
            for _ in range(1 if quick else 10)
        )
        met = None if quick or most is None else took < most
        yield show.ratio(what, f"{took:.2f} s", f"< {most} s", met)


if __name__ == "__main__":
    show.main(run)
