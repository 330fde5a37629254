"""How the cost grows: seconds and peak memory of one step, dense and matrix-free.

nd = 64 … 16,384 (n = d). Dense is one step of LevenbergMarquardt, matrix-free one step of NewtonCG
with 20 inner iterations, and one Gauss–Newton product alone. Every size runs in a process of its
own, so that its peak memory is its own. Exponents are fitted to the last three sizes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import TYPE_CHECKING

import show
from keyhole.invert import LevenbergMarquardt, NewtonCG, gauss_newton_product, plant
from keyhole.invert.derivatives.equations import Equations
from show import Row

if TYPE_CHECKING:
    import plotly.graph_objects as go

HERE = Path(__file__).parent
SIZES = (8, 16, 32, 64, 128)
LARGEST_DENSE = 64  # JᵀJ of n = d = 128 alone takes 2 GiB, and its factor as much again
KINDS = ("dense step", "matrix-free step", "product")


Points = list[tuple[int, float, float]]  # nd, seconds, GiB


def measure(kind: str, n: int) -> tuple[float, float]:
    """Seconds of the quickest of a few, and GiB at the peak beyond what the process began with."""
    problem, X = plant(n, n, value_scale=1 / math.sqrt(n), seed=0)
    equations, before = Equations.of(problem), show.peak_memory()
    if kind == "product":
        step = partial(gauss_newton_product, problem, X + 0.1, X)
    else:
        method = LevenbergMarquardt() if kind == "dense step" else NewtonCG(inner=20)
        step = partial(method.step, equations, method.begin(equations, X.unsqueeze(0) + 0.1))
    best = min(show.timed(step)[1] for _ in range(2 if n > 32 else 5))
    return best, show.peak_memory() - before


def table(quick: bool) -> dict[str, Points]:
    """The costs of each kind of step."""
    costs: dict[str, Points] = {kind: [] for kind in KINDS}
    for kind, points in costs.items():
        for n in SIZES[:2] if quick else SIZES:
            if kind == "dense step" and n > LARGEST_DENSE:
                continue
            if quick:
                points.append((n * n, *measure(kind, n)))
                continue
            call = f"import json, inversion_cost as c; print(json.dumps(c.measure({kind!r}, {n})))"
            command = [sys.executable, "-c", call]
            done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
            points.append((n * n, *json.loads(done.stdout)))
    return costs


def run(quick: bool) -> Iterator[Row]:
    for kind, points in table(quick).items():
        for size, seconds, memory in points:
            yield Row(f"{kind}, nd = {size:,}", f"{seconds * 1e3:.2f} ms, {memory:.3f} GiB")
        x, y = zip(
            *((math.log(size), math.log(took)) for size, took, _ in points[-3:]), strict=True
        )
        yield Row(
            f"{kind}: growth of seconds with nd",
            f"(nd)^{linear_regression(x, y).slope:.2f}",
            "close to linear" if kind != "dense step" else "",
            details="n = d: a product costs n²d, which is (nd)^1.5, once it is past call overhead",
        )


def figure(points_by_kind: dict[str, Points]) -> go.Figure:
    """Seconds on the left, memory on the right, against nd."""
    import plotly.subplots

    panels = plotly.subplots.make_subplots(
        rows=1, cols=2, subplot_titles=["seconds of one step", "GiB at the peak"]
    )
    colours = dict(zip(KINDS, ("#c2410c", "#1d4ed8", "#047857"), strict=True))
    for kind, points in points_by_kind.items():
        for column in (1, 2):
            panels.add_scatter(
                x=[p[0] for p in points], y=[max(p[column], 1e-4) for p in points], name=kind,
                mode="lines+markers", line={"color": colours[kind]}, showlegend=column == 1,
                row=1, col=column,
            )  # fmt: skip
    panels.update_xaxes(type="log", dtick=1, title="nd, the number of unknowns")
    panels.update_yaxes(type="log", dtick=1, exponentformat="power")
    panels.update_layout(
        template="simple_white", height=420, width=1080, margin={"t": 40},
        legend={"orientation": "h", "y": -0.25},
    )  # fmt: skip
    return panels


if __name__ == "__main__":
    show.main(run)
