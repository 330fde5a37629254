"""`keyhole extract`: parse, one library call, print."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.cli.app import (
    CLEAN,
    FAILURE,
    FINDINGS,
    Json,
    LedgerFile,
    Seed,
    Target,
    app,
    ready_surfaces,
)
from keyhole.cli.console import progress, say

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.extract import Extraction


class MethodName(StrEnum):
    AUTO = "auto"
    SINGLE_HEAD = "single-head"
    LOW_RANK = "low-rank"
    NUCLEAR_NORM = "nuclear-norm"
    TOLERANT = "tolerant"
    SIGN_ONLY = "sign-only"
    ONE_LAYER = "one-layer"
    MULTI_HEAD = "multi-head"
    ORTHOGONAL_HEADS = "orthogonal-heads"
    FULL_OUTPUT = "full-output"


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors --dim 32 --rank 4\n"
    "  keyhole extract target.safetensors --method low-rank --ledger run.db --json",
)
def extract(
    target: Target,
    method: Annotated[
        MethodName, typer.Option(help="The attack; auto finds out from the answers.")
    ] = MethodName.AUTO,
    rank: Annotated[
        int | None, typer.Option(help="Rank of W, if known (low-rank, nuclear-norm).")
    ] = None,
    answer_error: Annotated[
        float | None, typer.Option(help="How far an answer may be off (tolerant).")
    ] = None,
    max_norm: Annotated[
        float | None, typer.Option(help="Longest token the target takes (tolerant).")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Ask at most this many queries.")] = None,
    ledger: LedgerFile = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the result as JSON, the weights beside it."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Read the weights back from black-box answers."""
    from keyhole.extract.registry import named
    from keyhole.oracle import Counted
    from keyhole.oracle.target import open_target
    from keyhole.results import Status, dump

    attack = named(method, rank=rank, answer_error=answer_error, max_norm=max_norm, seed=seed)
    surfaces = {"": open_target(target)}
    with ready_surfaces(surfaces, budget, ledger) as ready, progress() as track:
        show = track(method.value, attack.expected(ready[""].dim))
        result = attack(Counted(ready[""], watch=show))
    if out is not None:
        result.save(out)
    if as_json:
        typer.echo(dump(result.to_dict()))
    say(_summary(result))
    if result.status is Status.ORACLE_FAILED:
        raise typer.Exit(FAILURE)
    found = result.status in (Status.RECOVERED, Status.INEXACT)
    raise typer.Exit(FINDINGS if found else CLEAN)


def _summary(result: Extraction) -> str:
    floor = "" if result.floor is None else f" (unknowns: {result.floor:,})"
    free = f", {result.remembered:,} of them remembered" if result.remembered else ""
    return (
        f"{result.status}: {result.reason}\n"
        f"{result.queries:,} queries{free}{floor}, {result.seconds:.2f} s\n"
        f"{result.status.advice}"
    )
