"""Who does the work of a sweep: processes of our own, any executor, or a Dask cluster's workers.

Processes have one thread each and ignore Ctrl-C, which is for the process that people talk to; when
that one is killed, they end by themselves. When one of them dies, the pool can be made again.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from keyhole.errors import InputError, KeyholeError, MissingExtra

MOST_PROCESSES = 1024
_THREADS = "OMP_NUM_THREADS"
_LOOK = 0.5  # seconds between looks at whether the parent is alive


@contextmanager
def cluster(address: str | None) -> Generator[tuple[Executor | None, int]]:
    """A Dask cluster as an executor and its number of workers; None and 0 without an address."""
    if address is None:
        yield None, 0
        return
    try:
        library = importlib.import_module("distributed")
    except ImportError as missing:
        raise MissingExtra(
            "expected distributed for a Dask cluster, got none: pip install 'keyhole[cluster]'"
        ) from missing
    try:
        client: Any = library.Client(address, timeout="10s")
    except (OSError, ValueError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = KeyholeError if isinstance(error, OSError) else InputError  # else: no address
        raise kind(f"expected a Dask scheduler at {address}, got {first}") from error
    with client:
        yield client.get_executor(), max(1, len(client.scheduler_info()["workers"]))


def _settle_in(parent: int) -> None:
    """One thread a process; Ctrl-C is for the process that people talk to, and ends with it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A worker whose parent was killed would wait, or work, for ever."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


class Pool:
    """The caller's executor, or processes of our own that can be replaced when one dies."""

    def __init__(self, given: Executor | None, workers: int | None) -> None:
        self.given = given
        self.workers = workers or os.cpu_count() or 1
        self.own: ProcessPoolExecutor | None = None
        self.others = multiprocessing.active_children()
        self.threads: str | None = None

    def __enter__(self) -> Pool:
        # Processes inherit it before torch loads: what torch is told later does not reach all
        # libraries below it, whose threads then stand in the way of the other processes.
        self.threads = os.environ.get(_THREADS)
        if self.given is None:
            os.environ.setdefault(_THREADS, "1")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.threads is None:
            os.environ.pop(_THREADS, None)
        if self.own is None:
            return
        if kind is not None:  # stopped: nobody waits for what is under way
            for process in multiprocessing.active_children():
                if process not in self.others:
                    process.terminate()
        self.own.shutdown(wait=True, cancel_futures=True)

    @property
    def window(self) -> int:
        """How much may be under way: enough to keep workers busy, little to lose with a pool."""
        return 2 * self.workers

    def executor(self) -> Executor:
        if self.given is not None:
            return self.given
        if self.own is None:
            # Not fork: torch's threads do not survive it.
            context = multiprocessing.get_context("spawn")
            self.own = ProcessPoolExecutor(self.workers, context, _settle_in, (os.getpid(),))
        return self.own

    def broke(self) -> bool:
        """Forget a broken pool; False where it is the caller's, who alone can make another."""
        if self.own is None:
            return False
        self.own.shutdown(wait=False, cancel_futures=True)
        self.own = None
        return True
