"""How the cost grows: seconds and peak memory of one step, dense and matrix-free.

nd = 64 … 16,384 (n = d). Dense is one step of LevenbergMarquardt, matrix-free one step of NewtonCG
with 20 inner iterations, and one Gauss–Newton product alone. Every size runs in a process of its
own, so that its peak memory is its own. Exponents are fitted to the last three sizes.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import show
from keyhole.invert import LevenbergMarquardt, NewtonCG, gauss_newton_product, plant
from keyhole.invert.derivatives.equations import Equations

if TYPE_CHECKING:
    import plotly.graph_objects as go

HERE = Path(__file__).parent
SIZES = (8, 16, 32, 64, 128)
LARGEST_DENSE = 64  # JᵀJ of n = d = 128 alone takes 2 GiB, and its factor as much again
KINDS = ("dense step", "matrix-free step", "product")


def measure(kind: str, n: int) -> tuple[float, float]:
    """Seconds of the quickest of a few, and GiB at the peak beyond what the process began with."""
    problem, X = plant(n, n, value_scale=1 / math.sqrt(n), seed=0)
    equations, start = Equations.of([problem]), X.unsqueeze(0) + 0.1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dense, free = LevenbergMarquardt(), NewtonCG(inner=20)
    if kind == "product":

        def once() -> None:
            gauss_newton_product(problem, X + 0.1, X)
    else:
        method = dense if kind == "dense step" else free
        state = method.begin(equations, start)

        def once() -> None:
            method.step(equations, state)

    best = math.inf
    for _ in range(2 if n > 32 else 5):
        began = time.perf_counter()
        once()
        best = min(best, time.perf_counter() - began)
    return best, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20


def table(quick: bool) -> dict[str, list[tuple[int, float, float]]]:
    """For each kind: (nd, seconds, GiB)."""
    costs: dict[str, list[tuple[int, float, float]]] = {}
    for kind in KINDS:
        sizes = SIZES[:2] if quick else SIZES
        for n in sizes:
            if kind == "dense step" and n > LARGEST_DENSE:
                continue
            if quick:
                seconds, memory = measure(kind, n)
            else:
                call = (
                    f"import json, inversion_cost as c; print(json.dumps(c.measure({kind!r}, {n})))"
                )
                command = [sys.executable, "-c", call]
                done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
                seconds, memory = json.loads(done.stdout)
            costs.setdefault(kind, []).append((n * n, seconds, memory))
    return costs


def exponent(points: list[tuple[int, float, float]], column: int) -> float:
    last = [(math.log(p[0]), math.log(max(p[column], 1e-6))) for p in points[-3:]]
    x, y = torch.tensor(last, dtype=torch.float64).T
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def run(quick: bool) -> list[show.Row]:
    rows = []
    for kind, points in table(quick).items():
        for size, seconds, memory in points:
            rows.append(
                show.Row(f"{kind}, nd = {size:,}", f"{seconds * 1e3:.2f} ms, {memory:.3f} GiB")
            )
        rows.append(
            show.Row(
                f"{kind}: growth of seconds with nd",
                f"(nd)^{exponent(points, 1):.2f}",
                "close to linear" if kind != "dense step" else "",
                None,
                "n = d: a product costs n²d, which is (nd)^1.5, once it is past call overhead",
            )
        )
    return rows


def figure(points_by_kind: dict[str, list[tuple[int, float, float]]]) -> go.Figure:
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
        template="simple_white",
        height=420,
        width=1080,
        margin={"t": 40},
        legend={"orientation": "h", "y": -0.25},
    )
    return panels


if __name__ == "__main__":
    show.main(run, __doc__)
