"""A Dask cluster of processes that can be killed one by one, and a record of what each has done.

Its workers also load this file when they start (`dask worker --preload`); each then
records the checks that it begins and ends, in a file for each process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RECORD = "KEYHOLE_TEST_RECORD"
BEGUN = "begun"
ENDED = "ended"
OPENED = "opened"


def dask_setup(worker: Any) -> None:
    """Called in a worker that starts."""
    del worker
    from keyhole.audit import run
    from keyhole.audit.target import NamedTarget

    file = Path(os.environ[RECORD]) / f"{os.getpid()}.jsonl"
    check = run.run_check
    opened = NamedTarget.open
    last = [""]

    def note(what: str, target: str, check: str) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps([what, target, check]) + "\n")

    def recorded(made: Any, *rest: Any) -> Any:
        note(BEGUN, last[0], made.name)
        found = check(made, *rest)
        note(ENDED, last[0], made.name)
        return found

    def seen(named: NamedTarget) -> Any:
        last[0] = named.name
        note(OPENED, named.name, "")
        return opened(named)

    run.run_check = recorded
    NamedTarget.open = seen


class Workers:
    """A scheduler on this machine, and workers of one thread each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "record"
        self.record.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        words = (
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
        )
        self._start("dask_scheduler", *words, str(file))
        _wait(file.exists)
        _wait(lambda: bool(file.read_text()))
        self.address: str = json.loads(file.read_text())["address"]

    def add(self, count: int = 1) -> list[int]:
        """Start workers, wait for all of them, and return their process numbers."""
        import distributed

        words = (
            "--nthreads",
            "1",
            "--no-nanny",
            "--no-dashboard",
            "--preload",
            __file__,
        )
        place = ("--local-directory", str(self.folder))
        began = [
            self._start("dask_worker", self.address, *words, *place)
            for _ in range(count)
        ]
        alive = sum(process.poll() is None for process in self.processes) - 1
        with distributed.Client(self.address) as client:
            client.wait_for_workers(alive, timeout=120)
        return began

    def _start(self, module: str, *words: str) -> int:
        environment = os.environ | {RECORD: str(self.record), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", f"distributed.cli.{module}", *words]
        with (self.folder / f"{module}-{len(self.processes)}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, cwd=self.folder
                )
            )
        return self.processes[-1].pid

    def kill(self, pid: int) -> None:
        process = next(each for each in self.processes if each.pid == pid)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def clear(self) -> None:
        """Forget what was recorded so far."""
        for file in self.record.iterdir():
            file.unlink()

    def recorded(self, what: str, pid: int | None = None) -> Counter[tuple[str, str]]:
        """Count how often each check of each target was begun or ended, by one process or all."""
        counts: Counter[tuple[str, str]] = Counter()
        for file in self.record.glob("*.jsonl" if pid is None else f"{pid}.jsonl"):
            for line in file.read_text().splitlines():
                kind, target, check = json.loads(line)
                counts[target, check] += kind == what
        return +counts

    def under_way(self, pid: int) -> set[tuple[str, str]]:
        """Return the checks that a process has begun and not ended."""
        return set(self.recorded(BEGUN, pid) - self.recorded(ENDED, pid))


@contextmanager
def workers(folder: Path) -> Iterator[Workers]:
    made = Workers(folder)
    try:
        yield made
    finally:
        made.close()


def _wait(condition: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the cluster did not start in time"
        time.sleep(0.05)


def kill_in_the_middle(cluster: Workers, pid: int, after: int) -> set[tuple[str, str]]:
    """Kill a busy worker once `after` checks have ended, and return the checks that it was running.

    Call it while the run continues, which must then run these checks again.
    """
    _wait(
        lambda: cluster.recorded(ENDED).total() >= after and cluster.under_way(pid), 600
    )
    just_before = cluster.under_way(pid)  # one may end without the scheduler knowing
    cluster.kill(pid)
    return just_before | cluster.under_way(pid)
