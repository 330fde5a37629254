"""Documents stay valid and harmless whatever a target, a server or a saved file says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from keyhole.assess import Assessment, Ignore, assess
from keyhole.core import Audit, dump
from keyhole.core.files import parse
from keyhole.report.formats import FORMATS
from published_schemas import audit_errors, junit_errors, sarif_errors
from sample_audits import judged, spoiled, whole

HOSTILE = {
    "script": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "closing": "</code></details></td></system-out>-->]]><!-- <![CDATA[ x",
    "link": "[click](https://evil.example) ![x](https://evil.example/p.png) <https://evil.example>",
    "reference": "[click]: https://evil.example\n\n[click] [^1]",
    "mention": f"@octocat @org/team #1 GH-1 owner/repo#1 !7 {'a1b2c3d4' * 5}",
    "autolink": "https://evil.example www.evil.example somebody@evil.example :+1:",
    "table": "a | b \\| c \\\\| d\n| --- | --- |\n| x |",
    "fence": "```\n# heading\n~~~ `code` ``more`` " + "`" * 100,
    "html block": "\n\n<details open>\n\n# heading\n\n- [ ] task\n/close\n",
    "template": "{{7*7}} ${7*7} {0} %s %n {% raw %} ::set-output name=x::y",
    "control": "\x00\x01\x07\x08\x0b\x1f\x7f\x85\x9b31m",
    "escapes": "\x1b[31mred\x1b]8;;https://evil.example\x07link\x1b]8;;\x07\x1b[2J",
    "directions": "\u202egnp.exe\u202c \u2066x\u2069 \u200b\u200f\ufeff\u2028\u2029",
    "surrogates": "\ud800 x \udcff \ufffe\uffff",
    "numbers": "layer 99999999999999999999 ２ ²",
    "long": "x" * 100_000,
    "long and odd": "\x1b`|<@[" * 20_000,
    "empty": "",
}
# What GitHub, GitLab or a browser would make something of, wherever it stands outside
# code.
_LIVE = re.compile(
    r"@\w|#\d|GH-\d|https?:|www\.|evil|!\d|[0-9a-f]{40}|:\+1:|::set|/close"
)


@pytest.fixture(scope="module", params=HOSTILE)
def assessment(request) -> Assessment:
    """An audit in which every string is hostile, loaded from a saved file."""
    text = HOSTILE[request.param]
    short = replace(whole(), findings=whole().findings[3:5], skips=whole().skips[:1])
    bad = spoiled(short if len(text) > 10_000 else whole(), text)
    made = judged(Audit.from_dict(parse(dump(bad.to_dict()))))
    decision = made.decision
    assert decision is not None
    rulings = tuple(replace(ruled, rule=text) for ruled in decision.rulings)
    ignore = Ignore(text, text, date(2999, 1, 1))
    items = (replace(made.items[0], ignored=ignore), *made.items[1:])
    decision = replace(decision, rulings=rulings, policy=text, rule=text)
    return replace(made, items=items, decision=decision)


def strings(data):
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for part in data.values() if isinstance(data, dict) else data:
            yield from strings(part)


@pytest.mark.parametrize("name", ["sarif", "sarif-github"])
def test_sarif(assessment, name):
    text = FORMATS[name](assessment)
    log = json.loads(text)
    assert text.isascii()
    assert len(text) < 1_000_000
    assert sarif_errors(log) == []
    assert all(part.isprintable() for part in strings(log["runs"][0]["results"]))
    assert all(part.replace("\n", "").isprintable() for part in strings(log))
    for result in log["runs"][0]["results"]:
        assert not re.search(
            r"(?<!\\)(\\\\)*\[", result["message"]["text"]
        )  # starts a link
        assert not re.search(r"(?<!\{)(\{\{)*\{(?!\{)", result["message"]["text"])
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"[\w./-]+", uri, re.ASCII)
        assert ".." not in uri


def test_json_keeps_it_as_it_is(assessment):
    text = FORMATS["json"](assessment)
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    errors = audit_errors(json.loads(text))
    assert all(
        error.startswith("format") for error in errors
    )  # a hostile date is no date
    assert Audit.from_dict(parse(text)) == assessment.audit


def test_junit(assessment):
    text = FORMATS["junit"](assessment)
    assert len(text) < 1_000_000
    assert text.replace("\n", "").isprintable()
    root = ElementTree.fromstring(text.encode("utf-8"))
    assert junit_errors(root) == []
    assert len(list(root.iter("testcase"))) == len(assessment.items) + len(
        assessment.audit.skips
    )


class _Outside(HTMLParser):
    """Return the text of a rendered comment outside of code, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self._code = 0

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not attrs or (tag, attrs) == ("code", [("class", "language-sh")])
        self._code += tag == "code"

    def handle_endtag(self, tag):
        self._code -= tag == "code"

    def handle_data(self, data):
        self.text += "" if self._code else data


def test_markdown(assessment):
    comment = FORMATS["markdown"](assessment)
    assert len(comment) < 65_536
    assert comment.replace("\n", "").isprintable()
    seen = _Outside()
    seen.feed(MarkdownIt("commonmark").enable("table").render(comment))
    assert seen.tags <= {
        "h2",
        "h3",
        "p",
        "strong",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "br",
        "code",
        "pre",
        "details",
        "summary",
        "ul",
        "li",
    }
    assert not _LIVE.search(seen.text)


def test_no_row_has_a_cell_too_many(assessment):
    """Some readers end a cell at a pipe even after one or two backslashes."""
    rows = [
        line for line in FORMATS["markdown"](assessment).splitlines() if line[:1] == "|"
    ]
    assert rows
    assert {row.count("|") for row in rows} == {6}


def test_a_harmless_text_is_left_as_it_is():
    shown = FORMATS["markdown"](assess(whole()))
    assert "`hidden states of layer 3, a model`" in shown
    assert "hidden states of layer 3, a model: recovered" in FORMATS["sarif"](
        assess(whole())
    )
