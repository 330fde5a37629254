"""`keyhole plant`: targets of known weights, and outputs of known inputs, to try attacks on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from keyhole import invert, oracle
from keyhole.cli.app import (
    ClippedAt,
    Decimals,
    Force,
    Noise,
    Seed,
    SignOnly,
    app,
    expect_folder,
    expect_new,
)
from keyhole.cli.console import show
from keyhole.core.errors import InputError, expect_count
from keyhole.core.files import write_tensors
from keyhole.lab import stacks

_HEADS = ("multi-head", "one-layer", "attention", "orthogonal-heads", "inversion")
# What each option is for: given with another kind it is an error, not silence.
_APPLIES = {
    "rank": ("head", "multi-head", "one-layer", "attention"),
    "heads": _HEADS,
    "width": ("one-layer", "relu"),
    "every_token": ("attention",),
    "causal": ("attention", "inversion"),
    "bases": ("orthogonal-heads",),
    "tokens": ("inversion",),
    "residual": ("inversion",),
    "maps": ("inversion",),
    "layers": ("inversion",),
    **dict.fromkeys(("sign_only", "decimals", "noise", "max_norm"), oracle.KINDS),
}


@app.command(
    epilog="\b\nExample:\n  keyhole plant target.safetensors --dim 32 --rank 4 --seed 7\n"
    "  keyhole plant rounded.safetensors --dim 8 --decimals 3 --max-norm 10\n"
    "  keyhole plant subspaces.safetensors --kind orthogonal-heads --dim 16 --heads 4 "
    "--bases bases.safetensors\n"
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
    heads: Annotated[
        int | None, typer.Option(help="The number of heads, 1 if not given (not: head, relu).")
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="The hidden units, 32 if not given (one-layer, relu).")
    ] = None,
    scale: Annotated[float, typer.Option(help="The scale of W; 1 gives a norm of about 2.")] = 1.0,
    every_token: Annotated[
        bool, typer.Option("--every-token", help="Answer for every token (attention).")
    ] = False,
    causal: Annotated[
        bool, typer.Option("--causal", help="Mask the future (attention, inversion).")
    ] = False,
    sign_only: SignOnly = False,
    decimals: Decimals = None,
    noise: Noise = None,
    max_norm: ClippedAt = None,
    bases: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the bases of the subspaces here (orthogonal-heads)."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of the secret input, 8 if not given (inversion).")
    ] = None,
    residual: Annotated[
        bool, typer.Option("--residual", help="Add a residual connection (inversion).")
    ] = False,
    maps: Annotated[
        bool, typer.Option("--maps", help="Leak the attention maps as well (inversion).")
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option(help="A stack of so many layers, only the last output known (inversion)."),
    ] = None,
    force: Force = False,
    seed: Seed = 0,
) -> None:
    """Plant a target of known weights, or a layer's output, to try an attack on."""
    _expect_applicable(
        kind, rank=rank, heads=heads, width=width, every_token=every_token, causal=causal,
        sign_only=sign_only, decimals=decimals, noise=noise, max_norm=max_norm, bases=bases,
        tokens=tokens, residual=residual, maps=maps, layers=layers,
    )  # fmt: skip
    expect_folder(path, bases)
    expect_new(path, bases, force=force)
    count = 1 if heads is None else heads
    if layers is not None:
        if maps or heads is not None:
            raise InputError("expected --layers without --maps and --heads, got both")
        _plant_layers(path, dim, tokens, scale, layers, residual, causal, seed)
        return
    if kind == "inversion":
        _plant_inversion(path, dim, tokens, scale, count, residual, causal, maps, seed)
        return
    degradation = oracle.Degradation(max_norm, noise, decimals, sign_only, seed)
    if kind == "orthogonal-heads":
        target, subspaces = oracle.plant_orthogonal(dim, count, scale=scale, seed=seed)
        if bases is not None:
            write_tensors(bases, {f"basis {n}": basis for n, basis in enumerate(subspaces)}, {})
    else:
        target = oracle.plant(
            kind, dim=dim, rank=rank, heads=count, width=32 if width is None else width,
            scale=scale, every_token=every_token, causal=causal, seed=seed,
        )  # fmt: skip
    oracle.save(target, path, degradation)
    done = f"; {degradation}" if degradation else ""
    show(f"{path}: {kind}, d = {dim}, {target.unknowns:,} unknowns{done}")


def _plant_inversion(
    path: Path, dim: int, tokens: int | None, scale: float, heads: int, residual: bool,
    causal: bool, maps: bool, seed: int,
) -> None:  # fmt: skip
    tokens = 8 if tokens is None else tokens
    expect_count("--tokens", tokens)
    problem, secret = invert.plant(
        tokens, dim, scale=scale, heads=heads, residual=residual, causal=causal, seed=seed
    )
    if maps:
        problem = replace(problem, maps=problem.maps_of(secret))
    problem.save(path)
    show(f"{path}: the output of {tokens} secret tokens, d = {dim}")


def _plant_layers(
    path: Path, dim: int, tokens: int | None, scale: float, layers: int, residual: bool,
    causal: bool, seed: int,
) -> None:  # fmt: skip
    tokens = 8 if tokens is None else tokens
    expect_count("--tokens", tokens)
    stack, _ = stacks.plant(
        layers, tokens, dim, scale=scale, residual=residual, causal=causal, seed=seed
    )
    stack.save(path)
    show(f"{path}: the output of {layers} layers for {tokens} secret tokens, d = {dim}")


def _expect_applicable(kind: str, **given: object) -> None:
    """Options that mean nothing for this kind are refused."""
    if kind not in (*oracle.KINDS, "inversion"):
        raise InputError(f"expected a kind among {', '.join(oracle.KINDS)}, inversion, got {kind}")
    for name, value in given.items():
        if value is not None and value is not False and kind not in _APPLIES[name]:
            flag = f"--{name.replace('_', '-')}"
            kinds = " or ".join(_APPLIES[name])
            raise InputError(f"expected {flag} with --kind {kinds}, got {kind}")
