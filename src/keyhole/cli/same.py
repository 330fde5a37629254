"""`keyhole same`: are two sets of heads the same function?"""

from __future__ import annotations

import typer

from keyhole.cli.app import Json, app
from keyhole.cli.canonical import Heads, Tolerance, read
from keyhole.cli.console import show
from keyhole.extract.heads.canonical import difference
from keyhole.results import dump


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant heads.safetensors --kind multi-head --dim 6 --heads 3\n"
    "  keyhole extract heads.safetensors --out found.json\n"
    "  keyhole same heads.safetensors found.safetensors --tolerance 1e-8",
)
def same(
    first: Heads,
    second: Heads,
    tolerance: Tolerance = 1e-9,
    as_json: Json = False,
) -> None:
    """Tell whether two sets of heads are one function: exit code 0 if they are, 1 if not."""
    apart = difference(read(first), read(second), tolerance)
    if as_json:
        typer.echo(dump({"same": not apart, "difference": apart, "tolerance": tolerance}))
    else:
        show(f"not the same function: {apart}" if apart else "the same function")
    raise typer.Exit(1 if apart else 0)
