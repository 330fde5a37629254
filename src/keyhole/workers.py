"""Who does the work: processes of our own, any executor, or the workers of a Dask cluster.

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
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
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
    with _connected(address) as client:
        yield client.get_executor(), max(1, len(client.nthreads()))


@contextmanager
def workers_at(address: str) -> Generator[Cluster]:
    """A Dask cluster whose workers are spoken to one by one."""
    with _connected(address) as client:
        yield Cluster(address, client)


@contextmanager
def _connected(address: str) -> Generator[Any]:
    if not address.strip():  # for which Dask would start a cluster of its own
        raise InputError("expected the address of a Dask scheduler, got none")
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
        yield client


class Cluster:
    """The workers of a Dask cluster, which may come and go."""

    def __init__(self, address: str, client: Any) -> None:
        self.address, self._client = address, client
        self._devices: dict[str, str] = {}  # by worker: the GPUs that it is let see

    def workers(self, numbered: Mapping[str, int]) -> dict[str, int]:
        """The workers that are there, each with its number on its machine; `numbered` keep theirs.

        Workers that see the same GPUs are numbered among themselves, so that each can take one of
        them; one that sees GPUs of its own, as dask-cuda arranges it, is the first of those.
        """
        try:
            there = sorted(self._client.nthreads())
            unknown = [name for name in there if name not in self._devices]
            if unknown:
                self._devices |= self._client.run(_visible, workers=unknown, on_error="ignore")
        except OSError as error:
            raise KeyholeError(f"expected a Dask scheduler at {self.address}, got none") from error
        made = {name: number for name, number in numbered.items() if name in there}
        for name in there:
            if name not in made:
                like = [made[other] for other in made if self._sees(other) == self._sees(name)]
                made[name] = next(number for number in range(len(like) + 1) if number not in like)
        return made

    def _sees(self, name: str) -> tuple[str, str]:
        return name.rpartition(":")[0], self._devices.get(name, "")

    def executor(self, name: str) -> Executor:
        """For one worker, which has something open: no other takes what was meant for it."""
        return self._client.get_executor(workers=[name], pure=False)


def _visible() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


class Here(Executor):
    """No worker at all: whatever is submitted is done at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Process:
    """One process of our own; it is started when it is needed, and again after it died."""

    def __init__(self) -> None:
        self._own: ProcessPoolExecutor | None = None

    def executor(self) -> Executor:
        if self._own is None:
            with _one_thread():
                self._own = _processes(1)
                self._own.submit(os.getpid)  # started now, while it is to have one thread
        return self._own

    def forget(self) -> None:
        """It died: the next one is another."""
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
            self._own = None

    def close(self, now: bool) -> None:
        """`now`: nobody waits for what is under way."""
        if self._own is None:
            return
        processes = list((self._own._processes or {}).values())  # pyright: ignore[reportPrivateUsage]
        if now:
            for process in processes:
                process.terminate()
        self._own.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _one_thread() -> Generator[None]:
    """Processes inherit it before torch loads: what torch is told later does not reach all
    libraries below it, whose threads then stand in the way of the other processes."""
    before = os.environ.get(_THREADS)
    os.environ.setdefault(_THREADS, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_THREADS, None)


def _processes(count: int) -> ProcessPoolExecutor:
    # Not fork: torch's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, context, _settle_in, (os.getpid(),))


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
        self.threads = ExitStack()

    def __enter__(self) -> Pool:
        if self.given is None:
            self.threads.enter_context(_one_thread())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.threads.close()
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
            self.own = _processes(self.workers)
        return self.own

    def broke(self) -> bool:
        """Forget a broken pool; False where it is the caller's, who alone can make another."""
        if self.own is None:
            return False
        self.own.shutdown(wait=False, cancel_futures=True)
        self.own = None
        return True
