"""`keyhole invert PROBLEM`: parse, one library call, print; `keyhole invert text` joins it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from keyhole.cli.answers import answer
from keyhole.cli.app import (
    INTERRUPTED,
    Device,
    Force,
    Json,
    Seed,
    and_tensors,
    app,
    expect_folder,
    expect_new,
    interruptible,
    name_in,
)
from keyhole.cli.bars import bars
from keyhole.cli.console import say
from keyhole.cli.invert_bounds import EXAMPLE as BOUNDS_EXAMPLE
from keyhole.cli.invert_bounds import invert_bounds
from keyhole.cli.invert_layers import EXAMPLE as LAYERS_EXAMPLE
from keyhole.cli.invert_layers import invert_layers
from keyhole.cli.invert_text import EXAMPLE, invert_text
from keyhole.core import Status, exit_code
from keyhole.core.progress import Progress
from keyhole.invert.problem import Problem
from keyhole.invert.registry import METHODS, STARTS
from keyhole.invert.run import run


class _Group(typer.core.TyperGroup):
    """`keyhole invert FILE` means `keyhole invert problem FILE`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = ["problem", *args]
        return super().resolve_command(ctx, args)


group = typer.Typer(cls=_Group, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(
    group, name="invert", help="Read inputs back: of one attention layer, or the text of a model."
)


@group.command(
    "problem",
    epilog="\b\nExample:\n"
    "  keyhole plant problem.safetensors --kind inversion --dim 8 --tokens 6 --scale 0.3\n"
    "  keyhole invert problem.safetensors --certify --out found.json",
)
def invert(
    problem: Annotated[
        Path,
        typer.Argument(
            metavar="PROBLEM", help="A .safetensors file with W, V, B (and maps, if they leaked)."
        ),
    ],
    method: Annotated[
        str, name_in(METHODS, "The solver; auto chooses by the problem's structure.")
    ] = "auto",
    starts: Annotated[
        int | None,
        typer.Option(
            help=f"How many starts to try, {STARTS} by default; for token-by-token, how many for "
            "each token, 24 by default."
        ),
    ] = None,
    solutions: Annotated[
        int | None,
        typer.Option(
            help="Stop after this many different exact inputs: by default 16 for auto, else 1."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Stop after this many seconds, with the best input found by then."),
    ] = None,
    gamma: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|paper",
            help="The weight of the regulariser, for regularized-newton; by default paper, which "
            "makes the Hessian positive definite.",
        ),
    ] = None,
    slack: Annotated[
        float | None,
        typer.Option(
            help="How far the Hessian is known, as a factor of 1 + slack, for regularized-newton; "
            "0.1 by default."
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Draw the Hessian at random within the slack, except with this probability, for "
            "regularized-newton; by default the worst that the slack allows is taken."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="The learning rate, for adam and gradient-descent-as-published (fixed, 0.01 by "
            "default)."
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Start from the tensor X of this .safetensors file, one input or several, with a "
            "method that searches from starts.",
        ),
    ] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Prove how close an exact input is to the one found.")
    ] = False,
    device: Device = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the result as JSON, the inputs beside it."),
    ] = None,
    force: Force = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Read the input of an attention layer back from its weights and output.

    `keyhole invert FILE` is the same as `keyhole invert problem FILE`.
    """
    expect_folder(out)
    expect_new(*and_tensors(out), force=force)
    with interruptible(), bars("invert", each=False) as track:
        asked = Problem.load(problem)

        def begun(name: str, total: int | None = None) -> Progress:
            """Said when the search begins: a refusal comes before it, as the only line."""
            n, d = asked.length, asked.dim
            say(f"{problem}: {n} tokens, d = {d}, {n * d:,} unknowns (Ctrl-C gives the best found)")
            return track(name, total)

        result = run(
            asked, method, starts=starts, solutions=solutions, seconds=seconds, device=device,
            seed=seed, gamma=_weight(gamma), slack=slack, delta=delta, rate=rate,
            start=start, certify=certify, track=begun,
        )  # fmt: skip
        if out is not None:
            result.save(out)
    answer(result.to_dict(), result.summary(), as_json=as_json)
    if result.status is Status.INTERRUPTED:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(exit_code([result.status]))


def _weight(gamma: str | None) -> float | str | None:
    """A number where it is one; the method refuses other words than its own."""
    try:
        return None if gamma is None else float(gamma)
    except ValueError:
        return gamma


group.command("text", epilog=EXAMPLE)(invert_text)
group.command("layers", epilog=LAYERS_EXAMPLE)(invert_layers)
group.command("bounds", epilog=BOUNDS_EXAMPLE)(invert_bounds)
