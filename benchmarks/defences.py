"""A server's defences in degrees: the error of the attacker's copy against the honest client's.

One head of d = 16 with random weights behind each defence, three seeds: errors are on an honest
client's questions, relative; medians over seeds. `--quick`: d = 5, one seed. All defences, each in
one degree, with what leaks of texts besides: `keyhole lab defences`.

The picture is docs/defences.png.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import plotly.graph_objects as go

import show
from keyhole import oracle
from keyhole.extract.defences import HonestClient, Trial, try_defence
from keyhole.extract.ordinary_questions import usual_norm_of
from keyhole.oracle import Degradation
from show import Row

_SMALLEST = 1e-6  # where smaller errors are drawn
_LOGARITHMIC = {"type": "log", "dtick": 1, "exponentformat": "power"}
_NOISE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_PARTS = (1.2, 1.0, 0.5, 0.1)


def graded(dim: int, seed: int = 0) -> list[Trial]:
    """The defences that come in degrees, from little to much."""
    norm = usual_norm_of(dim)
    none = Degradation(seed=seed)
    bounded = replace(none, max_norm=2 * norm)  # so long that honest tokens are left as they are
    usual = replace(none, usual_norm=norm, min_tokens=3)
    return [
        *(Trial("rounding", replace(bounded, decimals=k)) for k in (4, 3, 2, 1, 0)),
        *(Trial("noise, the same for a question", replace(bounded, noise=tau)) for tau in _NOISE),
        *(Trial("noise, anew each time", replace(bounded, fresh_noise=tau)) for tau in _NOISE),
        *(Trial("norms clipped", replace(none, max_norm=norm * part)) for part in _PARTS),
        *(
            Trial("short and unusual inputs refused, rounding", replace(usual, decimals=k))
            for k in (4, 3, 2, 1)
        ),
        *(Trial("a budget", none, budget=share) for share in (0.25, 0.5, 0.75, 0.95)),
    ]


class Point(NamedTuple):
    """A defence in one degree: medians over seeds."""

    name: str
    setting: str
    attacker: float
    honest: float


def run(quick: bool) -> Iterator[Row]:
    for point in table(quick):
        measured = f"attacker {point.attacker:.1e}, honest client {point.honest:.1e}"
        yield Row(f"{point.name}: {point.setting}", measured)


def table(quick: bool) -> list[Point]:
    """The medians of every defence in every degree."""
    dim, seeds = (5, 1) if quick else (16, 3)
    points: list[Point] = []
    for place, trial in enumerate(graded(dim)):
        runs = []
        for seed in range(seeds):
            target = oracle.plant(dim=dim, seed=seed)
            client = HonestClient.of(target, seed=seed)
            runs.append(try_defence(graded(dim, seed)[place], target, client, seed))
        attacker = median(1.0 if run.attacker_error is None else run.attacker_error for run in runs)
        honest = median(run.honest_error for run in runs)
        points.append(Point(trial.name, runs[0].setting, attacker, honest))
    return points


def figure(points: list[Point]) -> go.Figure:
    """The attacker's error against the honest client's, both on logarithmic axes."""
    picture = go.Figure()
    for name in dict.fromkeys(point.name for point in points):
        curve = [point for point in points if point.name == name]
        picture.add_scatter(
            x=[max(point.honest, _SMALLEST) for point in curve],
            y=[max(point.attacker, _SMALLEST) for point in curve],
            text=[point.setting for point in curve], name=name, mode="lines+markers",
        )  # fmt: skip
    ends = [_SMALLEST, 1.0]
    picture.add_scatter(
        x=ends, y=ends, mode="lines", name="as good as what clients get",
        line={"dash": "dot", "color": "grey"},
    )  # fmt: skip
    picture.update_layout(
        template="plotly_white", width=1100, height=520, legend={"x": 1.02, "y": 1},
        title="One head, d = 16: below the dotted line the attacker's copy is more exact "
        "than the server",
        xaxis={**_LOGARITHMIC, "title": "honest client's error (smaller ones are drawn at 1e-6)"},
        yaxis={**_LOGARITHMIC, "title": "error of the attacker's copy (likewise)"},
    )  # fmt: skip
    return picture


if __name__ == "__main__":
    show.main(run)
