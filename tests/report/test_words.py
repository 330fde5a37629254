"""Ids, gates and baselines do not depend on the words for exposures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from exposures import called
from keyhole.assess import assess
from keyhole.core import Estimate, Exposure, Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import NOT_CHECKED, is_chosen
from keyhole.report import json_form, sarif, words
from keyhole.report.formats import as_junit
from sample_audits import finding, judged, whole


def decided_of() -> dict[str, object]:
    """Return everything that a pipeline may rely on."""
    made = judged(whole())
    results = json.loads(sarif.render(made))["runs"][0]["results"]
    return {
        "ids": [
            (item.id, item.rule.id, item.severity, item.state) for item in made.items
        ],
        "gone": [item.id for item in made.gone],
        "rulings": made.decision,
        "sarif": [
            (result["ruleId"], result["partialFingerprints"]) for result in results
        ],
        "ends": [
            as_junit(made).count(f"<{tag} ") for tag in ("failure", "error", "skipped")
        ],
        "chosen": [
            is_chosen(item.finding.exposure, ["KH-TEXT-*"]) for item in made.items
        ],
        "layers": [item.finding.exposure.layer for item in made.items],
    }


def test_rewording_every_exposure_changes_no_id_gate_or_baseline(monkeypatch):
    before = decided_of()
    page = json_form.render(assess(whole()))
    other = {key: f"reworded {number}" for number, key in enumerate(words.EXPOSURES)}
    monkeypatch.setattr(words, "EXPOSURES", other)
    assert json_form.render(assess(whole())) != page
    assert decided_of() == before


def test_words_of_fields():
    assert words.exposure(called("keys and values of layer 0, rotated")) == (
        "keys and values of layer 0, rotated"
    )
    left_out = Exposure("KH-TEXT-HIDDEN-STATES", part="it")
    assert words.in_full(left_out, (2, 3, 4, 7)) == "hidden states of layers 2–4, 7, it"
    assert words.exposure(Exposure(NOT_CHECKED, "others", name="{0}")) == "all but {0}"
    strange = Exposure("KH-TEXT-OTHER", "a {new} kind", layer=2, name="{layer}")
    assert words.exposure(strange) == "a new kind, layer of layer 2"


def test_what_is_no_rule_is_refused():
    with pytest.raises(InputError, match="KH-DREAMS is not the id of a rule"):
        Exposure("KH-DREAMS")


def test_every_share_has_its_counts():
    flips = finding("1% of each head's attention cut", "prediction", Status.INEXACT)
    assert words.outcome(replace(flips, known=1 / 3, tried=3)) == "1 of 3 flipped (33%)"
    store = finding("stored embedding", "text", Status.INEXACT)
    some = Estimate.of(5, 20, 400)
    every = Estimate.of(3, 6, 6)
    assert (
        words.outcome(replace(store, estimate=some))
        == f"5 of 20 texts ({some.share} of all)"
    )
    assert words.outcome(replace(store, estimate=every)) == "3 of 6 texts (50%)"
