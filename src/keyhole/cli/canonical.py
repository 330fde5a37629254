"""`keyhole canonical`: what answers can show of several heads, from a file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.answers import answer
from keyhole.cli.app import Force, Json, app, expect_folder, expect_new
from keyhole.core.errors import InputError
from keyhole.extract import canonical as heads
from keyhole.oracle import MultiHead, save
from keyhole.oracle.planted import Head
from keyhole.oracle.storage import load_plain

Heads = Annotated[
    Path, typer.Argument(metavar="FILE", help="A target, or the weights that extract --out saved.")
]
Tolerance = Annotated[
    float, typer.Option(help="What counts as equal, relative to the largest entry.")
]


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant heads.safetensors --kind multi-head --dim 6 --heads 3\n"
    "  keyhole canonical heads.safetensors --out merged.safetensors",
)
def canonical(
    file: Heads,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the canonical heads here.")
    ] = None,
    tolerance: Tolerance = 1e-12,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Reduce heads to what answers can show: equal W merged, invisible heads dropped."""
    expect_folder(out)
    expect_new(out, force=force)
    model = read(file)
    reduced, remarks = heads.canonical(model, tolerance), heads.remarks(model, tolerance)
    if out is not None:
        save(reduced, out)
    words = f"{len(model.W)} heads, {len(reduced.W)} in canonical form, d = {model.dim}"
    data = {"heads": len(model.W), "canonical": len(reduced.W), "remarks": remarks}
    answer(data, "\n".join([words, *remarks]), as_json=as_json)


def read(file: Path) -> MultiHead:
    """The heads in a file; one alone is a set of one."""
    target, degradation = load_plain(file)
    if degradation:
        raise InputError(f"expected plain heads in {file}, got {degradation}")
    if isinstance(target, Head):
        return MultiHead([target.W], [target.v])
    if not isinstance(target, MultiHead):
        raise InputError(f"expected a head or a multi-head target in {file}, got {target.kind}")
    return target
