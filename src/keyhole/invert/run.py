"""`keyhole invert PROBLEM` as a function: open a problem, choose a method, search, prove."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from keyhole.errors import InputError
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.proofs.certify import certify as prove
from keyhole.invert.registry import METHODS
from keyhole.invert.solvers.solver import Solve
from keyhole.progress import Track, untracked


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
    if solutions is not None and solutions < 1:
        raise InputError(f"expected at least one solution, got {solutions}")
    if seconds is not None and not seconds > 0:
        raise InputError(f"expected more than 0 seconds, got {seconds}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch says it in one way or the other
        raise InputError(f"expected a device of this machine (cpu), got {device}") from error
