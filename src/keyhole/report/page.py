"""An audit as one self-contained HTML page: no network, and readable without its script."""

from __future__ import annotations

from markupsafe import escape

from keyhole.assess import Assessment, Item, assess
from keyhole.assess.measured import Measure, measured
from keyhole.assess.severity import cost
from keyhole.core import Audit, Result
from keyhole.core.text import legible, percent
from keyhole.report import lengths, matrix, pictures, readings, words
from keyhole.report.curves import curve
from keyhole.report.groups import groups, sections
from keyhole.report.pages import fill


def render(audit: Audit, assessment: Assessment | None = None) -> str:
    """The page; everything that came from a target is escaped.

    `assessment` is what `assess` made of the audit, where a policy or a baseline had a say in it.
    """
    made = assess(audit) if assessment is None else assessment

    def measures(item: Item) -> list[Measure]:
        return measured(item, made.items)

    return fill(
        "page.html",
        audit=audit,
        assessment=made,
        sections=sections(made),
        controls=groups(made.controls),
        parts=matrix.parts(made),
        measured=measures,
        cost=cost,
        curve=curve,
        lengths=lengths,
        matrix=matrix,
        percent=percent,
        pictures=pictures,
        readings=readings,
        words=words,
    )


def html(result: Result) -> str:
    """What a notebook shows: the page of an audit, in a frame of its own; of others the summary."""
    if isinstance(result, Audit):
        return f'<iframe width="100%" height="600" srcdoc="{escape(render(result))}"></iframe>'
    return f"<pre>{escape(legible(repr(result)))}</pre>"
