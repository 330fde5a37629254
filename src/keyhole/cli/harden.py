"""`keyhole harden`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import command, interruptible
from keyhole.cli.bars import bars
from keyhole.cli.outputs import say, show
from keyhole.core import dump
from keyhole.core.options import CHECKS, DATA, OUTPUT, option, settings

# Parameters of harden.run that any method has, and that are set as -o like the method's
# own.
TRAINING = {
    "batch": int,
    "learning_rate": float,
    "plain_first": float,
    "amp": bool,
}


@command(
    "keyhole harden ./my-classifier --data train.tsv --method strongest --epochs 1 "
    "--dev dev.tsv --out hardened",
    "keyhole disrupt ./hardened --data dev.tsv",
    "keyhole harden ./my-classifier --data train.tsv --method sattend -o emptied=true -o rate=0.95 "
    "--epochs 1 --dev dev.tsv --certify --out certified",
)
def harden(
    model: opt.ModelName,
    data: Annotated[
        str,
        opt.about(
            "Labelled examples: .tsv, .csv, .jsonl, .json, or a dataset's name on the hub.",
            DATA,
            metavar="FILE",
        ),
    ],
    out: Annotated[
        Path,
        opt.about(
            "Where to write the trained model and its card.", OUTPUT, metavar="FOLDER"
        ),
    ],
    *,
    dev: str | None = option(
        None,
        "Measure accuracy and flips on these examples, before and after.",
        DATA,
        metavar="FILE",
    ),
    flips: int | None = option(
        None,
        "How many answers to the examples of --dev to try to flip: 50 by default.",
        CHECKS,
    ),
    certify: bool = option(
        False,
        "Prove how many of those answers survive any cut of 1, 2, 4, … units of "
        "attention, as votes over the masks of --method sattend -o emptied=true.",
        CHECKS,
    ),
    method: opt.Method = None,
    hyperparameters: opt.MethodOptions = None,
    epochs: int = option(3, "How many times to go over all examples.", CHECKS),
    seed: opt.Seed = 0,
    seeds: int = option(
        1, "Train this many models, and report the mean and the range.", CHECKS
    ),
    resume: opt.Resume = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
    examples: opt.ExampleOptions,
) -> None:
    """Train a model against the attack on attention, and measure whether it helped.

    Besides the method's own hyperparameters, -o sets batch (32), learning_rate (2e-5),
    amp (bfloat16 where that is precise enough) and plain_first (the share of the steps
    that come first, without the defence: hard tasks need them).
    """
    from keyhole import report
    from keyhole.harden.defences import DEFENCES
    from keyhole.harden.run import run

    name = method or "strongest"
    options = settings(
        hyperparameters or (), {**opt.option_types(DEFENCES[name]), **TRAINING}, name
    )
    given = examples.keywords()
    given["label"] = given["label"] or "label"
    with interruptible(lambda: _kept(resume)), bars("harden", "parts") as track:
        result = run(
            model,
            data,
            out,
            method=name,
            **options,
            **given,
            epochs=epochs,
            dev=dev,
            flips=flips,
            certify=certify,
            checkpoint=resume,
            seed=seed,
            seeds=seeds,
            force=force,
            track=track,
        )
    if as_json:
        typer.echo(dump(result.to_dict()))
    else:
        for trained in result.runs:
            show(trained.training.summary())
        if result.after:
            show(report.hardening(result))
    say(f"trained: {out}")


def _kept(checkpoint: Path | None) -> str:
    """Return a sentence about what a stopped training has saved."""
    if checkpoint is None or not any(checkpoint.rglob("epoch-*[0-9]")):
        return ""
    return f"whole epochs are in {checkpoint}: the same command resumes"
