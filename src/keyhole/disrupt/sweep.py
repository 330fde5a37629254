"""Attack many examples on several workers, with a journal, so that no example is attacked twice.

The journal (core/journal.py) identifies an example by its content, so a longer list of
examples continues a shorter one. If a batch fails or kills its worker, its examples are
tried again one at a time. An example that still fails after `retries` more attempts is
reported with the reason.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import cpu_count
from pathlib import Path
from typing import Any

from keyhole.core.errors import InputError, expect_count, first_line
from keyhole.core.journal import Journal, digest
from keyhole.core.machine import device_of, largest_matrix, threads_for
from keyhole.core.progress import Progress, silent
from keyhole.core.result import typed
from keyhole.core.tasks import Runner, Task
from keyhole.data import NO_LABEL, Example, encode
from keyhole.disrupt.batches import grouped
from keyhole.disrupt.disruption import Attacker, Control, Disruption, Outcome, described
from keyhole.disrupt.tasks import settled
from keyhole.models.anatomy import fitting
from keyhole.models.loading import GENERATES, kept_open, load_config, load_model


def sweep(
    attacker: Attacker,
    source: ModelSource | str,
    examples: Sequence[Example],
    workers: int | str | Executor | None = None,
    *,
    resume: str | Path | None = None,
    data: str = "",
    progress: Progress = silent,
    batch_size: int = 8,
    retries: int = 2,
) -> Disruption:
    """Attack all examples; `resume` is the journal.

    `workers` is a number of processes (by default one per processor; 0 for this
    process, as on a GPU), the address of a Dask cluster, or an executor. `data`
    identifies the source of the examples: a journal of other data is refused.
    """
    if isinstance(source, str):
        source = ModelSource(source)
    expect_count("batch_size", batch_size)
    expect_count("retries", retries, 0)
    if workers is None:
        workers = cpu_count() or 1
    method = described(attacker)
    identity = source.identity()
    settings = {
        "kind": "disruption",
        "model": identity,
        "task": source.task,
        "max_length": source.max_length,
        "method": method,
    }
    if data:
        settings["data"] = data
    wanted = {key_of(example): example for example in examples}
    with Journal(resume, settings) as journal, Runner(workers) as runner:
        outcomes = _Outcomes(journal)
        todo = [wanted[key] for key in wanted if key not in outcomes.known]
        work = partial(attack, attacker, source, identity)
        ordered = sorted(todo, key=lambda e: (len(e.choices), len(e.text), e.id))
        # The longest come first: no worker waits for one at the end.
        batches = reversed(grouped(ordered, batch_size))
        runner.add(*(_task(work, batch) for batch in batches))
        done = len(wanted) - len(todo)
        progress(done, len(wanted))
        failed: dict[str, str] = {}
        for batch, result in _results(runner, work, retries):
            if isinstance(result, Disruption):
                outcomes.add(batch, result)
                done += len(batch)
                progress(done, len(wanted))
            elif workers == 0:
                raise result
            else:
                failed[batch[0].id] = f"{type(result).__name__}: {first_line(result)}"
    known = map(outcomes.known.get, map(key_of, examples))
    unlabelled = any(example.label == NO_LABEL for example in examples)
    return Disruption(
        method,
        tuple(outcome for outcome in known if outcome is not None),
        outcomes.control,
        outcomes.seconds,
        source.name,
        source.device,
        failed=tuple((e.id, failed[e.id]) for e in examples if e.id in failed),
        identity=identity,
        task=source.task,
        examples=tuple(examples),
        own_answers=unlabelled or source.task in GENERATES,
    )


def attack(
    attacker: Attacker,
    source: ModelSource,
    identity: str,
    examples: Sequence[Example],
    worker: int = 0,
) -> Disruption:
    """Attack one batch in a worker; `identity` is that of the model at the source."""
    source = replace(source, device=device_of(source.device, worker))
    with kept_open((source, identity), lambda _: source.load()) as (model, tokenizer):
        length = fitting(model, tokenizer, source.max_length)
        batch, given = encode(tokenizer, examples, max_length=length)
        labels = None
        if source.task not in GENERATES:
            labels = settled(model, batch, given, getattr(attacker, "target", None))
        names = [example.id for example in examples]
        with threads_for(largest_matrix(model)):
            return attacker(model, batch, labels, ids=names)


def _task(work: Callable[..., Disruption], batch: Sequence[Example]) -> Task:
    return Task(tuple(batch), partial(work, batch), attempts=1)


def _results(
    runner: Runner,
    work: Callable[..., Disruption],
    retries: int,
) -> Iterator[tuple[Sequence[Example], Disruption | Exception]]:
    """Yield each batch with its result, or a single example with the error that it always raised.

    All errors are retried except wrong input, which is the caller's mistake.
    """
    tries: Counter[tuple[Example, ...]] = Counter()
    for done in runner.run():
        batch = done.task.key
        if done.error is None:
            yield batch, done.value
        elif isinstance(done.error, InputError):
            raise done.error
        elif len(batch) > 1:
            runner.add(*(_task(work, (example,)) for example in batch))
        elif tries[batch] < retries:
            tries[batch] += 1
            runner.add(done.task)
        else:
            yield batch, done.error


def key_of(example: Example) -> str:
    """Return sixteen hexadecimal digits that identify an example's content."""
    return digest(
        [example.id, example.label, example.text, example.second, list(example.choices)]
    )


@dataclass(frozen=True)
class _Record:
    """The record of one example in the journal.

    The first of a batch has the batch's seconds, and the flips of its control.
    """

    outcome: Outcome
    control: Control
    seconds: float


class _Outcomes:
    """The outcomes of a sweep by example, its control and its seconds, all kept in the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.known: dict[str, Outcome] = {}
        self.control = Control(0.0, 0.0, 0)
        self.seconds = 0.0
        for key in journal.records:
            record = journal.recall(key, partial(typed, _Record))
            self.known[key] = record.outcome
            self.control = self.control.joined(record.control)
            self.seconds += record.seconds

    def add(self, batch: Sequence[Example], result: Disruption) -> None:
        """Add the outcomes of one batch; they are on disk when this returns."""
        outcomes = dict(zip(map(key_of, batch), result.outcomes, strict=True))
        self.known |= outcomes
        self.control = self.control.joined(result.control)
        self.seconds += result.seconds
        control = replace(result.control, flips=0)
        records = [_Record(outcome, control, 0.0) for outcome in outcomes.values()]
        records[0] = replace(records[0], control=result.control, seconds=result.seconds)
        self._journal.add(dict(zip(outcomes, map(asdict, records), strict=True)))


@dataclass(frozen=True)
class ModelSource:
    """The source from which each process loads the model once; the model itself is not sent."""

    name: str
    task: str = "classification"
    device: str = "cpu"
    max_length: int | None = None
    allow_pickle: bool = False

    def load(self) -> tuple[Any, Any]:
        loaded = load_model(
            self.name,
            task=self.task,
            device=self.device,
            allow_pickle=self.allow_pickle,
        )
        return loaded.model, loaded.tokenizer

    def identity(self) -> str:
        """Return sixteen hexadecimal digits of the checkpoint's files, or of its hub commit.

        The loaded model is not used, because with several workers only they load it.
        """
        path = Path(self.name)
        if path.is_file():
            return digest(_summed(path))
        if path.is_dir():
            sums = {
                file.name: _summed(file)
                for file in sorted(path.iterdir())
                if file.is_file() and (file.suffix in _PARTS or file.name in _CONFIGS)
            }
            return digest(sums)
        commit = getattr(load_config(self.name), "_commit_hash", None)
        return digest([self.name, commit])


# The files that determine a checkpoint's answers; a model card next to them does not.
_PARTS = (".safetensors", ".bin", ".gguf", ".txt", ".model")
_CONFIGS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "added_tokens.json",
)


def _summed(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
