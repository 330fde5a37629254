"""One runner for tasks: in this process, in processes of our own, or on a Dask cluster.

A worker is an executor of one: a process, or one worker of a Dask cluster, which may come and go.
Tasks are done in their order, and may be added while others run.

Where a worker dies, the task that it was running runs again, and that one alone; after `attempts`
deaths it is given up. Whatever a task raises is its outcome, not the end of the run.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from keyhole.core.errors import InputError, KeyholeError, MissingExtra, first_line

MOST_PROCESSES = 1024
_POLL = 0.5  # seconds between looks at which workers are there
_PATIENCE = 60.0  # seconds without any worker
_THREADS = "OMP_NUM_THREADS"

Work = Callable[[int], Any]  # called with the number of the worker on its machine


@dataclass(frozen=True, eq=False)
class Task:
    """Something to do, picklable; `key` is what the caller knows it by."""

    key: Any
    work: Work
    attempts: int = 3


@dataclass(frozen=True)
class Done:
    """What a task gave, or why it gave nothing, and the seconds that it took."""

    task: Task
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0


class WorkersLost(KeyholeError):
    """Workers died, and the task cannot be run again."""

    def __init__(self, reason: BaseException | str) -> None:
        why = reason if isinstance(reason, str) else first_line(reason)
        super().__init__(
            f"workers were lost ({why}); finished work is kept: run the same command again"
        )


class Runner:
    """Runs tasks on so many processes (0: this one), on the Dask cluster at an address, or on an
    executor of the caller's."""

    def __init__(self, workers: int | str | Executor = 0) -> None:
        self._address = workers if isinstance(workers, str) else None
        self.in_process = workers == 0
        self._workers: list[Worker] = []
        if isinstance(workers, Executor):
            self._workers = [Worker(0, workers, slots=MOST_PROCESSES)]
        elif not isinstance(workers, str):
            executor = InProcess() if workers == 0 else None
            self._workers = [Worker(number, executor) for number in range(max(1, workers))]
        self._cluster: Cluster | None = None
        self._resources = ExitStack()
        self._waiting: deque[Task] = deque()
        self._running: dict[Future[tuple[Any, float]], tuple[Worker, Task]] = {}
        self._deaths: Counter[Task] = Counter()
        self._polled = self._seen = time.monotonic()

    def __enter__(self) -> Runner:
        if self._address is not None:
            self._cluster = self._resources.enter_context(cluster_at(self._address))
            for _ in self._refresh():  # nothing is running yet
                pass
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for future in self._running:  # a stopped run: nobody waits for what is running
            future.cancel()
        for worker in self._workers:
            worker.close(now=kind is not None)
        self._resources.close()

    def __len__(self) -> int:
        """How many workers there are."""
        return max(1, len(self._workers))

    def add(self, *tasks: Task) -> None:
        self._waiting.extend(tasks)

    def left(self) -> list[Task]:
        """What is not done yet, running or not."""
        return [*(task for _, task in self._running.values()), *self._waiting]

    def run(self) -> Iterator[Done]:
        """Every task's outcome as it comes; between two of them the caller may add more."""
        while self._waiting or self._running:
            yield from self._refresh()
            self._assign()
            if not self._running:
                time.sleep(_POLL)  # no worker is there
            for future in wait(self._running, _POLL, FIRST_COMPLETED).done:
                yield from self._settled(future)

    def _settled(self, future: Future[tuple[Any, float]]) -> Iterator[Done]:
        worker, task = self._running.pop(future)
        worker.running -= 1
        try:
            value, seconds = future.result()
        except (BrokenExecutor, CancelledError) as error:
            if not worker.restart():
                raise WorkersLost(error) from error
            yield from self._again(task, error)
        except Exception as error:
            yield Done(task, error=error)
        else:
            yield Done(task, value, seconds=seconds)

    def _again(self, task: Task, error: BaseException) -> Iterator[Done]:
        """Its worker died: it is the next one, unless it is what they die of."""
        self._deaths[task] += 1
        if self._deaths[task] >= task.attempts:
            yield Done(task, error=WorkersLost(error))
        else:
            self._waiting.appendleft(task)

    def _assign(self) -> None:
        for worker in self._workers:
            while self._waiting and worker.running < worker.slots:
                task = self._waiting.popleft()
                self._running[worker.start(task)] = worker, task

    def _refresh(self) -> Iterator[Done]:
        """Which workers a cluster has now; what those that went were running runs again."""
        now = time.monotonic()
        if self._cluster is None or (self._workers and now - self._polled < _POLL):
            return
        self._polled = now
        present = self._cluster.workers({worker.name: worker.number for worker in self._workers})
        kept = [worker for worker in self._workers if worker.name in present]
        for future, (worker, task) in list(self._running.items()):
            if worker not in kept:
                del self._running[future]
                future.cancel()
                yield from self._again(task, BrokenExecutor("a worker went"))
        names = {worker.name for worker in kept}
        self._workers = kept + [
            Worker(number, self._cluster.executor(name), name)
            for name, number in present.items()
            if name not in names
        ]
        self._seen = now if self._workers else self._seen
        if now - self._seen > _PATIENCE:
            raise WorkersLost(f"none at {self._address} for a minute")


class Worker:
    """One worker: its executor (by default a process of our own, started when it is needed and
    again after it died) and its number on its machine."""

    def __init__(
        self, number: int, executor: Executor | None = None, name: str = "", slots: int = 1
    ) -> None:
        self.number, self.name, self.slots = number, name, slots
        self.running = 0
        self._given, self._own = executor, None

    def start(self, task: Task) -> Future[tuple[Any, float]]:
        try:
            future = self._executor().submit(_timed, task.work, self.number)
        except (BrokenExecutor, RuntimeError) as error:  # it died between two tasks
            if not self.restart():
                raise WorkersLost(error) from error
            future = self._executor().submit(_timed, task.work, self.number)
        self.running += 1
        return future

    def restart(self) -> bool:
        """After a death; False where the executor is not ours to replace."""
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
            self._own = None
        return self._given is None

    def close(self, now: bool) -> None:
        """`now`: nobody waits for what is running."""
        if self._own is None:
            return
        if now:
            for process in list((self._own._processes or {}).values()):  # pyright: ignore[reportPrivateUsage]
                process.terminate()
        self._own.shutdown(wait=True, cancel_futures=True)

    def _executor(self) -> Executor:
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = _process()
        return self._own


class InProcess(Executor):
    """Whatever is submitted is done at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _timed(work: Work, number: int) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(number), time.perf_counter() - started


def _process() -> ProcessPoolExecutor:
    """A pool of one process, spawned, because torch's threads do not survive a fork.

    It inherits one thread before torch loads: what torch is told later does not reach all libraries
    below it, whose threads then stand in the way of other processes.
    """
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, context, _begin, (os.getpid(),))
        pool.submit(os.getpid)  # started now
        return pool
    finally:
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before


def _begin(parent: int) -> None:
    """Ctrl-C is for the parent, with which its workers end, killed or not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os._exit(1)


@contextmanager
def cluster_at(address: str) -> Generator[Cluster]:
    """The Dask cluster whose scheduler is at an address."""
    if not address.strip():  # for which Dask would start a cluster of its own
        raise InputError("the address of a Dask scheduler must not be empty")
    try:
        library = importlib.import_module("distributed")
    except ImportError as missing:
        raise MissingExtra(
            "a Dask cluster needs distributed, which is not installed", "cluster"
        ) from missing
    try:
        client: Any = library.Client(address, timeout="10s")
    except (OSError, ValueError, TypeError) as error:
        kind = KeyholeError if isinstance(error, OSError) else InputError  # else: no address
        raise kind(f"no Dask scheduler answers at {address}: {first_line(error)}") from error
    with client:
        yield Cluster(address, client)


class Cluster:
    """The workers of a Dask cluster, which may come and go."""

    def __init__(self, address: str, client: Any) -> None:
        self.address, self._client = address, client
        self._devices: dict[str, str] = {}  # by worker: the GPUs that it may see

    def workers(self, numbered: Mapping[str, int]) -> dict[str, int]:
        """The workers that are there, each with its number on its machine; `numbered` keep theirs.

        Workers that see the same GPUs are numbered among themselves, so that each can take one of
        them; one that sees GPUs of its own, as dask-cuda arranges it, is the first of those.
        """
        try:
            present = sorted(self._client.nthreads())
            unknown = [name for name in present if name not in self._devices]
            if unknown:
                self._devices |= self._client.run(_visible, workers=unknown, on_error="ignore")
        except OSError as error:
            raise KeyholeError(f"no Dask scheduler answers at {self.address} any more") from error
        made = {name: number for name, number in numbered.items() if name in present}
        for name in present:
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
