"""`keyhole disrupt`."""

from __future__ import annotations

from typing import cast, get_args

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import command, interruptible
from keyhole.cli.bars import bars
from keyhole.cli.outputs import answer, expect_new
from keyhole.core import exit_code
from keyhole.core.errors import InputError
from keyhole.core.files import expect_writable
from keyhole.core.options import CHECKS, TARGET, option


@command(
    "keyhole disrupt demo --examples 2 --out flips.json",
    "keyhole disrupt ./my-classifier --data dev.tsv --examples 4 --resume run.jsonl --json",
    "keyhole disrupt demo --examples 2 --method as-released -o order=random",
)
def disrupt(
    model: opt.ModelName,
    task: str | None = option(
        None, "The task of the model's head, if its files do not say.", TARGET
    ),
    data: opt.Data = None,
    *,
    method: opt.Method = None,
    hyperparameters: opt.MethodOptions = None,
    share: float | None = option(
        None, "The largest share of attention to cut: 0.01 by default.", CHECKS
    ),
    seed: opt.Seed = 0,
    out: opt.Out = None,
    resume: opt.Resume = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
    examples: opt.ExampleOptions,
    processes: opt.Processes = 0,
    dask: opt.Dask = None,
) -> None:
    """Flip predictions by cutting a small share of attention, without changing the text."""
    from keyhole.disrupt.registry import ATTACKERS
    from keyhole.disrupt.run import run
    from keyhole.models.loading import Task

    expect_new(out, force=force, inputs=(data,))
    if resume is not None:
        expect_writable(resume)
    if task is not None and task not in get_args(Task):
        raise InputError(
            f"--task must be one of {', '.join(get_args(Task))}, not {task[:40]!r}"
        )
    name = method or "strongest"
    options = opt.method_options(ATTACKERS, name, hyperparameters)
    if share is not None:
        options["share"] = share
    if resume:
        kept = f"what is finished is in {resume}: the same command resumes"
    else:
        kept = ""
    with interruptible(lambda: kept), bars("disrupt", "examples") as track:
        result = run(
            model,
            data,
            method=name,
            **options,
            **examples.keywords(),
            task=cast("Task | None", task),
            processes=processes,
            dask=dask,
            resume=resume,
            seed=seed,
            track=track,
        )
        if out is not None:
            result.save(out)
    words = f"{model}: {result.method['words']}\n{result.summary()}"
    answer(result.to_dict(), words, as_json=as_json)
    raise typer.Exit(exit_code([result.status]))
