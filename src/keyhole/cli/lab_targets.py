"""`keyhole lab plant|canonical|same`: targets of known weights, to try attacks on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import command, lab
from keyhole.cli.outputs import answer, expect_new, show
from keyhole.core.errors import InputError, expect_count
from keyhole.core.options import CHECKS, OUTPUT, TARGET, option, settings

if TYPE_CHECKING:
    from keyhole.oracle import MultiHead

_TYPES: dict[str, Any] = {
    "dim": int,
    "rank": int,
    "heads": int,
    "width": int,
    "tokens": int,
    "layers": int,
    "scale": float,
    "every_token": bool,
    "causal": bool,
    "residual": bool,
    "maps": bool,
    "bases": Path,
    "sign_only": bool,
    "decimals": int,
    "noise": float,
    "max_norm": float,
}
_ANSWERS = (
    "sign_only",
    "decimals",
    "noise",
    "max_norm",
)  # options that change a target's answers
_TAKES = {  # the options of each kind; those of another kind are refused
    "head": ("dim", "rank", "scale", *_ANSWERS),
    "multi-head": ("dim", "rank", "heads", "scale", *_ANSWERS),
    "one-layer": ("dim", "rank", "width", "scale", *_ANSWERS),
    "relu": ("dim", "width", "scale", *_ANSWERS),
    "attention": ("dim", "rank", "heads", "scale", "every_token", "causal", *_ANSWERS),
    "attention-layers": (
        "dim",
        "rank",
        "heads",
        "layers",
        "scale",
        "every_token",
        "causal",
        *_ANSWERS,
    ),
    "orthogonal-heads": ("dim", "heads", "scale", "bases", *_ANSWERS),
    "inversion": ("dim", "tokens", "scale", "heads", "residual", "causal", "maps"),
}
Heads = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="A target, or the weights that extract --out saved."
    ),
]
Tolerance = Annotated[
    float, opt.about("What counts as equal, relative to the largest entry.", CHECKS)
]


@command(
    "keyhole lab plant target.safetensors -o dim=32 -o rank=4 --seed 7",
    "keyhole lab plant rounded.safetensors -o dim=8 -o decimals=3 -o max_norm=10",
    "keyhole lab plant subspaces.safetensors --kind orthogonal-heads -o dim=16 -o heads=4 "
    "-o bases=bases.safetensors",
    "keyhole lab plant problem.safetensors --kind inversion -o dim=8 -o tokens=6 -o scale=0.3",
    group=lab,
)
def plant(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to write the target.")
    ],
    kind: str = option(
        "head", f"What to plant: {', '.join(_TAKES)}.", TARGET, metavar="NAME"
    ),
    hyperparameters: opt.MethodOptions = None,
    force: opt.Force = False,
    seed: opt.Seed = 0,
) -> None:
    """Plant a target of known weights, or a layer's output, to try an attack on.

    -o sets, for every kind, dim (64) and scale (1 gives a W of norm about 2), and
    further: head: rank; multi-head: rank, heads; one-layer: rank, width (32); relu:
    width (32); attention: rank, heads, every_token, causal; attention-layers: the same,
    in each of layers (2); orthogonal-heads: heads, bases (the file to write their bases
    to); inversion: tokens (8), heads, residual, causal, maps (true: attention maps leak
    too).

    All but inversion may change their answers: sign_only, decimals, noise, max_norm.
    """
    if kind not in _TAKES:
        raise InputError(
            f"there is no kind {kind[:40]!r}: choose among {', '.join(_TAKES)}"
        )
    types = {name: _TYPES[name] for name in _TAKES[kind]}
    options: dict[str, Any] = {"dim": 64, "scale": 1.0} | settings(
        hyperparameters or (), types, kind
    )
    bases = options.pop("bases", None)
    expect_new(path, bases, force=force)
    if kind == "inversion":
        show(_plant_inversion(path, options, seed))
        return
    from keyhole import oracle
    from keyhole.core.files import write_tensors

    changed = {name: options.pop(name) for name in _ANSWERS if name in options}
    defence = oracle.Defence(**changed, seed=seed)
    if kind == "orthogonal-heads":
        target, subspaces = oracle.plant_orthogonal(
            **{"heads": 1, **options}, seed=seed
        )
        if bases is not None:
            write_tensors(
                bases, {f"basis {n}": basis for n, basis in enumerate(subspaces)}, {}
            )
    else:
        target = oracle.plant(kind, **options, seed=seed)
    oracle.save(target, path, defence)
    done = f"; {defence}" if defence.parameters else ""
    show(f"{path}: {kind}, d = {options['dim']}, {target.unknowns:,} unknowns{done}")


def _plant_inversion(
    path: Path,
    options: dict[str, Any],
    seed: int,
) -> str:
    """Write a layer's output, and describe in a line what was planted."""
    from dataclasses import replace

    from keyhole import invert

    tokens = options.pop("tokens", 8)
    maps = options.pop("maps", False)
    expect_count("tokens", tokens)
    problem, secret = invert.plant(tokens, **options, seed=seed)
    if maps:
        problem = replace(problem, maps=problem.maps_of(secret))
    problem.save(path)
    return f"{path}: the output of {tokens} secret tokens, d = {problem.dim}"


@command(
    "keyhole lab plant heads.safetensors --kind multi-head -o dim=6 -o heads=3",
    "keyhole lab canonical heads.safetensors --out merged.safetensors",
    group=lab,
)
def canonical(
    file: Heads,
    out: Path | None = option(
        None, "Write the canonical heads here.", OUTPUT, metavar="FILE"
    ),
    tolerance: Tolerance = 1e-12,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Reduce heads to what answers can show: equal W merged, invisible heads dropped."""
    from keyhole.extract.canonical import canonical as reduce
    from keyhole.extract.canonical import remarks as remarks_on
    from keyhole.oracle import save

    expect_new(out, force=force)
    model = _read_heads(file)
    reduced = reduce(model, tolerance)
    remarks = remarks_on(model, tolerance)
    if out is not None:
        save(reduced, out)
    words = f"{len(model.W)} heads, {len(reduced.W)} in canonical form, d = {model.dim}"
    data = {"heads": len(model.W), "canonical": len(reduced.W), "remarks": remarks}
    answer(data, "\n".join([words, *remarks]), as_json=as_json)


@command(
    "keyhole lab plant heads.safetensors --kind multi-head -o dim=6 -o heads=3",
    "keyhole extract heads.safetensors --out found.json",
    "keyhole lab same heads.safetensors found.safetensors --tolerance 1e-8",
    group=lab,
)
def same(
    first: Heads,
    second: Heads,
    tolerance: Tolerance = 1e-9,
    as_json: opt.Json = False,
) -> None:
    """Tell whether two sets of heads, or two blocks, are one function: exit code 0, or 1 if not."""
    from keyhole.extract.canonical import difference, difference_of_blocks
    from keyhole.oracle import Block, Blocks, load_plain

    a, b = (load_plain(file)[0] for file in (first, second))
    if isinstance(a, Block | Blocks) and isinstance(b, Block | Blocks):
        found = difference_of_blocks(a, b, tolerance)
    else:
        found = difference(_read_heads(first), _read_heads(second), tolerance)
    words = f"not the same function: {found}" if found else "the same function"
    data = {"same": not found, "difference": found, "tolerance": tolerance}
    answer(data, words, as_json=as_json)
    raise typer.Exit(1 if found else 0)


def _read_heads(file: Path) -> MultiHead:
    """Read the heads in a file; a single head becomes a set of one."""
    from keyhole.oracle import Head, MultiHead, load_plain

    target, defence = load_plain(file)
    if defence.parameters:
        raise InputError(
            f"{file} holds heads that answer with {defence}; give plain heads"
        )
    if isinstance(target, Head):
        return MultiHead([target.W], [target.v])
    if not isinstance(target, MultiHead):
        raise InputError(
            f"{file} holds {target.kind}, not heads: give a head or several"
        )
    return target
