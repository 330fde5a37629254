"""Solvers side by side: order of convergence, problems solved in the same time, 4,096 unknowns.

The comparison gives every method the same small Gaussian starts and the same wall time a problem.
The residual row is solved without ever holding a matrix of 4,096 × 4,096; its peak memory is that
of a process of its own. V there has entries of 0.5/√d, so that attention adds about a quarter of
the stream's norm; stronger blocks are printed beside it.
"""

from __future__ import annotations

import itertools
import math
import resource
import subprocess
import sys

import torch

import show
from keyhole.invert import (
    LBFGS,
    Adam,
    GradientDescent,
    GradientDescentAsPublished,
    LevenbergMarquardt,
    ModifiedNewton,
    ResidualStream,
    plant,
)

METHODS = {
    "LevenbergMarquardt": LevenbergMarquardt(steps=400),
    "ModifiedNewton": ModifiedNewton(steps=400),
    "LBFGS": LBFGS(steps=10**4),
    "Adam": Adam(steps=4000),
    "GradientDescent": GradientDescent(steps=10**5),
    "GradientDescentAsPublished": GradientDescentAsPublished(steps=10**5),
}


def convergence() -> show.Row:
    """The error per step from 1e-2 away; the order is the slope between steps above rounding."""
    orders, traces = [], []
    for seed in range(5):
        problem, X = plant(8, 4, symmetric=True, seed=seed)
        method, errors = LevenbergMarquardt(), []
        noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed)).double()
        start = X + 1e-2 * noise
        for steps in range(8):
            reached = _after(method, problem, start, steps)
            errors.append(float((reached - X).abs().max()))
        useful = [error for error in errors if error > 1e-12]
        steps = [math.log(c / b) / math.log(b / a)
                 for a, b, c in zip(useful, useful[1:], useful[2:], strict=False)]  # fmt: skip
        orders += steps[-1:]
        traces.append(errors)
    best = min(min(errors) for errors in traces)
    shown = ", ".join(f"{error:.0e}" for error in traces[0][:6])
    order = sorted(orders)[len(orders) // 2]
    return show.Row(
        "LevenbergMarquardt near the solution", f"order {order:.2f}, error to {best:.0e}",
        "order 2, 1e-12", order > 1.7 and best < 1e-12, f"errors of one run: {shown}",
    )  # fmt: skip


def _after(method: LevenbergMarquardt, problem, start, steps: int):
    """Where the method stands after so many steps, before any polish."""
    from keyhole.invert.derivatives.equations import Equations

    equations = Equations.of([problem])
    state = method.begin(equations, start.unsqueeze(0))
    for _ in range(steps):
        state = method.step(equations, state)
    return state.X[0]


def comparison(quick: bool) -> list[show.Row]:
    problems, seconds, count = (1, 0.3, 8) if quick else (10, 2.0, 64)
    rows = []
    for n, d in ((4, 4),) if quick else ((4, 8), (8, 4), (8, 8)):
        solved = dict.fromkeys(METHODS, 0)
        for seed in range(problems):
            problem, _ = plant(n, d, seed=seed)
            stream = torch.Generator().manual_seed(seed)
            starts = 0.2 * torch.randn(count, n, d, generator=stream, dtype=torch.float64)
            for name, method in METHODS.items():
                limited = type(method)(steps=method.steps, seconds=seconds)
                solved[name] += limited(problem, start=starts).solved
        shares = ", ".join(f"{name} {number}" for name, number in solved.items())
        best = max(solved.values())
        rows.append(
            show.Row(
                f"({n}, {d}), {seconds:g} s a problem, {count} starts, {problems} problems",
                shares,
                "table",
                None if quick else solved["LevenbergMarquardt"] == best,
                promise=False,  # each ends by the clock
            )
        )
    return rows


def stream(n: int, strength: float, problems: int) -> tuple[int, int, float]:
    """Solved, of which the planted input, and seconds a problem."""
    solved = planted = 0
    seconds = 0.0
    for seed in range(problems):
        problem, X = plant(n, n, residual=True, value_scale=strength / math.sqrt(n), seed=seed)
        result = ResidualStream(steps=20)(problem)
        solved += result.solved
        planted += result.solved and float((result.X - X).abs().max()) < 1e-6
        seconds += result.seconds
    return solved, planted, seconds / problems


def residual(quick: bool) -> list[show.Row]:
    n, problems = (12, 2) if quick else (64, 20)
    rows = []
    for strength in (0.5,) if quick else (0.5, 0.25, 1.0):
        count = problems if strength < 1 else problems // 4
        call = (
            f"import inversion_solvers as s; print(*s.stream({n}, {strength}, {count}), s.peak())"
        )
        done = subprocess.run(
            [sys.executable, "-c", call], capture_output=True, text=True, check=True
        )
        solved, planted, seconds, gibibytes = map(float, done.stdout.split())
        required = strength == 0.5
        met = solved >= 0.95 * count and gibibytes < 4
        rows.append(
            show.Row(
                f"residual connection, n = d = {n}, V of {strength:g}/√d",
                f"{solved:.0f} of {count} solved exactly, {gibibytes:.2f} GiB",
                "≥ 95%, < 4 GiB" if required else "printed",
                met if required else None,
                f"the planted input in {planted:.0f}; {seconds:.1f} s a problem",
            )
        )
    return rows


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run(quick: bool) -> list[show.Row]:
    return list(itertools.chain([convergence()], comparison(quick), residual(quick)))


if __name__ == "__main__":
    show.main(run, __doc__)
