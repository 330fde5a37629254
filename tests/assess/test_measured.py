"""Measured remedies of findings."""

from __future__ import annotations

from test_severity import finding

from exposures import called
from keyhole.assess import assess
from keyhole.assess.assessment import measured
from keyhole.core import Audit, Finding, Piece, Reading, Readings, Remedied, Status
from keyhole.report import words


def changes(*findings: Finding) -> dict[str, list[tuple[str, float]]]:
    """Return the remedies of each exposure, with the share that was still given away."""
    items = assess(Audit("t", "i", findings)).items
    return {
        words.exposure(item.finding.exposure): [
            (words.exposure(m.item.finding.exposure) if m.item else m.change, m.share)
            for m in measured(item, items)
        ]
        for item in items
    }


def test_scores_are_held_against_less_of_the_same_endpoint():
    full = finding(exposure=called("full scores", "head"))
    kept = finding(
        exposure=called("scores under a budget", "head"), status=Status.UNSOLVED
    )
    signs = finding(exposure=called("signs", "head"))
    rounded = finding(exposure=called("scores rounded to 3 decimals", "head"))
    narrow = finding(
        exposure=called(
            "scores rounded to 3 decimals, inputs of norm 10 at most", "head"
        ),
        status=Status.INEXACT,
        known=0.7,
    )
    low_rank = finding(exposure=called("full scores, low-rank head", "head"))
    other_target = finding(exposure=called("signs", "another"))
    found = changes(full, kept, signs, rounded, narrow, low_rank, other_target)
    assert found["full scores"] == [
        ("scores under a budget", 0.0),
        ("scores rounded to 3 decimals, inputs of norm 10 at most", 0.7),
        ("scores rounded to 3 decimals", 1.0),
        ("signs", 1.0),
    ]
    assert [change for change, _ in found["scores rounded to 3 decimals"]] == [
        "scores under a budget",
        "scores rounded to 3 decimals, inputs of norm 10 at most",
        "signs",
    ]
    assert found["signs"] == []


def test_outputs_are_held_against_the_same_rounded_and_caches_against_defences():
    whole = finding("input", exposure=called("a layer's output"))
    rounded = finding(
        "input",
        exposure=called("a layer's output to 3 decimals"),
        status=Status.UNSOLVED,
    )
    maps = finding("input", exposure=called("a layer's output and attention maps"))
    cache = finding("text", exposure=called("keys and values of layer 1"))
    rotated = finding("text", exposure=called("keys and values of layer 1, rotated"))
    found = changes(whole, rounded, maps, cache, rotated)
    assert found["a layer's output"] == [("a layer's output to 3 decimals", 0.0)]
    assert found["keys and values of layer 1"] == [
        ("keys and values of layer 1, rotated", 1.0)
    ]
    assert found["a layer's output and attention maps"] == []


def test_readings_say_what_rounding_left_and_flips_what_a_training_left():
    def cell(precision: str, right: bool) -> Readings:
        reading = Reading("a", (Piece("a", "verified", right),), right, right)
        return Readings("hidden", 1, precision, (reading,))

    cells = (cell("float32", True), cell("int8", True), cell("noise of 10%", False))
    text = finding("text", exposure=called("hidden states of layer 1"), texts=cells)
    remedied = Remedied(
        "keyhole harden: a trained copy", 0.25, "2 of 8 right answers flipped"
    )
    flips = finding(
        "prediction",
        exposure=called("1% of all attention cut"),
        known=0.5,
        remedied=(remedied,),
    )
    items = assess(Audit("t", "i", (text, flips))).items
    by_exposure = {
        words.exposure(item.finding.exposure): measured(item, items) for item in items
    }
    noise, rounded = by_exposure["hidden states of layer 1"]
    assert (noise.change, noise.words) == (
        "noise of 10% added",
        "0% of tokens right, 0 of 1 texts exact",
    )
    assert (rounded.change, rounded.share) == ("rounded to int8", 1.0)
    (trained,) = by_exposure["1% of all attention cut"]
    assert (trained.change, trained.share, trained.words) == (
        remedied.remedy,
        remedied.left,
        remedied.words,
    )
