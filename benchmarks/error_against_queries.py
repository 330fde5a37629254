"""Error on fresh queries against queries asked, for each method, next to the lower bound.

`make docs` draws it: docs/error-against-queries.png.
"""

from __future__ import annotations

from collections.abc import Iterator

import plotly.graph_objects as go
from plotly.colors import qualitative

import show
from keyhole import extract, oracle
from keyhole.extract import Extraction
from show import Row


def table(quick: bool) -> dict[str, Extraction]:
    """One extraction by each method, all of targets of the same dimension."""
    d, r, heads = (8, 2, 2) if quick else (32, 4, 4)
    head = oracle.plant("head", dim=d, seed=3)
    low = oracle.plant("head", dim=d, rank=r, seed=3)
    many = oracle.plant("multi-head", dim=d, heads=heads, seed=3)
    layer = oracle.plant("one-layer", dim=d, width=d, seed=3)
    last = oracle.plant("attention", dim=d, seed=3)
    every = oracle.plant("attention", dim=d, every_token=True, seed=3)
    bounded = oracle.Clipped(oracle.Rounded(head, 6), 10.0)
    return {
        "SingleHead": extract.SingleHead()(head),
        f"LowRank, r={r}": extract.LowRank()(low),
        f"NuclearNorm, r={r}": extract.NuclearNorm(rank=r)(low),
        "Tolerant, 6 decimals": extract.Tolerant(5e-7)(oracle.Rounded(head, 6)),
        "Tolerant, 6 decimals, norms <= 10": extract.Tolerant(5e-7, max_norm=10.0)(bounded),
        "SignOnly, 1e-6": extract.SignOnly(accuracy=1e-6)(oracle.SignOnly(head)),
        f"MultiHead, {heads} heads": extract.MultiHead()(many),
        f"OneLayerTransformer, width {d}": extract.OneLayerTransformer()(layer),
        "FullOutput, last token": extract.FullOutput()(last),
        "FullOutput, every token": extract.FullOutput()(every),
    }


def run(quick: bool) -> Iterator[Row]:
    for name, result in table(quick).items():
        yield Row(
            name,
            f"{result.queries:,} queries, error {result.check.worst:.1e}" if result.check else "–",
            details=f"{result.status}; lower bound {result.lower_bound:,}; "
            + " ".join(f"{queries}:{error:.0e}" for queries, error in result.trace),
        )


_SMALLEST = 1e-17  # an error of exactly zero has to stand somewhere on a logarithmic axis


def figure(results: dict[str, Extraction]) -> go.Figure:
    """Error on fresh queries against queries asked, with each attack's lower bound drawn in."""
    drawn = go.Figure()
    for number, (name, result) in enumerate(results.items()):
        colour = qualitative.Plotly[number % 10]
        drawn.add_scatter(
            x=[queries for queries, _ in result.trace],
            y=[max(error, _SMALLEST) for _, error in result.trace],
            name=name, mode="lines+markers", line={"color": colour, "width": 2},
            marker={"size": 8, "symbol": number},
        )  # fmt: skip
        if result.lower_bound is not None:
            drawn.add_vline(x=result.lower_bound, line={"color": colour, "dash": "dot", "width": 1})
    drawn.update_layout(
        template="simple_white", height=520, margin={"l": 70, "r": 20, "t": 20, "b": 60},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": -0.2},
        xaxis={"title": "queries asked (dotted: the lower bound)", "type": "log", "dtick": 1},
        yaxis={"title": "worst error on fresh queries", "type": "log", "exponentformat": "power"},
    )  # fmt: skip
    return drawn


if __name__ == "__main__":
    show.main(run)
