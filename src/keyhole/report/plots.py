"""Error against queries as a Plotly figure, for notebooks; the page draws its own (curves.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import escape

from keyhole.core import Finding
from keyhole.core.errors import MissingExtra
from keyhole.report import words
from keyhole.report.curves import SMALLEST

if TYPE_CHECKING:
    import plotly.graph_objects as go

_COLOURS = (
    "#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#be185d", "#a16207",
    "#0e7490", "#4d7c0f", "#b91c1c", "#4338ca", "#78716c", "#0f172a",
)  # fmt: skip
_SYMBOLS = 53  # that Plotly can draw


def figure(findings: Sequence[Finding]) -> go.Figure | None:
    """Error on fresh queries against queries asked, with each attack's floor drawn in.

    A Plotly figure, for a notebook: `.show()`. None where no attack was followed on its way.
    """
    try:
        import plotly.graph_objects as go
    except ModuleNotFoundError as missing:
        raise MissingExtra("a figure needs plotly, which is not installed", "plots") from missing
    traced = [finding for finding in findings if finding.trace]
    if not traced:
        return None
    drawn = go.Figure()
    for number, finding in enumerate(traced):
        colour = _COLOURS[number % len(_COLOURS)]
        attack = f" ({finding.attack})" if finding.attack else ""
        label = str(escape(f"{words.exposure(finding.exposure)}{attack}"))
        queries, errors = zip(*finding.trace, strict=True)
        drawn.add_scatter(
            x=queries,
            y=[max(error, SMALLEST) for error in errors],
            name=label,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 8, "symbol": number % _SYMBOLS},
            hovertemplate="%{x:,} queries<br>error %{y:.1e}<extra></extra>",
        )
        if finding.lower_bound is not None:
            drawn.add_vline(
                x=finding.lower_bound, line={"color": colour, "dash": "dot", "width": 1}
            )
    drawn.update_layout(
        template="simple_white",
        height=520,
        margin={"l": 70, "r": 20, "t": 20, "b": 60},
        legend={"orientation": "h", "y": -0.2},
        xaxis={
            "title": "queries asked (dotted: the floor)",
            "type": "log",
            "dtick": 1,
        },
        yaxis={"title": "worst error on fresh queries", "type": "log", "exponentformat": "power"},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    return drawn
