"""Processes that have torch loaded, because loading it takes seconds and tests need many processes.

A server that has imported everything forks them (multiprocessing's forkserver). Like a
process of a shell, each has its own folder, arguments, output files, exit code and
signals. The start of a process itself is tested with `command_line.started`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "keyhole.cli",
        "keyhole.extract",
        "keyhole.invert",
        "keyhole.models",
        "keyhole.report",
        "transformers.models.bert.modeling_bert",
        "transformers.models.gpt2.modeling_gpt2",
    ]
)


@contextmanager
def started(
    work: Callable[..., object], *arguments: object, cwd: Path
) -> Iterator[Warm]:
    """Run `work(*arguments)` in a process, which is killed at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        process = Warm(work, arguments, cwd, Path(folder))
        try:
            yield process
        finally:
            process.kill()


class Warm:
    """A running process, and the files that it writes to."""

    def __init__(
        self,
        work: Callable[..., object],
        arguments: Sequence[object],
        cwd: Path,
        folder: Path,
    ) -> None:
        self._out = folder / "out"
        self._words = folder / "words"
        given = (
            work,
            arguments,
            str(cwd),
            str(self._out),
            str(self._words),
            dict(os.environ),
        )
        self._process = _SERVER.Process(target=_live, args=given, daemon=False)
        self._process.start()

    def finish(self, timeout: float = 240) -> CompletedProcess[str]:
        """Wait for its end, and return its exit code and output."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutExpired(
                str(self._process), timeout, output=self._words.read_bytes()
            )
        return CompletedProcess(
            [], code, self._out.read_text(), self._words.read_text()
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def out(self) -> str:
        """Its output to stdout so far."""
        return self._out.read_text()

    @property
    def words(self) -> str:
        """Its output to stderr so far."""
        return self._words.read_text()

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        with suppress(
            ProcessLookupError, PermissionError
        ):  # it has ended, with all its children
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def finished(
    work: Callable[..., object], *arguments: object, cwd: Path, timeout: float = 240
) -> CompletedProcess[str]:
    """Run `work(*arguments)` in a process, and return its exit code and output."""
    with started(work, *arguments, cwd=cwd) as process:
        return process.finish(timeout)


def script(path: str, *arguments: str) -> None:
    """`python -W error path arguments…`"""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).absolute().parent))
    runpy.run_path(path, run_name="__main__")


def code(text: str, *arguments: str) -> None:
    """`python -W error -c text arguments…`"""
    sys.argv = ["-c", *arguments]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def _live(
    work: Callable[..., object],
    arguments: Sequence[object],
    cwd: str,
    out: str,
    words: str,
    environment: dict[str, str],
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in ((1, out), (2, words)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # a CPU without bfloat16
    work(*arguments)
