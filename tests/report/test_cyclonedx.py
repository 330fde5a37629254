"""CycloneDX: a component for each model, findings in its card, and vulnerabilities with states."""

from __future__ import annotations

import json
from dataclasses import replace

from keyhole.assess import assess
from keyhole.report import cyclonedx
from sample_audits import judged, whole


def test_models_have_cards_with_what_was_found():
    bill = cyclonedx.document(assess(whole()))
    cards = {model["name"]: model["modelCard"] for model in bill["components"]}
    assert set(cards) == {"a model", "a store", "a target"}
    assert {model["type"] for model in bill["components"]} == {"machine-learning-model"}
    (metric,) = cards["a store"]["quantitativeAnalysis"]["performanceMetrics"]
    assert metric["value"] == "0.4"
    assert metric["confidenceInterval"] == {"lowerBound": "0.13", "upperBound": "0.73"}
    unknown = [metric for metric in cards["a model"]["quantitativeAnalysis"]["performanceMetrics"]
               if metric["slice"].startswith("signs")]  # fmt: skip
    assert unknown[0]["value"] == "unknown"
    risks = cards["a model"]["considerations"]["ethicalConsiderations"]
    assert {"mitigationStrategy": "a remedy"}.items() <= risks[0].items()
    assert not any("attention maps" in risk["name"] for risk in risks)  # kept


def test_states_of_vulnerabilities():
    bill = cyclonedx.document(judged(whole()))
    states = {entry["id"]: entry["analysis"] for entry in bill["vulnerabilities"]}
    assert states["text-a-model-hidden-states-of-layer-3"]["state"] == "exploitable"
    ignored = states["text-a-model-keys-and-values-of-layer-1"]
    assert ignored["response"] == ["will_not_fix"]
    assert "it never leaves the cluster" in ignored["detail"]
    assert states["weights-a-model-signs"]["state"] == "in_triage"
    assert states["weights-a-model-the-last-token-s-vector"]["state"] == "resolved"
    assert "text-a-model-attention-maps-of-layer-2" not in states


def test_references_lead_somewhere():
    bill = cyclonedx.document(judged(whole()))
    models = {model["bom-ref"] for model in bill["components"]}
    for entry in bill["vulnerabilities"]:
        assert {affected["ref"] for affected in entry["affects"]} <= models
    refs = [*models, *(entry["bom-ref"] for entry in bill["vulnerabilities"]), "target"]
    assert len(set(refs)) == len(refs)


def test_a_serial_number_is_of_one_audit():
    first, same, other = (
        json.loads(cyclonedx.render(assess(audit)))["serialNumber"]
        for audit in (whole(), whole(), replace(whole(), seed=4))
    )
    assert first == same
    assert first != other
