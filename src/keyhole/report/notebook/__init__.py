"""Results in a notebook: each kind as text, table or picture, in one cell.

No script, nothing from the network, every string escaped by the template; colours are tints over
the notebook's own, so that a light and a dark one show them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from keyhole.core import Result
from keyhole.report.notebook import audits, results
from keyhole.report.notebook.blocks import Words

VIEWS: Mapping[str, Callable[[Any], Sequence[Any]]] = {
    "audit": audits.audit,
    "fleet": audits.fleet,
    "extraction": results.extraction,
    "defences": results.defences,
    "inversion": results.inversion,
    "layers inversion": results.layers,
    "bounds": results.bounds,
    "text recovery": results.text,
    "batch recovery": results.batch,
    "disruption": results.disruption,
    "certification": results.certification,
    "evaluation": results.evaluation,
    "training": results.training,
    "hardening": results.hardening,
}

_pages = jinja2.Environment(
    loader=jinja2.PackageLoader("keyhole.report"), autoescape=True, undefined=jinja2.StrictUndefined
)


def html(result: Result) -> str:
    """What a notebook shows of a result; of a kind without a view, its summary."""
    view = VIEWS.get(result.kind)
    lines = [Words(line) for line in result.summary().splitlines()]
    blocks = lines if view is None else view(result)
    return _pages.get_template("notebook.html").render(blocks=blocks)
