"""Where inversion works and where it breaks: the open question of *Unmasking Transformers*.

Success, iterations and conditioning as functions of the number of tokens n, the dimension d, the
scale and symmetry of W, the rank of V, and noise in B. One quantity moves at a time around n = 6,
d = 6, scale 0.3, V of full rank, no noise; X and V are standard Gaussian. 32 starts a problem.
`figure` draws the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import show
from keyhole.core import Status
from keyhole.invert import LevenbergMarquardt, Problem, plant
from planted import normals
from show import Row, relative

if TYPE_CHECKING:
    import plotly.graph_objects as go

STARTS = 32
Pair = tuple[Problem, Tensor]


@dataclass(frozen=True)
class Point:
    """What was measured at one value of one quantity."""

    value: float
    solved: float  # share of problems with an exact solution
    planted: float  # share where the planted input is among those found
    iterations: float  # of all starts together, median
    condition: float  # median, at the solution of least norm
    error: float  # median distance to the planted input, relative


def scaled(n: int = 6, d: int = 6, **options) -> Callable[[int], Pair]:
    return lambda seed: plant(n, d, seed=seed, **options)


def of_rank(rank: int) -> Callable[[int], Pair]:
    """V with its smallest singular values set to zero, but for `rank` of them."""

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
        "scale of an asymmetric W": {s: scaled(scale=s) for s in (0.03, 0.1, 0.3, 0.6, 1.0, 2.0)},
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
    results = method.many([problem for problem, _ in pairs])
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


def table(quick: bool) -> dict[str, list[Point]]:
    problems = 2 if quick else 20
    return {
        name: [measure(value, make, problems) for value, make in values.items()]
        for name, values in quantities(quick).items()
    }


def run(quick: bool) -> Iterator[Row]:
    for name, points in table(quick).items():
        for point in points:
            yield Row(
                f"{name} = {point.value:g}",
                f"solved {point.solved:.0%}, planted input among them {point.planted:.0%}",
                details=f"{point.iterations:.0f} iterations, condition {point.condition:.1e}, "
                f"error {point.error:.1e}",
            )


def figure(points_by_name: dict[str, list[Point]]) -> go.Figure:
    """One panel a quantity: shares on the left axis, the condition on the right."""
    import plotly.subplots

    names = list(points_by_name)
    panels = plotly.subplots.make_subplots(
        rows=(len(names) + 1) // 2, cols=2, subplot_titles=names, vertical_spacing=0.12,
        specs=[[{"secondary_y": True}] * 2 for _ in range((len(names) + 1) // 2)],
    )  # fmt: skip
    for number, name in enumerate(names):
        row, column = number // 2 + 1, number % 2 + 1
        points = points_by_name[name]
        x = [point.value for point in points]
        shares = {
            "an exact solution": ("solved", "#1d4ed8"),
            "the input, to 1e-5": ("planted", "#047857"),
        }
        for label, (field, colour) in shares.items():
            panels.add_scatter(
                x=x, y=[getattr(point, field) for point in points], name=label, row=row, col=column,
                mode="lines+markers", line={"color": colour}, showlegend=number == 0,
            )  # fmt: skip
        panels.add_scatter(
            x=x, y=[p.condition if math.isfinite(p.condition) else None for p in points],
            name="condition (right)", mode="lines+markers", showlegend=number == 0,
            line={"color": "#c2410c", "dash": "dot"}, row=row, col=column, secondary_y=True,
        )  # fmt: skip
        if "scale" in name or "noise" in name:
            spacing = 3 if "noise" in name else 1
            panels.update_xaxes(
                type="log", dtick=spacing, exponentformat="power", row=row, col=column
            )
        panels.update_yaxes(range=[-0.05, 1.05], tickformat=".0%", row=row, col=column)
        panels.update_yaxes(
            type="log", exponentformat="power", range=[2, 5.2], dtick=1, tickformat=None,
            row=row, col=column, secondary_y=True,
        )  # fmt: skip
    panels.update_layout(
        template="simple_white", height=330 * ((len(names) + 1) // 2), width=1080,
        legend={"orientation": "h", "y": -0.05}, margin={"t": 40, "b": 40},
    )  # fmt: skip
    return panels


if __name__ == "__main__":
    show.main(run)
