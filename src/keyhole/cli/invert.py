"""`keyhole invert PROBLEM` and `keyhole invert text MODEL LEAK …`: parse, one call, print."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from keyhole.cli.app import (
    CLEAN,
    FAILURE,
    FINDINGS,
    INTERRUPTED,
    Device,
    Json,
    Seed,
    app,
)
from keyhole.cli.console import progress, say

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.invert import Certificate, Inversion


class MethodName(StrEnum):
    AUTO = "auto"
    LEVENBERG_MARQUARDT = "levenberg-marquardt"
    NEWTON_CG = "newton-cg"
    MODIFIED_NEWTON = "modified-newton"
    REGULARIZED_NEWTON = "regularized-newton"
    LBFGS = "lbfgs"
    ADAM = "adam"
    GRADIENT_DESCENT = "gradient-descent"
    CLOSED_FORM = "closed-form"


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
        MethodName, typer.Option(help="The solver; auto chooses by the problem's structure.")
    ] = MethodName.AUTO,
    starts: Annotated[int, typer.Option(help="How many starts to try.")] = 256,
    solutions: Annotated[
        int | None,
        typer.Option(help="Stop after so many different exact inputs: 16 for auto, else 1."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after so long, with the best found.")
    ] = None,
    proof: Annotated[
        bool, typer.Option("--certify", help="Prove how close an exact input is to the one found.")
    ] = False,
    device: Device = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the result as JSON, the inputs beside it."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Read the input of an attention layer back from its weights and output.

    `keyhole invert FILE` is the same as `keyhole invert problem FILE`.
    """
    from keyhole.invert import Problem, certify
    from keyhole.invert.registry import named
    from keyhole.results import Status, dump

    asked = Problem.load(problem)
    if solutions is None:
        solutions = 16 if method == "auto" else 1
    attack = named(
        method, starts=starts, solutions=solutions,
        seconds=seconds, device=device, seed=seed,
    )  # fmt: skip
    n, d = asked.length, asked.dim
    say(f"{problem}: {n} tokens, d = {d}, {n * d:,} unknowns (Ctrl-C gives the best found)")
    with progress("starts") as track:
        show = track(method.value, starts)
        found = attack(asked, watch=lambda done, total, best: show(done, total, f"best {best:.1e}"))
    certificate = certify(asked, found.X) if proof and found.X is not None else None
    if out is not None:
        found.save(out)
    if as_json:
        data = found.to_dict()
        if proof:
            data["certificate"] = None if certificate is None else certificate.to_dict()
        typer.echo(dump(data))
    say(_summary(found, certificate))
    if found.status is Status.INTERRUPTED:
        raise typer.Exit(INTERRUPTED)
    if found.status is Status.NOT_APPLICABLE:
        raise typer.Exit(FAILURE)
    raise typer.Exit(FINDINGS if found.status in (Status.RECOVERED, Status.INEXACT) else CLEAN)


def _summary(found: Inversion, certificate: Certificate | None) -> str:
    lines = [
        f"{found.status}: {found.reason}",
        f"{found.starts:,} starts, {found.iterations:,} iterations, {found.seconds:.2f} s",
    ]
    if found.condition is not None:
        lines.append(f"condition {found.condition:.1e}: errors in the output grow by that much")
    if certificate is not None:
        lines.append(
            f"proved: exactly one input with this output lies within {certificate.radius:.1e}"
            if certificate.radius is not None
            else f"no certificate: {certificate.reason}"
        )
    return "\n".join([*lines, found.advice])
