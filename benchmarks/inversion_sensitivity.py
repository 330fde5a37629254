"""Where inversion works and where it breaks: the open question of *Unmasking Transformers*.

Success, iterations and conditioning as functions of the number of tokens n, the
dimension d, the scale and symmetry of W, the rank of V, and noise in B. One quantity
varies at a time around n = 6, d = 6, scale 0.3, V of full rank, no noise; X and V are
standard Gaussian. Each problem gets 32 starts. `make pictures` draws
docs/inversion-sensitivity.png from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

import show
from keyhole.core import Status
from keyhole.invert import LevenbergMarquardt, Problem, plant
from planted import normals
from show import Row, relative

STARTS = 32
Pair = tuple[Problem, Tensor]


@dataclass(frozen=True)
class Point:
    """The measurements at one value of one quantity."""

    value: float
    solved: float  # share of problems with an exact solution
    planted: float  # share where the planted input is among those found
    iterations: float  # of all starts together, median
    condition: float  # median, at the solution of least norm
    error: float  # median distance to the planted input, relative


def scaled(n: int = 6, d: int = 6, **options) -> Callable[[int], Pair]:
    return lambda seed: plant(n, d, seed=seed, **options)


def of_rank(rank: int) -> Callable[[int], Pair]:
    """Set all but the `rank` largest singular values of V to zero."""

    def make(seed: int) -> Pair:
        problem, X = plant(6, 6, seed=seed)
        U, sizes, Vh = torch.linalg.svd(problem.V)
        sizes[rank:] = 0
        problem = replace(problem, V=U @ torch.diag(sizes) @ Vh)
        return replace(problem, B=problem.output(X)), X

    return make


def noisy(level: float) -> Callable[[int], Pair]:
    def make(seed: int) -> Pair:
        problem, X = plant(6, 6, seed=seed)
        noise = normals(seed + 1000)(*problem.B.shape)
        return replace(problem, B=problem.B + level * float(problem.B.std()) * noise), X

    return make


def quantities(quick: bool) -> dict[str, dict[float, Callable[[int], Pair]]]:
    if quick:
        return {"tokens n": {3: scaled(3)}, "rank of V": {5: of_rank(5)}}
    return {
        "tokens n": {n: scaled(n) for n in (2, 3, 4, 6, 8, 12, 16)},
        "dimension d": {d: scaled(6, d) for d in (2, 3, 4, 6, 8, 12, 16)},
        "scale of an asymmetric W": {
            s: scaled(scale=s) for s in (0.03, 0.1, 0.3, 0.6, 1.0, 2.0)
        },
        "scale of a symmetric W": {
            s: scaled(scale=s, symmetric=True) for s in (0.03, 0.1, 0.3, 0.6, 1.0, 2.0)
        },
        "rank of V": {rank: of_rank(rank) for rank in (2, 3, 4, 5, 6)},
        "noise in B (share of its deviation)": {
            level: noisy(level) for level in (1e-12, 1e-9, 1e-6, 1e-4, 1e-2, 1e-1)
        },
    }


def measure(value: float, make: Callable[[int], Pair], problems: int) -> Point:
    pairs = [make(seed) for seed in range(problems)]
    method = LevenbergMarquardt(starts=STARTS, solutions=10**6)
    results = [method(problem) for problem, _ in pairs]
    errors = [
        min((relative(solution, X) for solution in result.solutions), default=math.inf)
        for result, (_, X) in zip(results, pairs, strict=True)
    ]
    exact = (Status.RECOVERED, Status.NOT_IDENTIFIABLE)
    conditions = [
        result.condition
        for result in results
        if result.status in exact and result.condition is not None
    ]
    return Point(
        value=value,
        solved=sum(result.status is Status.RECOVERED for result in results) / problems,
        planted=sum(error < 1e-5 for error in errors) / problems,
        iterations=median(result.iterations for result in results),
        condition=median(conditions) if conditions else math.inf,
        error=median(errors),
    )


def points(quick: bool) -> Iterator[tuple[str, Point]]:
    for name, values in quantities(quick).items():
        for value, make in values.items():
            yield name, measure(value, make, 2 if quick else 20)


def run(quick: bool) -> Iterator[Row]:
    for name, point in points(quick):
        yield Row(
            f"{name} = {point.value:g}",
            f"solved {point.solved:.0%}, planted input among them {point.planted:.0%}",
            details=f"{point.iterations:.0f} iterations, condition {point.condition:.1e}, "
            f"error {point.error:.1e}",
        )


if __name__ == "__main__":
    show.main(run)
