"""Many examples on many workers: examples are independent, so any `Executor` will do.

By default a pool of processes with one thread each; a Dask cluster through `Client.get_executor()`.
Finished examples are written down as they come (journal.py). Where a worker dies, the pool is made
again. What was under way then is tried again one example at a time, so that an example that kills
its worker is found out, and fails alone after `retries` times: it is listed with the reason.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from dataclasses import asdict, dataclass
from typing import Any

import torch

from keyhole.data import Example, encode
from keyhole.disrupt.batches import grouped
from keyhole.disrupt.disruption import Disruption
from keyhole.disrupt.hack_attend import HackAttend
from keyhole.disrupt.journal import Journal, key
from keyhole.disrupt.labels import settled
from keyhole.errors import InputError
from keyhole.models.loading import SPEAKING, load_model

_THREADS = "OMP_NUM_THREADS"
Watch = Callable[[int, int], None]  # examples finished, examples in all


@dataclass(frozen=True)
class ModelSource:
    """Where a worker finds the model: it is loaded once a process, not sent."""

    name: str
    task: str = "classification"
    device: str = "cpu"
    longest: int | None = None
    allow_pickle: bool = False

    def load(self) -> tuple[Any, Any]:
        loaded = load_model(
            self.name, task=self.task, device=self.device, allow_pickle=self.allow_pickle
        )
        return loaded.model, loaded.tokenizer


_LOADED: dict[Any, tuple[Any, Any]] = {}
_ALONE = threading.Lock()  # a cluster's worker may have several threads, but one model


def attack(method: HackAttend, source: ModelSource, examples: Sequence[Example]) -> Disruption:
    """What one worker does with a few examples."""
    with _ALONE:
        return _attack(method, source, examples)


def _attack(method: HackAttend, source: ModelSource, examples: Sequence[Example]) -> Disruption:
    if source not in _LOADED:
        _LOADED.clear()  # one model a process: memory is not for two
        _LOADED[source] = source.load()
    model, tokenizer = _LOADED[source]
    batch, given = encode(tokenizer, examples, longest=source.longest)
    names = [example.id for example in examples]
    speaks = source.task in SPEAKING
    labels = None if speaks else settled(model, batch, given, method.target)
    return method(model, batch, labels, ids=names)


def sweep(
    method: HackAttend,
    model_source: ModelSource | str,
    examples: Sequence[Example],
    executor: Executor | None = None,
    *,
    workers: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    watch: Watch | None = None,
    together: int = 8,
    retries: int = 2,
) -> Disruption:
    """Attack all examples; `resume` is the file that remembers, `together` how many go in a batch.

    `workers` is the size of the default pool (one a processor); 0 works in this process, which is
    what a GPU wants.
    """
    source = ModelSource(model_source) if isinstance(model_source, str) else model_source
    for name, value, least in (("together", together, 1), ("retries", retries, 0)):
        if value < least:
            raise InputError(f"expected {name} of at least {least}, got {value}")
    path = None if resume is None else os.fspath(resume)
    with Journal(path, asdict(method), f"{source.name} ({source.task})") as journal:
        todo = {key(one): one for one in examples if key(one) not in journal.outcomes}
        run = _Run(method, source, journal, watch, len(examples), retries)
        queue = deque(_batches(list(todo.values()), together))
        if executor is None and workers == 0:
            run.here(queue)
        else:
            with _Pool(executor, workers) as pool:
                run.through(pool, queue)
        outcomes = [journal.outcomes.get(key(one)) for one in examples]
        return Disruption(
            asdict(method), tuple(one for one in outcomes if one is not None), journal.control,
            journal.seconds, source.name, source.device, failed=tuple(run.failed),
        )  # fmt: skip


def _batches(examples: list[Example], together: int) -> list[tuple[Example, ...]]:
    """Examples of like length side by side: padding is work for nothing."""
    ordered = sorted(examples, key=lambda one: (len(one.choices), len(one.text), one.id))
    groups = [tuple(group) for group in grouped(ordered, together)]
    return groups[::-1]  # the long ones first: nobody waits for them at the end


def _settle_in() -> None:
    """One thread a process; Ctrl-C is for the process that people talk to."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Pool:
    """The caller's executor, or processes of our own that can be replaced when one dies."""

    def __init__(self, given: Executor | None, workers: int | None) -> None:
        self.given = given
        self.workers = workers or os.cpu_count() or 1
        self.own: ProcessPoolExecutor | None = None
        self.others = multiprocessing.active_children()
        self.threads: str | None = None

    def __enter__(self) -> _Pool:
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
            self.own = ProcessPoolExecutor(self.workers, context, _settle_in)
        return self.own

    def broke(self) -> bool:
        """Forget a broken pool; False where it is the caller's, who alone can make another."""
        if self.own is None:
            return False
        self.own.shutdown(wait=False, cancel_futures=True)
        self.own = None
        return True


class _Run:
    """One sweep under way."""

    def __init__(
        self, method: HackAttend, source: ModelSource, journal: Journal, watch: Watch | None,
        total: int, retries: int,
    ) -> None:  # fmt: skip
        self.method, self.source, self.journal, self.watch = method, source, journal, watch
        self.total, self.retries = total, retries
        self.failed: list[tuple[str, str]] = []

    def here(self, queue: deque[tuple[Example, ...]]) -> None:
        for group in queue:
            self._finish(group, attack(self.method, self.source, group))

    def through(self, pool: _Pool, queue: deque[tuple[Example, ...]]) -> None:
        """All groups; then, one at a time, the examples that were under way when something died."""
        suspects = self._wave(pool, queue, pool.window)
        for group in suspects:
            for example in group:
                self._alone(pool, example)

    def _wave(
        self, pool: _Pool, queue: deque[tuple[Example, ...]], window: int
    ) -> list[tuple[Example, ...]]:
        suspects: list[tuple[Example, ...]] = []
        under_way: dict[Future[Disruption], tuple[Example, ...]] = {}
        while queue or under_way:
            while queue and len(under_way) < window:
                future = self._submit(pool, queue[0])
                if future is None:
                    break
                under_way[future] = queue.popleft()
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            broken = not under_way
            for future in done:
                group = under_way.pop(future)
                why = self._settle(future, group)
                if why is not None:
                    suspects.append(group)
                    broken |= isinstance(why, BrokenExecutor)
            if broken:
                # Every other future of a broken pool is lost as well.
                suspects += under_way.values()
                under_way.clear()
                if not pool.broke():
                    return [*suspects, *queue]
        return suspects

    def _alone(self, pool: _Pool, example: Example) -> None:
        why: BaseException | None = None
        for _ in range(1 + self.retries):
            future = self._submit(pool, (example,))
            why = BrokenExecutor("the executor takes no more work")
            if future is not None:
                wait([future])
                why = self._settle(future, (example,))
                if why is None:
                    return
            if isinstance(why, BrokenExecutor) and not pool.broke():
                break
        self.failed.append((example.id, f"{type(why).__name__}: {why}".splitlines()[0]))

    def _submit(self, pool: _Pool, group: tuple[Example, ...]) -> Future[Disruption] | None:
        try:
            return pool.executor().submit(attack, self.method, self.source, group)
        except (BrokenExecutor, RuntimeError):  # RuntimeError: it was shut down
            return None

    def _settle(self, future: Future[Disruption], group: tuple[Example, ...]) -> Any:
        """Write down what came, or say why nothing did; the caller's own mistakes go to him."""
        try:
            result = future.result()
        except InputError:
            raise
        except (Exception, CancelledError) as error:
            return error  # a dead worker, no memory, a lost connection: it is tried again
        self._finish(group, result)
        return None

    def _finish(self, group: tuple[Example, ...], result: Disruption) -> None:
        pairs = zip(group, result.outcomes, strict=True)
        self.journal.add(
            {key(one): outcome for one, outcome in pairs}, result.control, result.seconds
        )
        if self.watch is not None:
            self.watch(len(self.journal.outcomes), self.total)
