"""Solvers side by side: order of convergence, problems solved in the same time, 4,096 unknowns.

The comparison gives every method the same small Gaussian starts and the same wall time a problem.
The residual row is solved without ever holding a matrix of 4,096 × 4,096; its peak memory is that
of a process of its own. V there has entries of 0.5/√d, so that attention adds about a quarter of
the stream's norm; stronger blocks are printed next to it.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import median_high

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
from keyhole.invert.derivatives.equations import Equations
from planted import normals
from show import Row

METHODS = (
    LevenbergMarquardt(steps=400), ModifiedNewton(steps=400), LBFGS(steps=10**4), Adam(steps=4000),
    GradientDescent(steps=10**5), GradientDescentAsPublished(steps=10**5),
)  # fmt: skip


def run(quick: bool) -> Iterator[Row]:
    yield convergence()
    for n, d in ((4, 4),) if quick else ((4, 8), (8, 4), (8, 8)):
        yield comparison(n, d, quick)
    for strength in (0.5,) if quick else (0.5, 0.25, 1.0):
        yield residual(strength, quick)


def convergence() -> Row:
    """The error per step from 1e-2 away; the order is the slope between steps above rounding."""
    orders, traces = [], []
    for seed in range(5):
        problem, X = plant(8, 4, symmetric=True, seed=seed)
        noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed)).double()
        method, equations = LevenbergMarquardt(), Equations.of(problem)
        state, errors = method.begin(equations, (X + 1e-2 * noise).unsqueeze(0)), []
        for _ in range(8):
            errors.append(float((state.X[0] - X).abs().max()))
            state = method.step(equations, state)
        useful = [error for error in errors if error > 1e-12]
        if len(useful) > 2:
            a, b, c = useful[-3:]
            orders.append(math.log(c / b) / math.log(b / a))
        traces.append(errors)
    best = min(min(errors) for errors in traces)
    order = median_high(orders)
    shown = ", ".join(f"{error:.0e}" for error in traces[0][:6])
    return Row(
        "LevenbergMarquardt near the solution", f"order {order:.2f}, error to {best:.0e}",
        "order 2, 1e-12", order > 1.7 and best < 1e-12, f"errors of one run: {shown}",
    )  # fmt: skip


def comparison(n: int, d: int, quick: bool) -> Row:
    problems, seconds, count = (1, 0.3, 8) if quick else (10, 2.0, 64)
    solved = {type(method).__name__: 0 for method in METHODS}
    for seed in range(problems):
        problem, _ = plant(n, d, seed=seed)
        starts = 0.2 * normals(seed)(count, n, d)
        for method in METHODS:
            result = replace(method, seconds=seconds)(problem, start=starts)
            solved[type(method).__name__] += result.solved
    return Row(
        f"({n}, {d}), {seconds:g} s a problem, {count} starts, {problems} problems",
        ", ".join(f"{name} {number}" for name, number in solved.items()),
        "table",
        None if quick else solved["LevenbergMarquardt"] == max(solved.values()),
        promise=False,  # each ends by the clock
    )


def stream(n: int, strength: float, problems: int) -> tuple[int, int, float, float]:
    """Solved, of which the planted input, seconds a problem, and GiB at the peak."""
    solved = planted = 0
    seconds = 0.0
    for seed in range(problems):
        problem, X = plant(n, n, residual=True, value_scale=strength / math.sqrt(n), seed=seed)
        result = ResidualStream(steps=20)(problem)
        solved += result.solved
        planted += result.solved and float((result.X - X).abs().max()) < 1e-6
        seconds += result.seconds
    return solved, planted, seconds / problems, show.peak_memory()


def residual(strength: float, quick: bool) -> Row:
    n, problems = (12, 2) if quick else (64, 20)
    count = problems if strength < 1 else problems // 4
    call = f"import inversion_solvers as s; print(*s.stream({n}, {strength}, {count}))"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    solved, planted, seconds, gibibytes = map(float, done.stdout.split())
    required = strength == 0.5
    return Row(
        f"residual connection, n = d = {n}, V of {strength:g}/√d",
        f"{solved:.0f} of {count} solved exactly, {gibibytes:.2f} GiB",
        "≥ 95%, < 4 GiB" if required else "printed",
        solved >= 0.95 * count and gibibytes < 4 if required else None,
        f"the planted input in {planted:.0f}; {seconds:.1f} s a problem",
    )


if __name__ == "__main__":
    show.main(run)
