"""`keyhole invert layers`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.answers import answer
from keyhole.cli.app import (
    Device,
    Force,
    Json,
    Seed,
    and_tensors,
    expect_folder,
    expect_new,
    interruptible,
    name_in,
)
from keyhole.cli.bars import bars
from keyhole.cli.console import say
from keyhole.core import exit_code
from keyhole.core.journal import records_in
from keyhole.core.progress import Progress
from keyhole.lab.stacks import METHODS, Stack, run

EXAMPLE = (
    "\b\nExample:\n"
    "  keyhole plant stack.safetensors --kind inversion --layers 2 --residual --dim 4 --tokens 5\n"
    "  keyhole invert layers stack.safetensors --out first.json"
)


def invert_layers(
    stack: Annotated[
        Path,
        typer.Argument(
            metavar="STACK",
            help="A .safetensors file with 1.W, 1.V, 2.W, 2.V, … and the last output B.",
        ),
    ],
    method: Annotated[
        str, name_in(METHODS, "Layer by layer from the top, or all layers at once.")
    ] = "peel",
    starts: Annotated[
        int | None,
        typer.Option(help="How many starts to try: 64 for each layer (peel), 32 (end-to-end)."),
    ] = None,
    solutions: Annotated[
        int | None,
        typer.Option(help="Stop a layer after this many different inputs, by default 4 (peel)."),
    ] = None,
    branches: Annotated[
        int | None,
        typer.Option(help="Carry so many candidates from layer to layer, by default 8 (peel)."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop each search of one layer after this (peel).")
    ] = None,
    device: Device = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the result as JSON, the inputs beside it. Until then every finished search "
            "is kept in FILE.journal, and the same command resumes.",
        ),
    ] = None,
    force: Force = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Read the input of several layers back from their weights and the last output."""
    expect_folder(out)
    expect_new(*and_tensors(out), force=force)
    journal = None if out is None else out.with_name(f"{out.name}.journal")
    with interruptible(lambda: _kept(journal)), bars("invert layers", each=False) as track:
        asked = Stack.load(stack)

        def begun(name: str, total: int | None = None) -> Progress:
            """Said when the search begins: a refusal comes before it, as the only line."""
            say(f"{stack}: {len(asked.layers)} layers, {len(asked.B)} tokens")
            return track(name, total)

        result = run(
            asked, method, starts=starts, solutions=solutions, branches=branches,
            seconds=seconds, device=device, seed=seed, journal=journal, force=force, track=begun,
            resuming=lambda done: say(f"resuming: {done} searches are done"),
        )  # fmt: skip
        if out is not None:
            result.save(out)
    if journal is not None:
        journal.unlink(missing_ok=True)
    answer(result.to_dict(), result.summary(), as_json=as_json)
    raise typer.Exit(exit_code([result.status]))


def _kept(journal: Path | None) -> str:
    """What a stopped run has behind it."""
    searches = 0 if journal is None else records_in(journal)
    if not searches:
        return ""
    return f"{searches} finished searches are in {journal}: the same command resumes"
