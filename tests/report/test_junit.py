"""JUnit: a test case for each check, in agreement with the exit code."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from xml.etree import ElementTree

from exposures import called
from keyhole.assess import Policy, assess, decided
from keyhole.core import Skip
from keyhole.report.formats import as_junit
from sample_audits import clean, judged, whole


def ends(assessment):
    """Return how each test case ended, by its name."""
    root = ElementTree.fromstring(as_junit(assessment))
    tags = ("failure", "error", "skipped")
    return {
        case.attrib["name"]: next(
            (part.tag for part in case if part.tag in tags), "passed"
        )
        for case in root.iter("testcase")
    }


def test_a_case_for_each_check():
    assert ends(assess(whole())) == {
        "full scores (Attack)": "failure",
        "signs (Attack)": "error",
        "a layer's output (Attack)": "failure",
        "hidden states of layer 3 (Attack)": "failure",
        "keys and values of layer 1 (Attack)": "failure",
        "stored embedding (Attack)": "failure",
        "1% of all attention cut (Attack)": "failure",
        "attention maps of layer 2 (Attack)": "passed",
        "gradient of a batch of texts (none)": "skipped",
        "something else (probe)": "error",
    }


def test_a_policy_decides_what_fails():
    ended = ends(judged(whole()))
    assert ended["full scores (Attack)"] == "failure"  # worse than in the baseline
    assert ended["hidden states of layer 3 (Attack)"] == "passed"  # no worse
    assert ended["keys and values of layer 1 (Attack)"] == "skipped"  # ignored
    assert ended["signs (Attack)"] == "error"


def test_what_a_policy_allows_is_no_error():
    unknown = replace(clean(), skips=whole().skips)
    allowed = decided(
        assess(unknown), Policy(allow_unchecked=True), today=date(2026, 1, 1)
    )
    assert allowed.decision.exit_code == 0
    assert set(ends(allowed).values()) == {"passed", "skipped"}
    refused = decided(assess(unknown), Policy(), today=date(2026, 1, 1))
    assert refused.decision.exit_code == 3
    assert ends(refused)["something else (probe)"] == "error"


def test_what_a_policy_allows_is_no_error_where_something_else_fails():
    ended = ends(
        decided(assess(whole()), Policy(allow_unchecked=True), today=date(2026, 1, 1))
    )
    assert ended["full scores (Attack)"] == "failure"
    assert (ended["signs (Attack)"], ended["something else (probe)"]) == (
        "skipped",
        "skipped",
    )


def test_a_check_of_what_the_service_does_not_return_is_no_error():
    missing = Skip(
        called("hidden states of layer 1"), "none", "no memory", unchecked=True
    )
    made = assess(replace(clean(), skips=(missing,)), returns=("scores",))
    assert made.exit_code == 0
    assert ends(made)["hidden states of layer 1 (none)"] == "skipped"


def test_cases_are_named_after_family_and_surface():
    root = ElementTree.fromstring(as_junit(assess(whole())))
    names = {case.attrib["classname"] for case in root.iter("testcase")}
    assert {"keyhole.text.a-model", "keyhole.text.a-store", "keyhole.inputs"} <= names
    suites = [suite.attrib["name"] for suite in root]
    assert set(suites) == {"a model", "a store", "a target"}
    failure = next(root.iter("failure"))
    assert failure.attrib["type"] == "critical"
    assert "Fix: a remedy" in failure.text
