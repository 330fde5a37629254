"""`keyhole plant` and `keyhole serve`: targets of known weights, to rehearse on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.app import Json, Seed, app
from keyhole.cli.console import say
from keyhole.errors import InputError


@app.command(
    epilog="\b\nExample:\n  keyhole plant target.safetensors --dim 32 --rank 4 --seed 7\n"
    "  keyhole plant problem.safetensors --kind inversion --dim 8 --tokens 6 --scale 0.3",
)
def plant(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the target.")],
    kind: Annotated[
        str, typer.Option(help="head, multi-head, one-layer, attention or inversion.")
    ] = "head",
    dim: Annotated[int, typer.Option(help="Dimension of a token.")] = 64,
    rank: Annotated[int | None, typer.Option(help="Rank of every W; full if not given.")] = None,
    heads: Annotated[int, typer.Option(help="Number of heads (not for a head).")] = 1,
    width: Annotated[int, typer.Option(help="Hidden units (one-layer).")] = 32,
    scale: Annotated[float, typer.Option(help="Scale of W; 1 gives a norm of about 2.")] = 1.0,
    every_token: Annotated[
        bool, typer.Option("--every-token", help="Answer for every token (attention).")
    ] = False,
    causal: Annotated[
        bool, typer.Option("--causal", help="Causal mask (attention, inversion).")
    ] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of the secret input (inversion).")] = 8,
    residual: Annotated[
        bool, typer.Option("--residual", help="Residual connection (inversion).")
    ] = False,
    maps: Annotated[
        bool, typer.Option("--maps", help="Leak the attention maps as well (inversion).")
    ] = False,
    seed: Seed = 0,
) -> None:
    """Plant a target of known weights, or an output of unknown input, to rehearse an attack on."""
    from keyhole import invert, oracle

    if kind == "inversion":
        problem, secret = invert.plant(
            tokens, dim, scale=scale, heads=heads, residual=residual, causal=causal, seed=seed
        )
        if maps:
            problem = replace(problem, maps=problem.maps_of(secret))
        problem.save(path)
        say(f"{path}: the output of {tokens} secret tokens, d = {dim}")
        return
    target = oracle.plant(
        kind, dim=dim, rank=rank, heads=heads, width=width, scale=scale,
        every_token=every_token, causal=causal, seed=seed,
    )  # fmt: skip
    oracle.save(target, path)
    say(f"{path}: {kind}, d = {dim}, {target.unknowns:,} unknowns")


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors\n"
    "  keyhole serve target.safetensors --port 8080 --name head\n"
    "  keyhole extract http://127.0.0.1:8080/v2/models/head",
)
def serve(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A planted target.")],
    name: Annotated[str, typer.Option(help="The model's name on the server.")] = "target",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    as_json: Json = False,
) -> None:
    """Put a planted target behind a real inference server (MLServer), to rehearse on."""
    try:
        from keyhole.oracle.server import serve as run
    except ModuleNotFoundError as missing:
        raise InputError(
            "expected MLServer for serve, got none: pip install 'keyhole[serve]'"
        ) from missing
    url = f"http://{host}:{port}/v2/models/{name}"
    if as_json:
        from keyhole.results import dump

        typer.echo(dump({"url": url}))
    say(f"serving {target} at {url} (Ctrl-C ends it)")
    run(target, name=name, host=host, port=port)
