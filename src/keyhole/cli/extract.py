"""`keyhole extract`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.app import (
    Force,
    Json,
    LedgerFile,
    Seed,
    Target,
    and_tensors,
    app,
    expect_folder,
    expect_new,
    interruptible,
    name_in,
)
from keyhole.cli.bars import bars
from keyhole.cli.console import show
from keyhole.extract.registry import METHODS
from keyhole.extract.run import run
from keyhole.oracle.ledger import answers_in
from keyhole.results import dump, exit_code

_UNIT = "queries, the judge's included"


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors --dim 32 --rank 4\n"
    "  keyhole extract target.safetensors --method low-rank --ledger run.db --json",
)
def extract(
    target: Target,
    method: Annotated[
        str, name_in(METHODS, "The attack; auto finds out from the answers which one applies.")
    ] = "auto",
    rank: Annotated[
        int | None, typer.Option(help="Rank of W, if known (low-rank, nuclear-norm).")
    ] = None,
    answer_error: Annotated[
        float | None, typer.Option(help="How far an answer may be off (tolerant, fitted).")
    ] = None,
    max_norm: Annotated[
        float | None, typer.Option(help="Norm of the longest token the target takes (tolerant).")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Ask at most this many queries.")] = None,
    ledger: LedgerFile = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the result as JSON, the weights beside it."),
    ] = None,
    force: Force = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Read the weights back from black-box answers."""
    expect_folder(out)
    expect_new(*and_tensors(out), force=force)
    with interruptible(lambda: _kept(ledger)), bars("extract", _UNIT, each=False) as track:
        result = run(
            target, method, rank=rank, answer_error=answer_error, max_norm=max_norm,
            budget=budget, ledger=ledger, seed=seed, track=track,
        )  # fmt: skip
        if out is not None:
            result.save(out)
    if as_json:
        typer.echo(dump(result.to_dict()))
    else:
        show(result.summary())
    raise typer.Exit(exit_code([result.status]))


def _kept(ledger: Path | None) -> str:
    """What a stopped run has paid for already."""
    if ledger is None:
        return ""
    return f"{answers_in(ledger):,} answers are in {ledger}: the same command resumes"
