"""How far a remedy goes: what was measured, and nothing else."""

from __future__ import annotations

from test_severity import finding

from keyhole.assess import assess
from keyhole.assess.measured import measured
from keyhole.core import Audit, Finding, Piece, Reading, Readings, Remedied, Status


def changes(*findings: Finding) -> dict[str, list[tuple[str, float]]]:
    """By exposure, what was done against it and the share that was left."""
    items = assess(Audit("t", "i", findings)).items
    return {
        item.finding.exposure: [(m.change, m.share) for m in measured(item, items)]
        for item in items
    }


def test_scores_are_held_against_less_of_the_same_endpoint():
    full = finding(surface="head")
    kept = finding(surface="head", exposure="scores under a budget", status=Status.UNSOLVED)
    signs = finding(surface="head", exposure="signs")
    rounded = finding(surface="head", exposure="scores rounded to 3 decimals")
    narrow = finding(
        surface="head", exposure="scores rounded to 3 decimals, inputs of norm 10 at most",
        status=Status.INEXACT, known=0.7,
    )  # fmt: skip
    low_rank = finding(surface="head", exposure="full scores, low-rank head")
    elsewhere = finding(surface="another", exposure="signs")
    said = changes(full, kept, signs, rounded, narrow, low_rank, elsewhere)
    assert said["full scores"] == [
        ("scores under a budget", 0.0),
        ("scores rounded to 3 decimals, inputs of norm 10 at most", 0.7),
        ("scores rounded to 3 decimals", 1.0),
        ("signs", 1.0),
    ]
    assert [change for change, _ in said["scores rounded to 3 decimals"]] == [
        "scores under a budget", "scores rounded to 3 decimals, inputs of norm 10 at most", "signs",
    ]  # fmt: skip
    assert said["signs"] == []


def test_outputs_are_held_against_the_same_rounded_and_caches_against_defences():
    whole = finding("input", exposure="a layer's output")
    rounded = finding("input", exposure="a layer's output to 3 decimals", status=Status.UNSOLVED)
    maps = finding("input", exposure="a layer's output and attention maps")
    cache = finding("text", exposure="keys and values of layer 1")
    rotated = finding("text", exposure="keys and values of layer 1, rotated")
    said = changes(whole, rounded, maps, cache, rotated)
    assert said["a layer's output"] == [("a layer's output to 3 decimals", 0.0)]
    assert said["keys and values of layer 1"] == [("keys and values of layer 1, rotated", 1.0)]
    assert said["a layer's output and attention maps"] == []


def test_readings_say_what_rounding_left_and_flips_what_a_training_left():
    def cell(precision: str, right: bool) -> Readings:
        reading = Reading("a", (Piece("a", "verified", right),), right, right)
        return Readings("hidden", 1, precision, (reading,))

    cells = (cell("float32", True), cell("int8", True), cell("noise of 10%", False))
    text = finding("text", exposure="hidden states of layer 1", texts=cells)
    told = Remedied("keyhole harden: a twin", 0.25, "2 of 8 right answers flipped")
    flips = finding("prediction", exposure="1% cut", known=0.5, remedied=(told,))
    items = assess(Audit("t", "i", (text, flips))).items
    by_exposure = {item.finding.exposure: measured(item, items) for item in items}
    noise, rounded = by_exposure["hidden states of layer 1"]
    assert (noise.change, noise.words) == (
        "noise of 10% added", "0% of tokens right, 0 of 1 texts exact",
    )  # fmt: skip
    assert (rounded.change, rounded.share) == ("rounded to int8", 1.0)
    (trained,) = by_exposure["1% cut"]
    assert (trained.change, trained.share, trained.words) == (told.remedy, told.left, told.words)
