"""`keyhole plant`: targets of known weights, and outputs of known inputs, to try attacks on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from keyhole import invert, oracle
from keyhole.bounds import expect_count
from keyhole.cli.app import Force, Seed, app, expect_folder, expect_new
from keyhole.cli.console import show


@app.command(
    epilog="\b\nExample:\n  keyhole plant target.safetensors --dim 32 --rank 4 --seed 7\n"
    "  keyhole plant problem.safetensors --kind inversion --dim 8 --tokens 6 --scale 0.3",
)
def plant(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the target.")],
    kind: Annotated[
        str, typer.Option(help=f"What to plant: {', '.join(oracle.KINDS)} or inversion.")
    ] = "head",
    dim: Annotated[int, typer.Option(help="The dimension of a token.")] = 64,
    rank: Annotated[
        int | None, typer.Option(help="The rank of every W; full rank if not given.")
    ] = None,
    heads: Annotated[int, typer.Option(help="The number of heads (all kinds but head).")] = 1,
    width: Annotated[int, typer.Option(help="The hidden units (one-layer, relu).")] = 32,
    scale: Annotated[float, typer.Option(help="The scale of W; 1 gives a norm of about 2.")] = 1.0,
    every_token: Annotated[
        bool, typer.Option("--every-token", help="Answer for every token (attention).")
    ] = False,
    causal: Annotated[
        bool, typer.Option("--causal", help="Mask the future (attention, inversion).")
    ] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of the secret input (inversion).")] = 8,
    residual: Annotated[
        bool, typer.Option("--residual", help="Add a residual connection (inversion).")
    ] = False,
    maps: Annotated[
        bool, typer.Option("--maps", help="Leak the attention maps as well (inversion).")
    ] = False,
    force: Force = False,
    seed: Seed = 0,
) -> None:
    """Plant a target of known weights, or a layer's output, to try an attack on."""
    expect_count("--tokens", tokens)
    expect_folder(path)
    expect_new(path, force=force)
    if kind == "inversion":
        problem, secret = invert.plant(
            tokens, dim, scale=scale, heads=heads, residual=residual, causal=causal, seed=seed
        )
        if maps:
            problem = replace(problem, maps=problem.maps_of(secret))
        problem.save(path)
        show(f"{path}: the output of {tokens} secret tokens, d = {dim}")
        return
    target = oracle.plant(
        kind, dim=dim, rank=rank, heads=heads, width=width, scale=scale,
        every_token=every_token, causal=causal, seed=seed,
    )  # fmt: skip
    oracle.save(target, path)
    show(f"{path}: {kind}, d = {dim}, {target.unknowns:,} unknowns")
