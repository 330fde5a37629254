"""Severities of findings, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exposures import called
from keyhole.assess import Severity, score
from keyhole.assess.severity import cost, exact, share
from keyhole.core import Estimate, Finding, Piece, Reading, Readings, Status

OF = {
    "weights": "full scores",
    "text": "hidden states of layer 1",
    "input": "a layer's output",
    "prediction": "1% of all attention cut",
}


def finding(sought: str = "weights", **changes) -> Finding:
    plain = Finding(
        exposure=called(OF[sought]),
        attack="SingleHead",
        status=Status.RECOVERED,
        reason="why",
        remedy="stop it",
        error=1e-15,
        queries=4160,
        seconds=0.1,
        known=1.0,
        sought=sought,
    )
    return replace(plain, **changes)


def cell(*exact_ones: bool) -> Readings:
    pieces = (Piece("a", "verified", True),)
    readings = tuple(Reading("a", pieces, right, right) for right in exact_ones)
    return Readings("hidden", 1, "float32", readings)


LOST = {"text": 4, "input": 4, "weights": 3, "prediction": 2}
COSTS = {1: 2, 10_000: 2, 10_001: 1, 1_000_000: 1, 1_000_001: 0}
NAMES = {
    range(9, 11): "critical",
    range(7, 9): "high",
    range(5, 7): "medium",
    range(1, 5): "low",
}


@pytest.mark.parametrize("sought", LOST)
@pytest.mark.parametrize("queries", COSTS)
@pytest.mark.parametrize(
    ("known", "much"), [(1.0, 3), (0.99, 3), (0.98, 2), (0.5, 2), (0.49, 1)]
)
@pytest.mark.parametrize("proved", [True, False])
def test_points_are_the_table_of_the_document(sought, queries, known, much, proved):
    found = finding(sought, queries=queries, known=known, status=Status.INEXACT)
    if sought == "prediction":
        proved = True  # the model itself said it
    elif proved and sought == "text":
        found = replace(found, texts=(cell(True, False),))
    elif proved:
        found = replace(found, status=Status.RECOVERED)
        much = 3
    scored = score(found)
    points = LOST[sought] + much + COSTS[queries] + proved
    assert scored.points == points
    (name,) = [name for span, name in NAMES.items() if points in span]
    assert scored.severity == name
    assert ("not proved" in scored.why) is not proved
    assert f"{queries:,}" in scored.why


def test_nothing_given_away_is_none_and_what_nobody_knows_is_not():
    assert score(finding(status=Status.UNSOLVED)).severity is Severity.NONE
    assert score(finding(status=Status.BUDGET)).severity is Severity.UNKNOWN
    assert Severity.NONE.rank < Severity.UNKNOWN.rank < Severity.LOW.rank


def partly(known: float, chance: float | None, status: Status) -> Finding:
    return finding(
        "text",
        status=status,
        known=known,
        queries=3,
        texts=(replace(cell(False, False), chance=chance),),
    )


def test_a_few_tokens_above_chance_are_medium_and_say_what_chance_gives():
    scored = score(partly(0.18, 0.02, Status.INEXACT))
    assert scored.severity is Severity.MEDIUM
    assert scored.points == 4 + 0 + 2 + 0
    assert "18% of it (guesses without the leak have 2% right)" in scored.why
    assert score(partly(0.3, 0.02, Status.INEXACT)).severity is Severity.HIGH
    proved = replace(partly(0.18, 0.02, Status.INEXACT), texts=(cell(True, False),))
    assert score(proved).points == 4 + 1 + 2 + 1


def test_tokens_that_chance_explains_are_none_and_say_so():
    scored = score(partly(0.18, 0.16, Status.UNSOLVED))
    assert scored.severity is Severity.NONE
    assert "18% of the tokens are right, which chance explains" in scored.why
    assert "guesses without the leak have 16% right" in scored.why
    assert score(partly(0.0, 0.16, Status.UNSOLVED)).why == "nothing was given away"


def test_a_control_is_no_exposure_whatever_it_achieves():
    assert (
        score(finding("prediction", control=True, known=1.0)).severity is Severity.NONE
    )


def test_shares_and_exactness():
    store = finding(
        "text",
        status=Status.INEXACT,
        known=0.2,
        texts=(cell(True, True, False, False),),
        estimate=Estimate(2, 4, 100, 30, 70),
    )
    assert share(store) == 0.3
    assert exact(store) == 0.5
    assert exact(finding()) == 1.0
    assert exact(finding(status=Status.INEXACT)) == 0.0


def test_costs_are_told_in_what_was_counted():
    assert cost(finding(queries=1)) == "1 query"
    assert (
        cost(finding("text", queries=3, exposure=called("hidden states of layer 3")))
        == "3 texts"
    )
    gradient = finding(
        "text", queries=1, exposure=called("gradient of a batch of texts")
    )
    assert cost(gradient) == "1 update"
    assert cost(finding("prediction", queries=829)) == "829 passes of the model"
