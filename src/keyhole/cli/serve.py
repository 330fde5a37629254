"""`keyhole serve`: a planted target behind a real inference server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.app import ClippedAt, Decimals, Json, Noise, Seed, SignOnly, app
from keyhole.cli.console import show
from keyhole.core import dump
from keyhole.core.errors import MissingExtra
from keyhole.oracle.defences import Degradation


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors\n"
    "  keyhole serve target.safetensors --port 8080 --name head\n"
    "  keyhole serve target.safetensors --port 8081 --name rounded --decimals 3\n"
    "  keyhole serve target.safetensors --port 8082 --min-tokens 3 --client-budget 1000\n"
    "  keyhole extract http://127.0.0.1:8080/v2/models/head",
)
def serve(
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="A target written by keyhole plant.")
    ],
    name: Annotated[str, typer.Option(help="The model's name on the server.")] = "target",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8080,
    sign_only: SignOnly = False,
    decimals: Decimals = None,
    noise: Noise = None,
    fresh_noise: Annotated[
        float | None, typer.Option(help="Let answers be off by up to this, anew each time.")
    ] = None,
    max_norm: ClippedAt = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Refuse sequences of fewer tokens than this.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Refuse sequences of more tokens than this.")
    ] = None,
    usual_norm: Annotated[
        float | None,
        typer.Option(
            help="Refuse unusual inputs: tokens whose norm is not within a factor of 2 of this, "
            "tokens along one coordinate, two tokens along one direction."
        ),
    ] = None,
    client_budget: Annotated[
        int | None, typer.Option(help="Answer each address at most so many queries in all.")
    ] = None,
    client_rate: Annotated[
        float | None,
        typer.Option(help="Answer each address at most so many queries a second."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Put a planted target behind a real inference server (MLServer)."""
    degradation = Degradation(
        max_norm, noise, decimals, sign_only, seed, fresh_noise, min_tokens, max_tokens, usual_norm
    )
    try:
        from keyhole.oracle.server import serve as run
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            "serve needs MLServer, which is not installed and takes Python 3.12 or older", "serve"
        ) from missing
    url = f"http://{host}:{port}/v2/models/{name}"

    def begun() -> None:
        if as_json:
            typer.echo(dump({"url": url}))
        else:
            done = f", {degradation}," if degradation else ""
            if client_budget is not None:
                done += f" {client_budget:,} queries of an address at most,"
            if client_rate is not None:
                done += f" {client_rate:g} a second of each,"
            show(f"serving {target}{done} at {url} (Ctrl-C ends it)")
        sys.stdout.flush()

    run(
        target, name=name, host=host, port=port, degradation=degradation,
        client_budget=client_budget, client_rate=client_rate, begun=begun,
    )  # fmt: skip
