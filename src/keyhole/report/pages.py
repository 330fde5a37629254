"""How every page is made: one stylesheet, one short script, and a policy that forbids all else.

The policy (`default-src 'none'`) names style and script by their hashes: no browser runs or loads
anything that is not in the page, whatever a target has managed to write into it. So there are no
`style` attributes either: what is drawn takes its colours from classes, its sizes from SVG.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from keyhole.core.text import legible


def _finalize(value: Any) -> Any:
    """Strings as they may be looked at; what is markup already was made so piece by piece."""
    return legible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


_environment = jinja2.Environment(
    loader=jinja2.PackageLoader("keyhole.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=_finalize,
    trim_blocks=True,
    lstrip_blocks=True,
)


def fill(template: str, **values: Any) -> str:
    """A template that extends base.html, with the values given; all strings in them are escaped."""
    style, script = _inlined("style.css"), _inlined("script.js")
    page = _environment.get_template(template)
    return page.render(style=style, script=script, policy=policy(style, script), **values)


def policy(style: str, script: str) -> str:
    """What a browser may do on a page: what is inlined in it, and nothing else."""
    return "; ".join([
        "default-src 'none'",
        f"style-src {_digest(style)}",
        f"script-src {_digest(script)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ])  # fmt: skip


@cache
def _inlined(name: str) -> Markup:
    text = (resources.files("keyhole.report") / "templates" / name).read_text("utf-8")
    return Markup(text)  # noqa: S704 - a file of this package


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
