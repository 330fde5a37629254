"""The formats of a report, by the names that people type.

All of them are made from the same `Assessment`, so that no two can disagree about ids, severities
or the verdict.
"""

from __future__ import annotations

from collections.abc import Callable

from keyhole.assess import Assessment
from keyhole.report import json_form, junit, markdown, sarif
from keyhole.report.page import render

FORMATS: dict[str, Callable[[Assessment], str]] = {
    "html": render,
    "json": json_form.render,
    "sarif": sarif.render,
    "sarif-github": sarif.render_alerts,
    "markdown": markdown.render,
    "junit": junit.render,
}
