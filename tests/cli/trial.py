"""Invocations of Keyhole, each in a process of its own, with bounds on memory and time.

`python trial.py` loads everything once, then reads cases from stdin, one JSON line each, and forks
a process for each: loading torch takes seconds, and there are thousands of cases. A process that
takes too long is killed with all that it began.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

SECONDS = float(os.environ.get("KEYHOLE_FUZZ_SECONDS", "60"))
MEMORY = 500 * 2**20  # bytes above what the process has when it begins
_ROOM = 3 * MEMORY  # a fault shows as too much memory, and not as a machine that swaps


@dataclass(frozen=True)
class Trial:
    """How an invocation ended; `code` is None where it had to be killed."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    memory: int


class Trials:
    """A process that tries invocations, one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, words: Sequence[str], cwd: Path) -> Trial:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(words), str(cwd)]) + "\n")
        self._process.stdin.flush()
        return Trial(**json.loads(self._process.stdout.readline()))


@contextmanager
def trials() -> Iterator[Trials]:
    command = [sys.executable, __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            yield Trials(process)
        finally:
            process.kill()


def _serve() -> None:
    from keyhole.cli import COMMANDS
    from keyhole.cli.app import command

    for name in COMMANDS:
        command(name)
    _warm_up()
    gc.collect()
    gc.freeze()  # else the first collection of every child copies all of it
    for line in sys.stdin:
        words, cwd = json.loads(line)
        print(json.dumps(asdict(_tried(words, cwd))), flush=True)


def _warm_up() -> None:
    """What libraries load when they are first used, they load here and not in every child."""
    from keyhole import report
    from keyhole.cli import app
    from keyhole.core import Audit
    from keyhole.models.demo import open_model

    report.render(Audit("nothing", "", ()))
    open_model("demo", "classification")
    nowhere = contextlib.redirect_stderr(io.StringIO())
    with nowhere, contextlib.suppress(SystemExit):
        app(["lab", "plant", "--dim=x"])


def _tried(words: list[str], cwd: str) -> Trial:
    out, said = Path(f"{cwd}.out"), Path(f"{cwd}.err")
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _invoke(words, cwd, out, said)
    code, used = _awaited(child, began + SECONDS)
    seconds = time.monotonic() - began
    read = [path.read_bytes()[:100_000].decode("utf-8", "replace") for path in (out, said)]
    start = int(Path(f"{cwd}.start").read_text())
    return Trial(code, *read, seconds, (used - start) * 1024)


def _awaited(child: int, end: float) -> tuple[int | None, int]:
    """The exit code, and the most memory in kilobytes."""
    pause = 0.002
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            _, _, usage = os.wait4(child, 0)
            code = None
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # whatever it began and left
    return code, usage.ru_maxrss


def _invoke(words: list[str], cwd: str, out: Path, said: Path) -> None:
    """In the child: `keyhole words…`, and never back."""
    code = 99
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, path in ((0, Path(os.devnull)), (1, out), (2, said)):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(path, flags), number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        os.chdir(cwd)
        os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
        Path(f"{cwd}.start").write_text(sizes["VmRSS"])
        resource.setrlimit(resource.RLIMIT_DATA, (int(sizes["VmData"]) * 1024 + _ROOM,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["keyhole", *words]
        from keyhole.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
