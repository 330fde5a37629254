"""Run `keyhole invert PROBLEM` as a function: open a problem, choose a method, search, certify."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number, expect_seed
from keyhole.core.files import read_tensors
from keyhole.core.machine import expect_device
from keyhole.core.progress import Track, untracked
from keyhole.invert.derivatives.bounds import Bounds, bounds
from keyhole.invert.inversion import Inversion
from keyhole.invert.krawczyk import certify as prove
from keyhole.invert.problem import Problem
from keyhole.invert.registry import METHODS
from keyhole.invert.solvers.multistart import Solve

MOST_STARTS = 1_000_000  # each start takes some memory and at least a moment


def run(
    problem: str | Path | Problem,
    method: str | Solve = "auto",
    *,
    device: str = "cpu",
    seed: int = 0,
    start: str | Path | Tensor | None = None,
    certify: bool = False,
    track: Track = untracked,
    **options: Any,
) -> Inversion:
    """Read the input of an attention layer back from its weights and output.

    `problem` is a Problem, or a .safetensors file with W, V and B. `method` is a name
    of the registry, or a method with your own hyperparameters. `options` are the
    hyperparameters of a named method, such as starts=32. `start` (n×d or k×n×d, or a
    file with that tensor as X) replaces the method's own starts. `certify` adds a proof
    of how close an exact input is to the one that was found.
    """
    problem = _opened(problem)
    name = method if isinstance(method, str) else type(method).__name__
    expect_count("starts", options.get("starts"), most=MOST_STARTS)
    expect_count("solutions", options.get("solutions"))
    expect_number("seconds", options.get("seconds"), above=0)
    expect_device(device)
    expect_number("rate", options.get("rate"), above=0)
    if options.get("starts") is not None and start is not None:
        raise InputError("starts and --start exclude each other: give one of them")
    # Only some methods have the option: without it a method computes on the CPU.
    options["device"] = None if device == "cpu" else device
    method = METHODS.resolve(method, seed, **options)
    given: dict[str, Tensor] = {}
    if start is not None:
        if not _takes_start(type(method)):
            takers = [
                e.name for e in METHODS.values() if e.method and _takes_start(e.method)
            ]
            raise InputError(f"{name} takes no start: choose {' or '.join(takers)}")
        if isinstance(start, Tensor):
            given["start"] = start
        else:
            given["start"] = load_inputs(start, problem)
    progress = track("invert")
    progress(0, note=name)
    result = method(problem, progress=progress, **given)
    if certify and result.X is not None:
        result = replace(result, certificate=prove(problem, result.X))
    return result


def measure_bounds(
    problem: str | Path | Problem,
    X: str | Path | Tensor,
    *,
    R: float | None = None,
    seed: int = 0,
    neighbours: int = 32,
) -> Bounds:
    """Compute `bounds` for a problem and an input that may both be files."""
    problem = _opened(problem)
    expect_seed(seed)
    inputs = X if isinstance(X, Tensor) else load_inputs(X, problem)
    return bounds(problem, inputs, R=R, seed=seed, neighbours=neighbours)


def load_inputs(path: str | Path, problem: Problem) -> Tensor:
    """Read the tensor X of a .safetensors file, such as that of a saved inversion."""
    _, tensors = read_tensors(path, "a .safetensors file with X")
    if "X" not in tensors:
        raise InputError(
            f"{path} must hold a tensor X: it holds {', '.join(sorted(tensors)) or 'nothing'}"
        )
    X = tensors["X"]
    size = (problem.length, problem.dim)
    if X.ndim not in (2, 3) or 0 in X.shape or X.shape[-2:] != size:
        raise InputError(
            f"expected X of shape n×d = {size[0]}×{size[1]} in {path}, "
            f"got {'×'.join(map(str, X.shape)) or 'a number'}"
        )
    if X.is_complex() or not X.double().isfinite().all():
        raise InputError(f"X in {path} must hold finite real numbers")
    return X.double()


def _opened(problem: str | Path | Problem) -> Problem:
    opened = problem if isinstance(problem, Problem) else Problem.load(problem)
    if opened.fault:
        raise InputError(opened.fault)
    return opened


def _takes_start(method: type) -> bool:
    return "start" in inspect.signature(method.__call__).parameters
