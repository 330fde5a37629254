"""`keyhole invert PROBLEM` as a function: open a problem, choose a method, search, prove."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from keyhole.bounds import expect_count, expect_number
from keyhole.devices import expect_device
from keyhole.errors import InputError
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.proofs.certify import certify as prove
from keyhole.invert.registry import METHODS
from keyhole.invert.solvers.solver import Solve
from keyhole.progress import Track, untracked

MOST_STARTS = 1_000_000  # each waits in a list, and takes a moment at least


def run(
    problem: str | Path | Problem,
    method: str | Solve = "auto",
    *,
    starts: int | None = None,
    solutions: int | None = None,
    seconds: float | None = None,
    device: str = "cpu",
    seed: int = 0,
    certify: bool = False,
    track: Track = untracked,
) -> Inversion:
    """Read the input of an attention layer back from its weights and output.

    `problem` is a .safetensors file with W, V and B, or a problem; `method` a name of the registry
    or a method with hyperparameters of your own. `starts`, `solutions` (different exact inputs that
    end the search), `seconds`, `device` and `seed` are for the named methods that have them.
    `certify` adds a proof of how close an exact input is to the one found.
    """
    asked = problem if isinstance(problem, Problem) else Problem.load(problem)
    if asked.fault:
        raise InputError(asked.fault)
    if isinstance(method, str):
        name = method
        _check(starts, solutions, seconds, device)
        method = METHODS.make(
            name, starts=starts, solutions=solutions, seconds=seconds, seed=seed,
            device=None if device == "cpu" else device,  # where all methods compute
        )  # fmt: skip
    else:
        name = type(method).__name__
    progress = track("invert")
    progress(0, note=name)
    result = method(asked, progress=progress)
    if certify and result.X is not None:
        result = replace(result, certificate=prove(asked, result.X))
    return result


def _check(starts: int | None, solutions: int | None, seconds: float | None, device: str) -> None:
    if starts is not None and starts < 1:
        raise InputError(f"expected at least one start, got {starts}")
    expect_count("starts", starts, most=MOST_STARTS)
    if solutions is not None and solutions < 1:
        raise InputError(f"expected at least one solution, got {solutions}")
    expect_count("solutions", solutions)
    expect_number("seconds", seconds, above=0)
    expect_device(device)
