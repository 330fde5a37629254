"""The page and the table agree with the assessment, and nothing in them is taken for markup."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
from dataclasses import replace
from datetime import date

import pytest
from markupsafe import escape
from rich.console import Console

import hostile_audit
from exposures import called
from keyhole import oracle, report
from keyhole.assess import Assessment, Family, Ignore, Policy, assess, compared, decided
from keyhole.assess.severity import cost
from keyhole.audit import Audit, audit
from keyhole.audit.target import target_of
from keyhole.core import Finding, Skip, Status
from keyhole.core.finding import Piece, Reading, Readings
from keyhole.endpoints import demo_endpoints
from keyhole.report import words as sentences


@pytest.fixture(scope="module")
def found() -> Audit:
    planted = target_of(oracle.plant(dim=8, rank=2, seed=1))
    return audit(replace(planted, name="a planted head"))


def words(found: Audit, assessment: Assessment | None = None, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(report.table(assessment or found))
    return console.file.getvalue()


def test_the_table_takes_nothing_for_markup(found):
    shout = replace(found.findings[0], exposure=called("[red]scores[/red]"))
    assert "[red]scores[/red]" in words(replace(found, findings=(shout,)))


def test_the_page_says_what_was_found(found):
    page = report.render(found)
    assessment = assess(found)
    assert f'<h1 class="verdict">{assessment.verdict}</h1>' in page
    assert "5 of 6 checks exposed" in page
    for item in assessment.items:
        assert f'<details class="finding" id="{item.id}">' in page
        assert item.rule.id in page
        assert str(escape(sentences.exposure(item.finding.exposure))) in page
        assert cost(item.finding) in page
        assert str(sentences.unbroken(item.finding.reason)) in page
    assert "https://" not in page
    assert "http://" not in page
    assert len(page) < 1_500_000


def test_findings_stand_by_family_then_part_the_worst_first(found):
    text = read(found, 1, 2).findings
    mixed = replace(found, findings=(*text, *found.findings))
    order = re.findall(r'<details class="finding" id="([^"]+)"', report.render(mixed))
    items = assess(mixed).items
    by_family = sorted(items, key=lambda item: list(Family).index(item.family))
    assert order == [item.id for item in by_family]
    assert order[-1].startswith("text-the-classifier")


@pytest.mark.parametrize(
    ("findings", "sentence"),
    [
        ((), "Nothing was checked"),
        ((Status.NOT_IDENTIFIABLE,), "Nothing was given away: the attack"),
        ((Status.ORACLE_FAILED,), "Could not check"),
        (
            (Status.INEXACT, Status.MISMATCH),
            "The weights can be copied in part; 1 of 2 checks",
        ),
    ],
)
def test_verdicts(found, findings, sentence):
    made = tuple(
        Finding(called("full scores"), "SingleHead", status, "", "", None, 0, 0.0)
        for status in findings
    )
    empty = replace(found, findings=made)
    assert sentence in report.render(empty)
    assert sentence in words(empty)


def test_controls_and_skips_stand_apart_and_are_not_counted(found):
    control = Finding(
        called("1% of all attention cut at random"),
        "HackAttend",
        Status.RECOVERED,
        "all flipped",
        "Nothing",
        None,
        7,
        0.0,
        known=1.0,
        sought="prediction",
        control=True,
    )
    skips = (
        Skip(
            called("every token's vector"), "FullOutput", "no vectors", unchecked=True
        ),
    )
    made = replace(found, findings=(*found.findings, control), skips=skips)
    page = report.render(made)
    before, after = page.split('<section id="not-counted"')
    for sign in ("cut at random", "no vectors"):
        assert sign not in before
        assert sign in after
    assert "5 of 6 checks exposed" in page
    assert "not counted: 1 control, 1 check not made" in page
    assert "could not check" in after
    table = words(made)
    assert table.index("Controls, not counted") < table.index("cut at random")
    assert table.index("Not tried") < table.index("no vectors")


BOX = "the classifier in the box"


def read(found: Audit, right: int, of: int) -> Audit:
    """An audit with one finding: a text of which `right` of `of` tokens were recovered."""
    pieces = tuple(
        Piece(f" w{number}", "likely", number < right) for number in range(of)
    )
    texts = (
        Readings("hidden", 1, "float32", (Reading("a text", pieces, False, False),)),
    )
    made = Finding(
        called("hidden states of layer 1", BOX),
        "EncoderStates",
        Status.INEXACT,
        "chosen near its boundary: --data measures it",
        "train: keyhole harden --method sattend",
        None,
        1,
        0.0,
        known=texts[0].known,
        sought="text",
        texts=texts,
    )
    return replace(found, findings=(made,))


@pytest.mark.parametrize(
    ("right", "of", "share"),
    [(8, 9, "89%"), (399, 400, ">99%"), (1, 400, "<1%"), (0, 4, "0%")],
)
def test_a_share_is_the_same_in_the_terminal_and_on_the_page(found, right, of, share):
    made = read(found, right, of)
    page = report.render(made)
    assert f"{right} of {of} tokens ({share})" in " ".join(words(made).split())
    assert f">{right} of {of} tokens ({escape(share)})<" in page
    assert (
        f'#text-the-classifier-in-the-box-hidden-states-layer-1">{escape(share)}</a>'
        in page
    )


def test_a_row_says_of_what(found):
    made = read(found, 1, 2)
    assert "text of the classifier in the box" in report.render(made)
    assert "text of the classifier in the box\n" in words(made)
    for name in demo_endpoints():
        assert name.startswith("the ")


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_loses_nothing_in_a_terminal(found, width):
    made = replace(found, findings=(*found.findings, *read(found, 1, 2).findings))
    lines = words(made, width=width).splitlines()
    assert max(map(len, lines)) <= width
    for finding in made.findings:
        first = next(word for word in sentences.exposure(finding.exposure).split("  "))[
            :12
        ]
        rows = [line for line in lines if first in line]
        assert any(sentences.outcome(finding) in row for row in rows), finding.exposure
    assert "…" not in "".join(lines)


def test_an_option_in_a_sentence_is_escaped_and_kept_in_one_piece():
    written = sentences.unbroken("<b>: --json-file, a--b, -- c --data")
    assert written == (
        '&lt;b&gt;: <span class="option">--json-file</span>, a--b, -- c '
        '<span class="option">--data</span>'
    )


def test_the_policy_names_every_style_and_every_script(found):
    page = report.render(found)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page).group(1)
    assert policy.startswith("default-src &#39;none&#39;; ")
    for tag in ("style", "script"):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        named = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        (allowed,) = re.findall(rf"{tag}-src (.*?); ", f"{html.unescape(policy)}; ")
        assert set(allowed.split()) == set(named)
        assert len(named) == 1
    assert "unsafe" not in policy
    assert " style=" not in page  # the policy would forbid it
    assert not re.search(r"\son[a-z]+=", page)


def test_what_came_from_a_target_is_escaped_also_out_of_a_file(tmp_path):
    made = hostile_audit.audit()
    made.save(tmp_path / "audit.json")
    for bad in (made, Audit.load(tmp_path / "audit.json")):
        page = report.render(bad)
        assert "<script>window" not in page
        assert "<img" not in page
        assert "</title></style>" not in page
        assert not re.search(
            "[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page
        )
        assert page.encode()  # no half of a surrogate pair
        printed = words(bad)
        assert not re.search("[\0-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", printed)
        assert r"\x1b[31m" in printed


GONE = Finding(
    exposure=called("something that is no longer"),
    attack="x",
    status=Status.RECOVERED,
    reason="",
    remedy="",
    error=None,
    queries=1,
    seconds=0.0,
    known=1.0,
)
UNTRIED = replace(GONE, exposure=called("something not looked for"))


def test_what_a_policy_and_a_baseline_say_of_a_finding_is_shown(found):
    risk = Ignore("weights-*", "a <b>known</b> risk", date(2027, 1, 1))
    plain = assess(found)
    old = assess(replace(found, findings=(*found.findings[1:], GONE, UNTRIED)))
    looked = Skip(GONE.exposure, "none", "the target has none", absent=True)
    judged = decided(
        compared(assess(replace(found, skips=(*found.skips, looked))), old),
        Policy(source="<i>keyhole.toml</i>", ignores=(risk,)),
        date(2026, 1, 1),
    )
    page = report.render(judged)
    assert '<span class="badge plain">new</span>' in page
    assert '<span class="badge plain">same</span>' in page
    assert "a &lt;b&gt;known&lt;/b&gt; risk (until 2027-01-01)" in page
    assert page.count(">ignored<") == len(plain.exposed)
    assert "&lt;i&gt;keyhole.toml&lt;/i&gt;" in page
    assert "no finding fails" in page
    gone, untried = page.split("Gone since the baseline")[1].split(
        "In the baseline, not tried"
    )
    assert "something that is no longer" in gone
    assert "something not looked for" not in gone
    assert "something not looked for" in untried
    assert "Not tried this time, as before" in words(found, judged)
    assert "Gone since the baseline" in words(found, judged)


def test_a_saved_audit_gives_the_same_page(found):
    again = Audit.from_dict(json.loads(json.dumps(found.to_dict())))
    assert report.render(again) == report.render(found)
