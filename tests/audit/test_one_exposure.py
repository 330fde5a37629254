"""One exposure by its name: the checks that a whole audit makes of it, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tiny_models as tiny
from keyhole import oracle
from keyhole.audit import TextTarget, texts
from keyhole.audit.one_exposure import audit_exposure
from keyhole.audit.target import EndpointPart, ModelPart, Target, target_of
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.core.progress import untracked

MODEL = tiny.model("bert")
SUBJECT = TextTarget(tiny.loaded(MODEL), ["w1 w2 w3"])
HEAD = oracle.plant(dim=5, seed=2)
BOTH = Target("both", (EndpointPart("head", HEAD), ModelPart("tiny", SUBJECT)))


def timeless(findings):
    return [replace(finding, seconds=0.0) for finding in findings]


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_leak_is_attacked_as_in_an_audit(precision):
    subject = replace(SUBJECT, layers=[2], precisions=[precision])
    (check,) = [
        check
        for check in texts.checks("tiny", subject, 0)
        if (check.exposure.rule, check.exposure.layer) == ("KH-TEXT-HIDDEN-STATES", 2)
        and check.attack == "encoder-states"
    ]
    audit = audit_exposure(BOTH, "hidden:2", precision=precision)
    assert timeless(audit.findings) == timeless(check.run(untracked).findings)
    assert (audit.target, audit.identity) == ("both", BOTH.identity)


def test_scores_are_attacked_as_they_are():
    whole = [
        finding
        for check in EndpointPart("head", HEAD).weight_checks(0)
        for finding in check.run(untracked).findings
    ]
    audit = audit_exposure(BOTH, "scores")
    assert timeless(audit.findings) == timeless(
        finding for finding in whole if finding.exposure.variant in ("full", "low-rank")
    )
    assert len(whole) > len(audit.findings) == 2


@pytest.mark.parametrize("budget", [1, 7, 29])
def test_a_budget_is_a_whole_number_of_queries(budget):
    audit = audit_exposure(BOTH, "scores", budget=budget)
    assert {finding.queries for finding in audit.findings} == {budget}
    assert {finding.status for finding in audit.findings} == {Status.UNSOLVED}


def test_an_exposure_that_the_target_does_not_have():
    with pytest.raises(InputError, match="hidden:1 needs a model, and a head"):
        audit_exposure(replace(target_of(HEAD), name="a head"), "hidden:1")
    with pytest.raises(InputError, match="scores needs an endpoint, and a model"):
        audit_exposure(replace(target_of(SUBJECT), name="a model"), "scores")
