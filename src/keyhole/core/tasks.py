"""Tasks for several workers, each of which goes on with what it has opened.

A task belongs to a group: what has to be opened for it, such as a model. A worker stays with its
group; then it takes a group that nobody is at, the costliest first, so that a large one does not
remain for the end; then it helps where most is left. A worker is an executor of one: a process of
our own, or one worker of a Dask cluster, which may come and go. Tasks may be added while others
run.

Where a worker dies, the task that it had under way runs again, and that one alone; a task whose
workers keep dying is given up. Whatever a task raises is its outcome, not the crew's end.
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

import torch

from keyhole.core.errors import InputError, KeyholeError, MissingExtra

_DEATHS = 3  # of the workers of one task, before it is given up
_LOOK = 0.5  # seconds between looks at who is there
_PATIENCE = 60.0  # seconds without any worker
_COMPARED = 1000  # tasks of a group that are compared: of more, the first is taken

Work = Callable[[int], Any]  # called with the number of the worker on its machine


@dataclass(frozen=True, eq=False)
class Task:
    """Something to do, which other processes can be sent; `group` is what is opened for it.

    `stays` says that it must not leave this machine, and that all of its group share one process.
    """

    key: str
    work: Work
    group: str = ""
    stays: bool = False


@dataclass(frozen=True)
class Done:
    """What a task gave, or why it gave nothing, and the seconds that it took."""

    task: Task
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0


class Member:
    """One worker of a crew: its executor, its number on its machine, and what it is at."""

    def __init__(self, number: int, source: Process | Executor, name: str = "") -> None:
        self.number, self.source, self.name = number, source, name
        self.group: str | None = None
        self.busy = False

    def executor(self) -> Executor:
        return self.source.executor() if isinstance(self.source, Process) else self.source

    def renewed(self) -> bool:
        """After a death: is there another in its place?"""
        if isinstance(self.source, Process):
            self.source.forget()
            return True
        return False

    def close(self, now: bool) -> None:
        if isinstance(self.source, Process):
            self.source.close(now)


class Crew:
    """So many processes of our own, 0 for none but this one; the workers of a cluster; or given
    executors of one worker each.

    `cost` says of a task what it will cost, in any unit; without it, tasks are alike.
    """

    def __init__(
        self, workers: int | Cluster | list[Executor], cost: Callable[[Task], float] | None = None
    ) -> None:
        self._cluster = workers if isinstance(workers, Cluster) else None
        self._cost = cost
        self._here = workers == 0
        sources: list[Process | Executor] = []
        if isinstance(workers, int):
            sources += [Process() for _ in range(workers)] or [Here()]
        elif isinstance(workers, list):
            sources += workers
        self._members = [Member(number, source) for number, source in enumerate(sources)]
        self._local: Member | None = None
        self._waiting: dict[str, deque[Task]] = {}
        self._under_way: dict[Future[tuple[Any, float]], tuple[Member, Task]] = {}
        self._deaths: Counter[str] = Counter()
        self._looked = self._seen = time.monotonic()

    def __enter__(self) -> Crew:
        for _ in self._look():  # nothing is under way yet
            pass
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for future in self._under_way:  # a stopped crew: nobody waits for what is under way
            future.cancel()
        for member in self._everybody():
            member.close(now=kind is not None)

    def __len__(self) -> int:
        """How many workers there are; the one that serves what stays here is not counted."""
        return max(1, len(self._members))

    def add(self, *tasks: Task) -> None:
        for task in tasks:
            self._waiting.setdefault(task.group, deque()).append(task)

    def left(self) -> list[Task]:
        """What is not done yet, under way or not."""
        under_way = [task for _, task in self._under_way.values()]
        return [*under_way, *(task for group in self._waiting.values() for task in group)]

    def run(self) -> Iterator[Done]:
        """Every task's outcome as it comes; between two of them the caller may add more."""
        while self._waiting or self._under_way:
            yield from self._look()
            self._hand_out()
            if not self._under_way:
                time.sleep(_LOOK)  # nobody is there
            for future in wait(self._under_way, _LOOK, FIRST_COMPLETED).done:
                yield from self._settled(future)

    def _settled(self, future: Future[tuple[Any, float]]) -> Iterator[Done]:
        member, task = self._under_way.pop(future)
        member.busy = False
        try:
            value, seconds = future.result()
        except (BrokenExecutor, CancelledError) as error:
            if not member.renewed():  # the caller's executor, or a cluster without a scheduler
                raise _lost(error) from error
            yield from self._once_more(task, error)
        except Exception as error:
            yield Done(task, error=error)
        else:
            yield Done(task, value, seconds=seconds)

    def _once_more(self, task: Task, error: BaseException) -> Iterator[Done]:
        """Its worker died: it is the next of its group, unless it is what they die of."""
        self._deaths[task.key] += 1
        if self._deaths[task.key] >= _DEATHS:
            yield Done(task, error=_lost(error))
        else:
            self._waiting.setdefault(task.group, deque()).appendleft(task)

    def _hand_out(self) -> None:
        stay = any(tasks[0].stays for tasks in self._waiting.values())
        if stay and not self._here and self._local is None:
            self._local = Member(0, Process())
        for member in self._everybody():
            task = None if member.busy else self._next(member)
            if task is not None:
                self._start(member, task)

    def _start(self, member: Member, task: Task) -> None:
        try:
            future = member.executor().submit(_timed, task.work, member.number)
        except (BrokenExecutor, RuntimeError) as error:  # it died between two tasks
            if not member.renewed():
                raise _lost(error) from error
            future = member.executor().submit(_timed, task.work, member.number)
        member.busy, member.group = True, task.group
        self._under_way[future] = member, task

    def _next(self, member: Member) -> Task | None:
        """Of the group that it is at, or of the best to begin with."""
        local = member is self._local
        groups = [
            name
            for name, tasks in self._waiting.items()
            if self._here or tasks[0].stays is local
        ]  # fmt: skip
        if not groups:
            return None
        name = member.group
        if name not in groups:
            taken = {other.group for other in self._members if other is not member}
            free = [group for group in groups if group not in taken]
            name = max(free or groups, key=self._worth)
        tasks = self._waiting[name]
        task = tasks[0]
        if self._cost is not None and len(tasks) <= _COMPARED:
            task = max(tasks, key=self._cost)  # the first of the costliest
        tasks.remove(task)
        if not tasks:
            del self._waiting[name]
        return task

    def _worth(self, group: str) -> float:
        tasks = self._waiting[group]
        return len(tasks) if self._cost is None else sum(self._cost(task) for task in tasks)

    def _everybody(self) -> list[Member]:
        return [*self._members, *([] if self._local is None else [self._local])]

    def _look(self) -> Iterator[Done]:
        """Who of a cluster is there now; what those that went had under way is made again."""
        now = time.monotonic()
        if self._cluster is None or (self._members and now - self._looked < _LOOK):
            return
        self._looked = now
        there = self._cluster.workers({member.name: member.number for member in self._members})
        kept = [member for member in self._members if member.name in there]
        names = {member.name for member in kept}
        for future, (member, task) in list(self._under_way.items()):
            if member is not self._local and member.name not in names:
                del self._under_way[future]
                future.cancel()
                yield from self._once_more(task, BrokenExecutor("a worker went"))
        self._members = kept + [
            Member(number, self._cluster.executor(name), name)
            for name, number in there.items()
            if name not in names
        ]
        self._seen = now if self._members else self._seen
        if now - self._seen > _PATIENCE:
            raise _lost(BrokenExecutor(f"none at {self._cluster.address} for a minute"))


def _lost(error: BaseException) -> KeyholeError:
    reason = f"{error}".splitlines()[0] if f"{error}" else type(error).__name__
    return KeyholeError(
        f"expected workers that stay, got {reason}: finished checks are kept, and the same command "
        "goes on"
    )


@contextmanager
def crew_of(
    processes: int, dask: str | None, cost: Callable[[Task], float] | None = None
) -> Generator[Crew]:
    """The workers that a command was given: processes, or the cluster at an address."""
    with ExitStack() as stack:
        workers = processes if dask is None else stack.enter_context(workers_at(dask))
        yield stack.enter_context(Crew(workers, cost))


def _timed(work: Work, number: int) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(number), time.perf_counter() - started


# Who does the work: processes of our own, any executor, or the workers of a Dask cluster.
#
# Processes have one thread each and ignore Ctrl-C, which is for the process that people talk to;
# when that one is killed, they end by themselves. When one of them dies, the pool can be made
# again.

MOST_PROCESSES = 1024
_THREADS = "OMP_NUM_THREADS"
_PARENT_LOOK = 0.5  # seconds between looks at whether the parent is alive


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
            "a Dask cluster needs distributed, which is not installed", "cluster"
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
        time.sleep(_PARENT_LOOK)
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
