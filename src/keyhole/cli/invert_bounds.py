"""`keyhole invert bounds`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.answers import answer
from keyhole.cli.app import Json, Seed, interruptible
from keyhole.invert.run import measure_bounds

EXAMPLE = (
    "\b\nExample:\n"
    "  keyhole plant layer.safetensors --kind inversion --dim 4 --tokens 3 --scale 0.3\n"
    "  keyhole invert layer.safetensors --starts 32 --out input.json\n"
    "  keyhole invert bounds layer.safetensors input.safetensors"
)


def invert_bounds(
    problem: Annotated[
        Path, typer.Argument(metavar="PROBLEM", help="A .safetensors file with W, V, B.")
    ],
    at: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A .safetensors file with the input X to measure at, such as the one that "
            "keyhole invert --out writes.",
        ),
    ],
    radius: Annotated[
        float | None,
        typer.Option(
            help="The paper's R, 1 or more; by default the least that covers W, V, the output "
            "and X."
        ),
    ] = None,
    neighbours: Annotated[
        int, typer.Option(help="How many neighbours of X to compare the Hessian with.")
    ] = 32,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Print the paper's bounds on the Hessian beside measured values, and what they assume."""
    with interruptible():
        bounds = measure_bounds(problem, at, R=radius, seed=seed, neighbours=neighbours)
    answer(bounds.to_dict(), bounds.summary(), as_json=as_json)
