"""Run `keyhole disrupt` as a function: open a model, read examples, attack them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keyhole.core.errors import InputError, expect_count
from keyhole.core.files import is_file, read_text
from keyhole.core.journal import digest
from keyhole.core.machine import expect_device
from keyhole.core.progress import Track, untracked
from keyhole.core.tasks import MOST_PROCESSES
from keyhole.data import Example, read_examples
from keyhole.disrupt.disruption import Attacker, Disruption
from keyhole.disrupt.registry import ATTACKERS
from keyhole.disrupt.sweep import ModelSource, sweep
from keyhole.models.demo import EXAMPLES, FOLDER, folder_of
from keyhole.models.loading import (
    GENERATES,
    Task,
    class_names,
    expect_names,
    load_config,
    task_of,
)

SHIPPED = "the reviews that ship with Keyhole"


def run(
    model: str | Path,
    data: str | Path | None = None,
    *,
    method: str | Attacker = "strongest",
    text: Sequence[str] = (),
    label: str | None = None,
    classes: Sequence[str] = (),
    examples: int | None = None,
    task: Task | None = None,
    max_length: int = 128,
    device: str = "cpu",
    allow_pickle: bool = False,
    processes: int = 0,
    dask: str | None = None,
    resume: str | Path | None = None,
    seed: int = 0,
    track: Track = untracked,
    **options: Any,
) -> Disruption:
    """Flip a model's predictions by cutting a small share of its attention.

    `model` is a folder, a .gguf file, a name on the hub or `demo`. `data` is a file or
    a dataset of the hub, of which the first `examples` are attacked. `text` names one
    or two of its columns, and `label` the column of right classes, "label" by default.
    Without such a column the model's own answers count as right. `classes` are the
    names of the classes. `method` is a name of the registry, or an attacker with your
    own hyperparameters. `options` are the hyperparameters of a named method, such as
    share=0.02. With `processes` 0 the attack runs in this process (use this on a GPU).
    `dask` is the address of a cluster. `resume` is a journal of outcomes, from which an
    interrupted run continues.
    """
    expect_count("--processes", processes, 0, MOST_PROCESSES)
    expect_count("--max-length", max_length)
    expect_count("target", options.get("target"), 0)
    expect_count("continuation", options.get("continuation"))
    expect_device(device)
    if dask is not None and processes:
        raise InputError("give --processes or --dask, not both")
    method = ATTACKERS.resolve(method, seed, **options)
    source = source_of(str(model), task, device, max_length, allow_pickle)
    if options.get("continuation") is not None and source.task not in GENERATES:
        raise InputError(f"continuation is for language models, not for {source.task}")
    chosen = examples_of(source, data, text, label, classes, examples)
    result = sweep(
        method,
        source,
        chosen,
        processes if dask is None else dask,
        resume=resume,
        data=_digest(data),
        progress=track("disrupt", len(chosen)),
    )
    return replace(result, data=SHIPPED if data is None else str(data))


def _digest(data: str | Path | None) -> str:
    """Return what identifies the data: a digest of a file's content, or a name on the hub."""
    if data is None:
        return SHIPPED
    return digest(read_text(data, "data")) if is_file(data) else str(data)


def source_of(
    model: str,
    task: Task | None,
    device: str,
    max_length: int,
    allow_pickle: bool,
) -> ModelSource:
    """Return where MODEL of the command line is loaded from, and with the head of which task."""
    name = folder_of(model)
    head = task_of(name) if task is None else task
    if head == "base":
        raise InputError(
            f"{model} has no head for a task: name its --task, or train one with keyhole harden"
        )
    return ModelSource(name, head, device, max_length, allow_pickle)


def examples_of(
    source: ModelSource,
    data: str | Path | None,
    text: Sequence[str],
    label: str | None,
    classes: Sequence[str],
    limit: int | None,
) -> list[Example]:
    """Read the examples for a model from a file, or return those that ship with Keyhole."""
    expect_count("--examples", limit)
    if data is None:
        if source.name != str(FOLDER):
            raise InputError("--data is needed: a file of examples")
        for option, value in {
            "--column": text,
            "--label": label,
            "--classes": classes,
        }.items():
            if value:
                raise InputError(f"{option} needs --data: a file of examples")
        return list(EXAMPLES[:limit])
    config = load_config(source.name)
    expect_names(classes, config)
    generates = source.task in GENERATES
    if generates and label is not None:
        raise InputError(f"--label is for classifiers, not for {source.task}")
    examples = read_examples(
        data,
        text=text,
        label="" if generates else label or "label",
        names=classes or class_names(config),
        limit=limit,
        labelled=label is not None,  # otherwise the file need not have such a column
    )
    wanted = "choices" if source.task == "choice" else "texts without choices"
    first = examples[0]
    if (wanted == "choices") != bool(first.choices):
        raise InputError(
            f"{data} must hold {wanted} for {source.task}: see {first.text[:40]!r}"
        )
    return examples
