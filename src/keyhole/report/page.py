"""An audit as one self-contained HTML page: no network, no scripts but the plot's own."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2
import plotly.graph_objects as go
import plotly.io
from markupsafe import Markup, escape

from keyhole.percent import percent
from keyhole.report import lengths, pictures, wording
from keyhole.results import Audit, Finding

_COLOURS = (
    "#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#be185d", "#a16207",
    "#0e7490", "#4d7c0f", "#b91c1c", "#4338ca", "#78716c", "#0f172a",
)  # fmt: skip
_SMALLEST = 1e-17  # errors of exactly zero have to stand somewhere on a logarithmic axis
_SYMBOLS = 53  # that Plotly can draw

_pages = jinja2.Environment(
    loader=jinja2.PackageLoader("keyhole.report"), autoescape=True, undefined=jinja2.StrictUndefined
)


def render(audit: Audit) -> str:
    """The page; everything that came from a target is escaped."""
    return _pages.get_template("page.html").render(
        audit=audit,
        wording=wording,
        percent=percent,
        pictures=pictures,
        lengths=lengths,
        matrices=wording.matrices(audit),
        plot=plot(audit.findings),
    )


def figure(findings: Sequence[Finding]) -> go.Figure | None:
    """Error on fresh queries against queries asked, with each attack's floor drawn in.

    A Plotly figure, for a notebook: `.show()`. None where no attack was followed on its way.
    """
    traced = [finding for finding in findings if finding.trace]
    if not traced:
        return None
    drawn = go.Figure()
    for number, finding in enumerate(traced):
        colour = _COLOURS[number % len(_COLOURS)]
        attack = f" ({finding.attack})" if finding.attack else ""
        label = str(escape(f"{finding.exposure}{attack}"))
        queries, errors = zip(*finding.trace, strict=True)
        drawn.add_scatter(
            x=queries,
            y=[max(error, _SMALLEST) for error in errors],
            name=label,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 8, "symbol": number % _SYMBOLS},
            hovertemplate="%{x:,} queries<br>error %{y:.1e}<extra></extra>",
        )
        if finding.floor is not None:
            drawn.add_vline(x=finding.floor, line={"color": colour, "dash": "dot", "width": 1})
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


def plot(findings: Sequence[Finding]) -> Markup | None:
    """The figure as a part of the page."""
    drawn = figure(findings)
    if drawn is None:
        return None
    html: str = plotly.io.to_html(
        drawn, include_plotlyjs=True, full_html=False, div_id="error-against-queries",
        config={"displaylogo": False, "responsive": True},
    )  # fmt: skip
    return Markup(html)  # noqa: S704 - plotly's own output; labels were escaped above
