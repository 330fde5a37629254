"""The curves of the documents, as plotly figures of what benchmarks measure or have measured.

docs/generate.py makes pictures of them; it has put benchmarks/ on Python's path.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

import plotly.graph_objects as go
import plotly.subplots
from plotly.colors import qualitative

SMALLEST = 1e-17  # where a logarithmic axis shows an error of zero
UNKNOWNS = Path(__file__).parent / "figures" / "multi_head-unknowns.json"
ABLATIONS = Path(__file__).parent / "disrupt-ablations-minilm.json"


def laid_out(
    drawn: go.Figure, height: int, x: dict[str, Any], y: dict[str, Any]
) -> go.Figure:
    """Give a figure two logarithmic axes and a legend below."""
    drawn.update_layout(
        template="simple_white",
        height=height,
        margin={"l": 70, "r": 20, "t": 20, "b": 60},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": -0.2},
        xaxis={"type": "log", **x},
        yaxis={"type": "log", **y},
    )
    return drawn


def error_against_queries() -> go.Figure:
    """Draw the error on fresh queries against queries asked, with each lower bound."""
    import error_against_queries

    drawn = go.Figure()
    for number, (name, result) in enumerate(
        error_against_queries.table(quick=False).items()
    ):
        colour = qualitative.Plotly[number % 10]
        drawn.add_scatter(
            x=[queries for queries, _ in result.trace],
            y=[max(error, SMALLEST) for _, error in result.trace],
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 8, "symbol": number},
        )
        if result.lower_bound is not None:
            drawn.add_vline(
                x=result.lower_bound, line={"color": colour, "dash": "dot", "width": 1}
            )
    x = {"title": "queries asked (dotted: the lower bound)", "dtick": 1}
    y = {"title": "worst error on fresh queries", "exponentformat": "power"}
    return laid_out(drawn, 520, x, y)


def queries_against_unknowns() -> go.Figure:
    """Draw queries per unknown against the width: asked, expected, proved and as published."""
    runs = json.loads(UNKNOWNS.read_text("utf-8"))["runs"]
    items = [item for run in runs for item in run["items"]]
    full, low = (
        [item for item in items if (item["rank"] is None) is each]
        for each in (True, False)
    )
    drawn = go.Figure()
    for name, some, count, style in (
        ("arXiv 2608.03294", full, "published", {"color": "#78716c", "dash": "dash"}),
        (
            "proved bound of an attempt",
            full,
            "bound",
            {"color": "#1d4ed8", "dash": "dot"},
        ),
        ("expected, full rank", full, "expected", {"color": "#c2410c"}),
        ("asked, full rank", full, "queries", {"color": "#c2410c"}),
        ("asked, rank d/H", low, "queries", {"color": "#047857"}),
    ):
        known = [item for item in some if item.get(count)]
        drawn.add_scatter(
            x=[item["d"] for item in known],
            y=[item[count] / item["unknowns"] for item in known],
            name=name,
            mode="markers" if name.startswith("asked, full") else "lines+markers",
            line={**style, "width": 2},
            marker={"size": 8, "color": style["color"]},
        )
    drawn.add_hline(y=1, line={"color": "#0f172a", "width": 1})
    x = {"title": "d (the line at 1: one answer for each unknown)"}
    return laid_out(drawn, 460, x, {"title": "queries over unknowns"})


def inversion_sensitivity() -> go.Figure:
    """Draw a panel for each quantity: shares on the left axis, the condition on the right."""
    import inversion_sensitivity

    table: dict[str, list[inversion_sensitivity.Point]] = {}
    for name, point in inversion_sensitivity.points(quick=False):
        table.setdefault(name, []).append(point)
    rows = (len(table) + 1) // 2
    panels = plotly.subplots.make_subplots(
        rows=rows,
        cols=2,
        subplot_titles=list(table),
        vertical_spacing=0.12,
        specs=[[{"secondary_y": True}] * 2 for _ in range(rows)],
    )
    curves = {
        "solved": ("an exact solution", {"color": "#1d4ed8"}),
        "planted": ("the input, to 1e-5", {"color": "#047857"}),
        "condition": ("condition (right)", {"color": "#c2410c", "dash": "dot"}),
    }
    for number, (name, measured) in enumerate(table.items()):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        for field, (label, line) in curves.items():
            values = [getattr(point, field) for point in measured]
            panels.add_scatter(
                x=[point.value for point in measured],
                y=[value if math.isfinite(value) else None for value in values],
                name=label,
                mode="lines+markers",
                line=line,
                showlegend=number == 0,
                secondary_y=field == "condition",
                **place,
            )
        if "scale" in name or "noise" in name:
            spacing = 3 if "noise" in name else 1
            panels.update_xaxes(
                type="log", dtick=spacing, exponentformat="power", **place
            )
        panels.update_yaxes(
            range=[-0.05, 1.05], tickformat=".0%", secondary_y=False, **place
        )
        panels.update_yaxes(
            type="log",
            exponentformat="power",
            range=[2, 5.2],
            dtick=1,
            secondary_y=True,
            **place,
        )
    panels.update_layout(
        template="simple_white",
        height=330 * rows,
        width=1080,
        legend={"orientation": "h", "y": -0.05},
        margin={"t": 40, "b": 40},
    )
    return panels


def disrupt_shares() -> go.Figure:
    """Draw flips against the share of units, both in percent."""
    import disrupt_ablations

    points = disrupt_ablations.read([ABLATIONS])
    models = len({point.model for point in points})
    picture = go.Figure()
    for name in disrupt_ablations.CURVES:
        shares = sorted({point.share for point in points if point.attack == name})
        values = [disrupt_ablations.of(points, name, share)[1] for share in shares]
        picture.add_scatter(
            name=name,
            mode="lines+markers",
            x=[100 * share for share in shares],
            y=[100 * mean(value) for value in values],
            error_y={
                "type": "data",
                "symmetric": False,
                "visible": models > 1,
                "array": [100 * (max(value) - mean(value)) for value in values],
                "arrayminus": [100 * (mean(value) - min(value)) for value in values],
            },
        )
    picture.update_layout(
        template="plotly_white",
        width=1100,
        height=460,
        margin={"l": 70, "r": 20, "t": 30, "b": 60},
        legend={"x": 0.01, "y": 0.99},
        xaxis={
            "title": "share of each head's units that may be cut, %",
            "type": "log",
            "tickvals": [100 * share for share in disrupt_ablations.SHARES],
        },
        yaxis={"title": "right answers flipped, %", "rangemode": "tozero"},
    )
    return picture
