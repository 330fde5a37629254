"""`keyhole disrupt`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole import report
from keyhole.audit.flips import audit_of
from keyhole.cli.answers import answer
from keyhole.cli.app import (
    AllowPickle,
    Classes,
    DaskAddress,
    Device,
    Force,
    Json,
    Longest,
    ModelName,
    Processes,
    Seed,
    TextColumn,
    app,
    expect_folder,
    expect_new,
    interruptible,
    name_in,
)
from keyhole.cli.bars import bars
from keyhole.core import exit_code
from keyhole.core.errors import InputError
from keyhole.core.files import write_text
from keyhole.disrupt.greedy import Order, Scale
from keyhole.disrupt.hack_attend import Scope, Spare
from keyhole.disrupt.rankings import RANKINGS
from keyhole.disrupt.registry import ATTACKERS
from keyhole.disrupt.run import run
from keyhole.lab.certificates import certify_all
from keyhole.models.loading import Task

_RELEASED = "as-released"


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole disrupt demo --examples 2 --out flips.json --page flips.html\n"
    "  keyhole disrupt ./my-classifier --data dev.tsv --examples 4 --resume run.jsonl --json\n"
    "  keyhole disrupt ./my-classifier --data dev.tsv --examples 2 --certify 1"
)
def disrupt(
    model: ModelName,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The examples: .tsv, .csv, .jsonl, .json (HellaSwag, DREAM, ReClor), .txt, or a "
            "dataset's name on the hub.",
        ),
    ] = None,
    text: TextColumn = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="The column that holds the right class: label, if there is one; without it, the "
            "model's own answer is taken to be right."
        ),
    ] = None,
    classes: Classes = None,
    examples: Annotated[
        int | None, typer.Option(help="Attack only this many examples, the first of the file.")
    ] = None,
    method: Annotated[
        str | None, name_in(ATTACKERS, "The attack: strongest, if none is named.")
    ] = None,
    as_released: Annotated[
        bool, typer.Option("--as-released", help="A short form of --method as-released.")
    ] = False,
    share: Annotated[
        float | None, typer.Option(help="The largest share of attention to cut: 0.01 by default.")
    ] = None,
    scope: Annotated[
        Scope | None,
        typer.Option(help="What it is a share of: each head's units, or the whole model's."),
    ] = None,
    ranking: Annotated[
        str | None,
        typer.Option(metavar=f"[{'|'.join(RANKINGS)}]", help="Which units are cut first."),
    ] = None,
    order: Annotated[
        Order | None, typer.Option(help="In which order heads are attacked (as-released).")
    ] = None,
    scale: Annotated[
        Scale | None,
        typer.Option(help="Attack all heads, or the better half in half the layers (as-released)."),
    ] = None,
    spare: Annotated[
        Spare | None,
        typer.Option(
            help="What is never cut: units of special tokens, units with a special key, units of "
            "the first token (as released), or only those of padding."
        ),
    ] = None,
    target: Annotated[
        int | None, typer.Option(help="The class to flip to; any other one by default.")
    ] = None,
    continuation: Annotated[
        int | None,
        typer.Option(
            help="How many tokens of a language model's answer to look at; a flip changes one."
        ),
    ] = None,
    certify: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help="Instead of attacking, prove which answers stay the same whichever K units are "
            "cut: exactly for 1, by a bound for more (BERT classifiers).",
        ),
    ] = None,
    task: Annotated[
        Task | None, typer.Option(help="What the model's head is for, where its files do not say.")
    ] = None,
    longest: Longest = 128,
    device: Device = "cpu",
    processes: Processes = 0,
    dask: DaskAddress = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Remember every outcome in this file; the same command resumes from it.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save every outcome as JSON."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write a page that shows what was cut."),
    ] = None,
    force: Force = False,
    allow_pickle: AllowPickle = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Flip predictions by cutting a small share of attention, the text left alone."""
    expect_folder(out, page, resume)
    expect_new(out, page, force=force)
    if certify is not None:
        _expect_none(
            method=method, as_released=as_released or None, share=share, scope=scope,
            ranking=ranking, order=order, scale=scale, target=target, continuation=continuation,
            task=task, processes=processes or None, dask=dask, resume=resume, page=page,
            seed=seed or None,
        )  # fmt: skip
        with interruptible(), bars("disrupt", "examples") as track:
            proofs = certify_all(
                model, data, certify, spare=spare, text=text or (), label=label,
                classes=classes.split(",") if classes else (), examples=examples, longest=longest,
                device=device, allow_pickle=allow_pickle, track=track,
            )  # fmt: skip
            if out is not None:
                proofs.save(out)
        units = "one unit" if certify == 1 else f"up to {certify} units"
        words = f"{model}: {units} of attention cut\n{proofs.summary()}"
        answer(proofs.to_dict(), words, as_json=as_json)
        raise typer.Exit(exit_code([proofs.outcome]))
    kept = f"what is finished is in {resume}: the same command resumes" if resume else ""
    with interruptible(lambda: kept), bars("disrupt", "examples") as track:
        result = run(
            model, data, method=_method(method, as_released), share=share, scope=scope,
            ranking=ranking, order=order, scale=scale, spare=spare, target=target,
            continuation=continuation, text=text or (), label=label,
            classes=classes.split(",") if classes else (), examples=examples, task=task,
            longest=longest, device=device, allow_pickle=allow_pickle, processes=processes,
            dask=dask, resume=resume, seed=seed, track=track,
        )  # fmt: skip
        if out is not None:
            result.save(out)
        if page is not None:
            write_text(page, report.render(audit_of(result, model)))
    words = f"{model}: {result.method['words']}\n{result.summary()}"
    answer(result.to_dict(), words, as_json=as_json)
    raise typer.Exit(exit_code([result.status]))


def _expect_none(**options: object) -> None:
    """What belongs to an attack says nothing to a certificate."""
    for name, value in options.items():
        if value is not None:
            raise InputError(f"expected --{name.replace('_', '-')} without --certify, got both")


def _method(name: str | None, as_released: bool) -> str:
    if not as_released:
        return name or "strongest"
    if name not in (None, _RELEASED):
        raise InputError(f"expected --method {_RELEASED} with --{_RELEASED}, got {name}")
    return _RELEASED
