"""Defences in front of what is audited: findings next to those of the plain target."""

from __future__ import annotations

import pytest

import keyhole
import tiny_models as tiny
from exposures import by_name
from keyhole import oracle, report
from keyhole.audit.defences import model_checks
from keyhole.audit.texts import TextTarget
from keyhole.core import Audit, Status
from keyhole.core.progress import untracked
from keyhole.models import Loaded, identity

pytestmark = pytest.mark.slow


def test_an_endpoint(tmp_path):
    targets = {
        "head": oracle.plant(dim=3, seed=1),
        "layer": oracle.plant("attention", dim=2, seed=1),
    }
    only = "KH-WEIGHTS-ROUNDED-SCORES"  # the rule that defended scores fall under
    result = keyhole.audit(targets, against_defences=True, only=only)
    behind = {
        finding.exposure.name: finding
        for finding in result.findings
        if finding.exposure.variant == "defended"
    }
    assert len(behind) == 14
    assert {finding.part for finding in behind.values()} == {"head"}
    assert behind["short and unusual inputs refused"].status is Status.RECOVERED
    assert behind["a budget of half the unknowns"].status is Status.UNSOLVED
    assert "an honest client answers off by" in behind["label only"].reason
    assert "scores behind a defence: unusual inputs refused" in report.render(result)
    result.save(tmp_path / "audit.json")
    assert Audit.load(tmp_path / "audit.json") == result


def test_a_layer_alone_has_nothing_to_try():
    only = "KH-WEIGHTS-ROUNDED-SCORES"
    target = oracle.plant("attention", dim=4, seed=1)
    result = keyhole.audit(target, against_defences=True, only=only)
    reasons = [
        skip.reason for skip in result.skips if skip.exposure.variant == "defended"
    ]
    assert len(reasons) == 14
    assert set(reasons) == {
        "it is for one head's scores; this target gives the last token's vector"
    }


def test_a_model():
    model = tiny.model("llama", num_hidden_layers=2)
    loaded = Loaded(model, tiny.tokenizer(causal=True), identity(model), "llama")
    target = TextTarget(loaded, ["w1 w20 w3 w4 w100 w7"], precisions=("float32",))
    made = [check.run(untracked) for check in model_checks("", target, 0)]
    findings = [finding for checked in made for finding in checked.findings]
    assert {name: finding.status for name, finding in by_name(findings).items()} == {
        "keys and values of layer 0, rotated": Status.RECOVERED,
        "keys and values of layer 0, by KV-Shield": Status.RECOVERED,
        # a block is as wide as a head
        "keys and values of layer 0, by KV-Cloak": Status.UNSOLVED,
        "hidden states of layer 1, rotated": Status.RECOVERED,
    }
    assert all(finding.sought == "text" for finding in findings)
