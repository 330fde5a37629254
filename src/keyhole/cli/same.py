"""`keyhole same`: are two sets of heads the same function?"""

from __future__ import annotations

import typer

from keyhole.cli.answers import answer
from keyhole.cli.app import Json, app
from keyhole.cli.canonical import Heads, Tolerance, read
from keyhole.extract.canonical import difference


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
    words = f"not the same function: {apart}" if apart else "the same function"
    data = {"same": not apart, "difference": apart, "tolerance": tolerance}
    answer(data, words, as_json=as_json)
    raise typer.Exit(1 if apart else 0)
