"""`keyhole invert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import INTERRUPTED, command, interruptible
from keyhole.cli.bars import bars
from keyhole.cli.outputs import answer, expect_new, say, with_tensor_file
from keyhole.core import Status, exit_code
from keyhole.core.options import CHECKS, option

if TYPE_CHECKING:
    from keyhole.core.progress import Progress


@command(
    "keyhole lab plant problem.safetensors --kind inversion -o dim=8 -o tokens=6 -o scale=0.3",
    "keyhole invert problem.safetensors --certify --out found.json",
)
def invert(
    problem: opt.ProblemFile,
    method: opt.Method = None,
    hyperparameters: opt.MethodOptions = None,
    start: Path | None = option(
        None,
        "Begin the search at the tensor X of this .safetensors file, one input (n×d) or several "
        "(k×n×d); only for methods that search from starts.",
        CHECKS,
        metavar="FILE",
    ),
    certify: bool = option(
        False,
        "Prove that exactly one input with this very output lies near the one found, and how near.",
        CHECKS,
    ),
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    out: opt.Out = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Read the input of an attention layer back from its weights and output.

    Without --method, the problem's structure decides which method is used. Ctrl-C ends
    the search with the best input found so far.
    """
    from keyhole.invert.problem import Problem
    from keyhole.invert.registry import METHODS
    from keyhole.invert.run import run

    expect_new(*with_tensor_file(out), force=force, inputs=(problem, start))
    method = method or "auto"
    options = opt.method_options(METHODS, method, hyperparameters)
    with interruptible(), bars("invert", each=False) as track:
        loaded = Problem.load(problem)

        def announced(name: str, total: int | None = None) -> Progress:
            """Announce the search when it begins, then track it; a refusal comes before that."""
            n = loaded.length
            d = loaded.dim
            say(
                f"{problem}: {n} tokens, d = {d}, {n * d:,} unknowns (Ctrl-C gives the best found)"
            )
            return track(name, total)

        result = run(
            loaded,
            method,
            **options,
            device=device,
            seed=seed,
            start=start,
            certify=certify,
            track=announced,
        )
        if out is not None:
            result.save(out)
    answer(result.to_dict(), result.summary(), as_json=as_json)
    if result.status is Status.INTERRUPTED:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(exit_code([result.status]))
