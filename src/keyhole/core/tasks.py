"""A runner for tasks, in this process, in processes of our own, or on a Dask cluster.

`Runner.add` takes tasks, and `run` yields each as `Done` with its value or its
exception.

A worker is a process, or a worker of a Dask cluster, which may come and go. It runs one
task at a time. Tasks start in order, and may be added while others run.

If a worker dies, only the task that it was running is run again, at most `attempts`
times in all. If a task raises an exception, that is the outcome of the task, and the
run goes on.
"""

from __future__ import annotations

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

from keyhole.core.errors import InputError, KeyholeError, first_line, optional

MOST_PROCESSES = 1024
_POLL = 0.5  # seconds between two looks at the workers of a cluster
_PATIENCE = 60.0  # seconds without any worker before the run fails
_THREADS = "OMP_NUM_THREADS"

Work = Callable[[int], Any]  # called with the worker's number on its machine


@dataclass(frozen=True, eq=False)
class Task:
    """A piece of work, which must be picklable; `key` identifies it for the caller."""

    key: Any
    work: Work
    attempts: int = 3


@dataclass(frozen=True)
class Done:
    """The value that a task returned or the exception that it raised, and its seconds."""

    task: Task
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0


class WorkersLost(KeyholeError):
    """Workers died, and their task cannot be run again."""

    def __init__(self, reason: BaseException | str) -> None:
        super().__init__(
            f"workers were lost ({first_line(reason)}); finished work is kept: "
            "run the same command again"
        )


class Runner:
    """Runs tasks on a number of processes (0: this one), on a Dask cluster, or on an executor.

    A cluster is given by the address of its scheduler.
    """

    def __init__(self, workers: int | str | Executor = 0) -> None:
        self._address: str | None = None
        self.in_process = workers == 0
        self._workers: list[Worker] = []
        if isinstance(workers, str):
            self._address = workers
        elif isinstance(workers, Executor):
            self._workers = [Worker(0, workers, slots=MOST_PROCESSES)]
        elif self.in_process:
            self._workers = [Worker(0, InProcess())]
        else:
            self._workers = [Worker(number) for number in range(max(1, workers))]
        self._cluster: Cluster | None = None
        self._resources = ExitStack()
        self._waiting: deque[Task] = deque()
        self._running: dict[Future[tuple[Any, float]], tuple[Worker, Task]] = {}
        self._deaths: Counter[Task] = Counter()
        self._polled = self._seen = time.monotonic()

    def __enter__(self) -> Runner:
        if self._address is not None:
            self._cluster = self._resources.enter_context(cluster_at(self._address))
            list(self._refresh())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for future in self._running:  # nobody waits for these if the run was stopped
            future.cancel()
        for worker in self._workers:
            worker.close(now=kind is not None)
        self._resources.close()

    def __len__(self) -> int:
        return max(1, len(self._workers))

    def add(self, *tasks: Task) -> None:
        self._waiting.extend(tasks)

    def left(self) -> list[Task]:
        """Return the tasks that are not done yet, running or not."""
        return [*(task for _, task in self._running.values()), *self._waiting]

    def run(self) -> Iterator[Done]:
        """Yield each task when it is done; the caller may add tasks meanwhile."""
        while self._waiting or self._running:
            yield from self._refresh()
            self._assign()
            if not self._running:
                time.sleep(_POLL)  # the cluster has no worker
            for future in wait(self._running, _POLL, FIRST_COMPLETED).done:
                yield from self._finish(future)

    def _finish(self, future: Future[tuple[Any, float]]) -> Iterator[Done]:
        worker, task = self._running.pop(future)
        worker.running -= 1
        try:
            value, seconds = future.result()
        except (BrokenExecutor, CancelledError) as error:
            if not worker.restart():
                raise WorkersLost(error) from error
            yield from self._retry(task, error)
        except Exception as error:
            yield Done(task, error=error)
        else:
            yield Done(task, value, seconds=seconds)

    def _retry(self, task: Task, error: BaseException) -> Iterator[Done]:
        """Run the task of a dead worker next, or give it up after too many deaths."""
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
        """Find out which workers a cluster has now, and retry the tasks of those that left."""
        now = time.monotonic()
        if self._cluster is None or (self._workers and now - self._polled < _POLL):
            return
        self._polled = now
        present = self._cluster.workers(
            {worker.name: worker.number for worker in self._workers}
        )
        kept = [worker for worker in self._workers if worker.name in present]
        for future, (worker, task) in list(self._running.items()):
            if worker not in kept:
                del self._running[future]
                future.cancel()
                yield from self._retry(task, BrokenExecutor("a worker went"))
        names = {worker.name for worker in kept}
        self._workers = kept + [
            Worker(number, self._cluster.executor(name), name)
            for name, number in present.items()
            if name not in names
        ]
        if self._workers:
            self._seen = now
        if now - self._seen > _PATIENCE:
            raise WorkersLost(f"none at {self._address} for a minute")


class Worker:
    """A worker with its number on its machine, and the executor that runs its tasks.

    Without an executor it starts a process of its own on demand, and again after that
    died.
    """

    def __init__(
        self,
        number: int,
        executor: Executor | None = None,
        name: str = "",
        slots: int = 1,
    ) -> None:
        self.number = number
        self.name = name
        self.slots = slots
        self.running = 0
        self._given = executor
        self._own: ProcessPoolExecutor | None = None

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
        """Discard a dead process so that another can start; False if the executor is not ours."""
        if self._own is not None:
            self._own.shutdown(wait=False, cancel_futures=True)
            self._own = None
        return self._given is None

    def close(self, now: bool) -> None:
        """End the process; with `now`, kill it instead of waiting for its task."""
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
            self._own = _start_process()
        return self._own


class InProcess(Executor):
    """An executor that runs tasks at once, in this process."""

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _timed(work: Work, number: int) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(number), time.perf_counter() - started


def _start_process() -> ProcessPoolExecutor:
    """Start a pool of one process, spawned because torch's threads do not survive a fork.

    The environment limits the process to one thread before it loads torch. A later
    setting of torch would not reach all libraries below it, whose threads then slow
    other processes down.
    """
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, context, _begin, (os.getpid(),))
        pool.submit(os.getpid)  # starts the process while the environment is set
        return pool
    finally:
        del os.environ[_THREADS]
        if before is not None:
            os.environ[_THREADS] = before


def _begin(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end when the parent ends, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os._exit(1)


@contextmanager
def cluster_at(address: str) -> Generator[Cluster]:
    """Connect to the Dask cluster whose scheduler is at this address."""
    if not address.strip():  # Dask would then start a cluster of its own
        raise InputError("the address of a Dask scheduler must not be empty")
    reason = "a Dask cluster needs distributed, which is not installed"
    library = optional("distributed", reason, "cluster")
    try:
        client: Any = library.Client(address, timeout="10s")
    except (OSError, ValueError, TypeError) as error:
        # a malformed address
        if isinstance(error, OSError):
            kind = KeyholeError
        else:
            kind = InputError
        raise kind(
            f"no Dask scheduler answers at {address}: {first_line(error)}"
        ) from error
    with client:
        yield Cluster(address, client)


class Cluster:
    """The workers of a Dask cluster, which may come and go."""

    def __init__(self, address: str, client: Any) -> None:
        self.address = address
        self._client = client
        self._devices: dict[str, str] = {}  # the GPUs that each worker may use

    def workers(self, numbered: Mapping[str, int]) -> dict[str, int]:
        """Return each worker's number on its machine; those in `numbered` keep their number.

        Workers that share their GPUs count from 0, so that each can take one of them. A
        worker that has GPUs of its own, as dask-cuda arranges it, has the number 0.
        """
        try:
            present = sorted(self._client.nthreads())
            unknown = [name for name in present if name not in self._devices]
            if unknown:
                self._devices |= self._client.run(
                    _visible_gpus, workers=unknown, on_error="ignore"
                )
        except OSError as error:
            raise KeyholeError(
                f"no Dask scheduler answers at {self.address} any more"
            ) from error
        made = {name: number for name, number in numbered.items() if name in present}
        for name in present:
            if name not in made:
                taken = [
                    made[other]
                    for other in made
                    if self._gpus(other) == self._gpus(name)
                ]
                made[name] = next(
                    number for number in range(len(taken) + 1) if number not in taken
                )
        return made

    def _gpus(self, name: str) -> tuple[str, str]:
        """Return the machine and the GPUs of a worker."""
        return name.rpartition(":")[0], self._devices.get(name, "")

    def executor(self, name: str) -> Executor:
        """Return an executor for this worker alone, which may hold an open target of its own."""
        return self._client.get_executor(workers=[name], pure=False)


def _visible_gpus() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
