"""Many examples on many workers: examples are independent, so any `Executor` will do.

By default a pool of processes with one thread each; a Dask cluster through `Client.get_executor()`.
Finished examples are written down as they come (journal.py). Where a worker dies, the pool is made
again. What was under way then is tried again one example at a time, so that an example that kills
its worker is found out, and fails alone after `retries` times: it is listed with the reason.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from typing import Any

from keyhole.core.errors import InputError
from keyhole.core.journal import Journal
from keyhole.core.machine import largest_matrix, threads_for
from keyhole.core.progress import Progress, silent
from keyhole.core.tasks import Pool
from keyhole.data import NO_LABEL, Example, encode
from keyhole.disrupt.attacker import Attacker, described
from keyhole.disrupt.batches import grouped
from keyhole.disrupt.disruption import Disruption
from keyhole.disrupt.journal import Outcomes, key
from keyhole.disrupt.labels import settled
from keyhole.disrupt.settings import expect_least
from keyhole.disrupt.source import ModelSource
from keyhole.models.anatomy import fitting
from keyhole.models.loading import GENERATES

_LOADED: dict[Any, tuple[Any, Any]] = {}
_ALONE = threading.Lock()  # a cluster's worker may have several threads, but one model


def attack(
    attacker: Attacker, source: ModelSource, identity: str, examples: Sequence[Example]
) -> Disruption:
    """What one worker does with a few examples; `identity` is that of the model at the source."""
    with _ALONE:
        model, tokenizer = _loaded(source, identity)
        return _attack(attacker, source, model, tokenizer, examples)


def _loaded(source: ModelSource, identity: str) -> tuple[Any, Any]:
    if (source, identity) not in _LOADED:
        _LOADED.clear()  # one model a process: memory is not for two
        _LOADED[source, identity] = source.load()
    return _LOADED[source, identity]


def _attack(
    attacker: Attacker, source: ModelSource, model: Any, tokenizer: Any,
    examples: Sequence[Example],
) -> Disruption:  # fmt: skip
    longest = fitting(model, tokenizer, source.longest)
    batch, given = encode(tokenizer, examples, longest=longest)
    names = [example.id for example in examples]
    labels = None
    if source.task not in GENERATES:
        labels = settled(model, batch, given, getattr(attacker, "target", None))
    with threads_for(largest_matrix(model)):
        return attacker(model, batch, labels, ids=names)


def sweep(
    attacker: Attacker,
    model_source: ModelSource | str,
    examples: Sequence[Example],
    executor: Executor | None = None,
    *,
    workers: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    data: str = "",
    progress: Progress = silent,
    together: int = 8,
    retries: int = 2,
) -> Disruption:
    """Attack all examples; `resume` is the file that remembers, `together` how many go in a batch.

    `workers` is the size of the default pool (one a processor); 0 works in this process, which is
    what a GPU wants. `data` says what the examples are from: a file that remembers examples of
    other data is refused then; more of the same data goes on.
    """
    source = ModelSource(model_source) if isinstance(model_source, str) else model_source
    expect_least(1, together=together)
    expect_least(0, retries=retries)
    method, identity = described(attacker), source.identity()
    settings = {"kind": "disruption", "model": identity, "task": source.task,
                "longest": source.longest, "method": method}  # fmt: skip
    if data:
        settings["data"] = data
    path = None if resume is None else os.fspath(resume)
    with Journal(path, settings) as journal:
        outcomes = Outcomes(journal)
        todo = {key(example): example for example in examples}
        queue = deque(
            _batches([todo[name] for name in todo if name not in outcomes.known], together)
        )
        run = _Run(attacker, source, identity, outcomes, progress, set(todo), retries)
        run.tell()
        if executor is None and workers == 0:
            run.here(queue)
        else:
            with Pool(executor, workers) as pool:
                run.through(pool, queue)
    known = [outcomes.known[key(example)] for example in examples if key(example) in outcomes.known]
    return Disruption(
        method, tuple(known), outcomes.control, outcomes.seconds, source.name, source.device,
        failed=tuple(run.failed), identity=identity, task=source.task, examples=tuple(examples),
        own_answers=source.task in GENERATES or any(e.label == NO_LABEL for e in examples),
    )  # fmt: skip


def _size(example: Example) -> tuple[int, int, str]:
    return len(example.choices), len(example.text), example.id


def _batches(examples: list[Example], together: int) -> list[tuple[Example, ...]]:
    """Examples of like length side by side: padding is work for nothing."""
    ordered = sorted(examples, key=_size)
    groups = [tuple(group) for group in grouped(ordered, together)]
    return groups[::-1]  # the long ones first: nobody waits for them at the end


class _Run:
    """One sweep under way."""

    def __init__(
        self, attacker: Attacker, source: ModelSource, identity: str, outcomes: Outcomes,
        progress: Progress, wanted: set[str], retries: int,
    ) -> None:  # fmt: skip
        self.attacker, self.source, self.identity = attacker, source, identity
        self.outcomes = outcomes
        self.progress, self.wanted, self.retries = progress, wanted, retries
        self.failed: list[tuple[str, str]] = []

    def here(self, queue: deque[tuple[Example, ...]]) -> None:
        for group in queue:
            self._finish(group, attack(self.attacker, self.source, self.identity, group))

    def through(self, pool: Pool, queue: deque[tuple[Example, ...]]) -> None:
        """All groups; then, one at a time, the examples that were under way when something died."""
        suspects = self._wave(pool, queue, pool.window)
        for group in suspects:
            for example in group:
                self._alone(pool, example)

    def _wave(
        self, pool: Pool, queue: deque[tuple[Example, ...]], window: int
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
                reason = self._settle(future, group)
                if reason is not None:
                    suspects.append(group)
                    broken |= isinstance(reason, BrokenExecutor)
            if broken:
                # Every other future of a broken pool is lost as well.
                suspects += under_way.values()
                under_way.clear()
                if not pool.broke():
                    return [*suspects, *queue]
        return suspects

    def _alone(self, pool: Pool, example: Example) -> None:
        reason: BaseException | None = None
        for _ in range(1 + self.retries):
            future = self._submit(pool, (example,))
            reason = BrokenExecutor("the executor takes no more work")
            if future is not None:
                wait([future])
                reason = self._settle(future, (example,))
                if reason is None:
                    return
            if isinstance(reason, BrokenExecutor) and not pool.broke():
                break
        self.failed.append((example.id, f"{type(reason).__name__}: {reason}".splitlines()[0]))

    def _submit(self, pool: Pool, group: tuple[Example, ...]) -> Future[Disruption] | None:
        try:
            return pool.executor().submit(attack, self.attacker, self.source, self.identity, group)
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
        self.outcomes.add(
            {key(example): outcome for example, outcome in pairs}, result.control, result.seconds
        )
        self.tell()

    def tell(self) -> None:
        """How many are done; the file may know more than are wanted this time."""
        self.progress(len(self.wanted & self.outcomes.known.keys()), len(self.wanted))
