"""`keyhole harden`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from keyhole import report
from keyhole.audit.hardened import audit_of
from keyhole.cli.app import (
    AllowPickle,
    Classes,
    Device,
    Force,
    Json,
    Label,
    Longest,
    ModelName,
    Seed,
    TextColumn,
    app,
    expect_folder,
    expect_new,
    interruptible,
    name_in,
)
from keyhole.cli.bars import bars
from keyhole.cli.console import say, show
from keyhole.core import dump
from keyhole.core.errors import InputError
from keyhole.core.files import write_text
from keyhole.harden.defences import DEFENCES
from keyhole.harden.run import run


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole harden ./my-classifier --data train.tsv --method strongest --epochs 1 "
    "--dev dev.tsv --page hardened.html --out hardened\n"
    "  keyhole disrupt ./hardened --data dev.tsv"
)
def harden(
    model: ModelName,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Labelled examples: .tsv, .csv, .jsonl, .json, or a dataset's name on the hub.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Where to write the trained model and its card."),
    ],
    method: Annotated[
        str, name_in(DEFENCES, "How to train; strongest is freelb and attack-masks combined.")
    ] = "strongest",
    rate: Annotated[
        float | None,
        typer.Option(
            help="The share of attention to drop (sattend), or the size of an ascent's step "
            "(freelb, smart, asa)."
        ),
    ] = None,
    mode: Annotated[
        Literal["unit", "token"] | None,
        typer.Option(help="Drop single units or whole tokens (sattend): unit by default."),
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(
            help="The weight of the defence's own loss (attack-masks, strongest, smart, r3f, asa)."
        ),
    ] = None,
    plain_first: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Train without the defence for this share of the steps first: hard tasks are not "
            "learnt otherwise.",
        ),
    ] = 0.0,
    average: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Keep an exponential moving average of the weights with this decay, such as "
            "0.999, and end with it.",
        ),
    ] = 0.0,
    text: TextColumn = None,
    label: Label = "label",
    classes: Classes = None,
    examples: Annotated[
        int | None, typer.Option(help="Train on only this many examples, the first of the file.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="How many times to go over all examples.")] = 3,
    batch: Annotated[int, typer.Option(help="How many examples make a step.")] = 32,
    learning_rate: Annotated[
        float, typer.Option(help="The highest learning rate of AdamW, after its warm-up.")
    ] = 2e-5,
    longest: Longest = 128,
    amp: Annotated[
        bool, typer.Option("--amp", help="Compute in bfloat16 where that is precise enough.")
    ] = False,
    dev: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Measure accuracy and flips on these examples, before and after."
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write a page that shows what was cut, before and after."
        ),
    ] = None,
    flips: Annotated[
        int | None,
        typer.Option(
            help="How many answers to the examples of --dev to try to flip: 50 by default."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Keep every epoch in it; the same command resumes from it."
        ),
    ] = None,
    force: Force = False,
    device: Device = "cpu",
    allow_pickle: AllowPickle = False,
    seed: Seed = 0,
    seeds: Annotated[
        int, typer.Option(help="Train this many models, and report the mean and the range.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Train a model against the attack on attention, and measure whether it helped."""
    if page is not None and dev is None:
        raise InputError("expected --dev with --page, got none: the page shows what was measured")
    expect_folder(page)
    expect_new(page, force=force)
    with interruptible(lambda: _kept(checkpoint)), bars("harden", "parts") as track:
        result = run(
            model, data, out, method=method, rate=rate, mode=mode, weight=weight,
            plain_first=plain_first, average=average, text=text or (), label=label,
            classes=classes.split(",") if classes else (), examples=examples,
            epochs=epochs, batch=batch, learning_rate=learning_rate, longest=longest, amp=amp,
            dev=dev, flips=flips, checkpoint=checkpoint, device=device, allow_pickle=allow_pickle,
            seed=seed, seeds=seeds, force=force, track=track,
        )  # fmt: skip
        if page is not None:
            write_text(page, report.render(audit_of(result, out)))
    if as_json:
        typer.echo(dump(result.to_dict()))
    else:
        for trained in result.runs:
            show(trained.training.summary())
        if result.after:
            show(report.hardening(result))
    say(f"{'model' if seeds == 1 else 'models'}: {out}")


def _kept(checkpoint: Path | None) -> str:
    """What a stopped training has behind it."""
    if checkpoint is None or not any(checkpoint.rglob("epoch-*[0-9]")):
        return ""
    return f"whole epochs are in {checkpoint}: the same command resumes"
