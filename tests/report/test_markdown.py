"""Markdown: what a comment shows, folds and leaves out."""

from __future__ import annotations

from dataclasses import replace

from keyhole.assess import assess
from keyhole.core import Status
from keyhole.report.formats import as_markdown
from sample_audits import finding, judged, whole


def many(count):
    findings = tuple(
        finding(
            f"hidden states of layer {n}", "text", Status.RECOVERED, remedy="x" * 150
        )
        for n in range(count)
    )
    return assess(replace(whole(), findings=findings))


def test_the_verdict_the_cards_and_the_findings():
    comment = as_markdown(assess(whole()))
    assert (
        "6 of 8 checks gave something away, 1 found nothing, 1 had no result; worst"
        in comment
    )
    assert "| 🔴 critical | text | all | 3 of 4 | `a remedy` |" in comment
    assert "`hidden states of layer 3, a model`<br>KH-TEXT-HIDDEN-STATES" in comment
    assert "2 could not be checked, which is not clean" in comment
    assert "1% cut at random" not in comment


def test_what_was_not_tried_has_no_severity():
    """A family that was not tried is not shown as green."""
    findings = tuple(f for f in whole().findings if f.exposure.family != "predictions")
    comment = as_markdown(assess(replace(whole(), findings=findings)))
    assert "| – | predictions | not tried | – | – |" in comment
    assert "🟢" not in comment


def test_what_a_policy_and_a_baseline_say():
    comment = as_markdown(judged(whole()))
    assert "`It fails: " in comment
    assert "(keyhole.toml). Since the baseline: " in comment
    assert "ignored until 2999-01-01: `it never leaves the cluster`" in comment
    assert "1 gone since the baseline" in comment
    assert "critical (same)" in comment


def test_the_first_twenty_stand_before_the_fold():
    before, fold, after = as_markdown(many(25)).partition(
        "<details><summary>5 more</summary>"
    )
    assert fold
    assert before.count("KH-TEXT-HIDDEN-STATES") == 20
    assert after.count("KH-TEXT-HIDDEN-STATES") == 5


def test_a_comment_is_never_too_long():
    comment = as_markdown(many(2000))
    shown = comment.count("KH-TEXT-HIDDEN-STATES")
    assert len(comment) < 65_536
    assert shown > 100
    assert f"{2000 - shown} more findings do not fit here" in comment
