"""SARIF: rules, locations, levels and kinds, stable fingerprints, and the form for GitHub."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date

import pytest

from exposures import called
from keyhole.assess import RULES, Ignore, Policy, Severity, assess, decided
from keyhole.core import Skip, Status
from keyhole.report import sarif
from sample_audits import FINDINGS, clean, finding, judged, whole


def run_of(assessment, render=sarif.render):
    return json.loads(render(assessment))["runs"][0]


def by_exposure(run):
    return {
        result["locations"][0]["logicalLocations"][-1]["name"]: result
        for result in run["results"]
    }


def test_every_rule_is_described_in_full():
    rules = run_of(assess(whole()))["tool"]["driver"]["rules"]
    assert {rule.id for rule in RULES} < {rule["id"] for rule in rules}
    for rule in rules:
        assert rule["shortDescription"]["text"]
        assert rule["fullDescription"]["text"]
        assert rule["help"]["text"]
        assert "security" in rule["properties"]["tags"]
        assert "helpUri" not in rule  # there is no public address to name


def test_results_point_to_their_rules():
    run = run_of(assess(whole()))
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in run["results"]} <= rules
    assert by_exposure(run)["something else"]["ruleId"] == "KH-NOT-CHECKED"


def test_kinds_and_levels():
    results = by_exposure(run_of(assess(whole())))
    expected = {
        "hidden states of layer 3": ("fail", "error"),
        "1% of all attention cut": ("fail", "warning"),
        "signs": ("open", "none"),
        "attention maps of layer 2": ("pass", "none"),
        "gradient of a batch of texts": ("notApplicable", "none"),
        "something else": ("open", "none"),
    }
    for exposure, (kind, level) in expected.items():
        assert (results[exposure]["kind"], results[exposure]["level"]) == (
            kind,
            level,
        ), exposure
    assert "1% of all attention cut at random" not in results  # a control


def test_a_place_is_target_part_exposure():
    run = run_of(assess(whole()))
    result = by_exposure(run)["hidden states of layer 3"]
    (place,) = result["locations"][0]["logicalLocations"]
    full = "a target / a model / hidden states of layer 3"
    assert (place["kind"], place["fullyQualifiedName"]) == ("exposure", full)


@pytest.mark.parametrize(
    ("target", "uri"),
    [
        ("models/encoder", "models/encoder"),
        ("./models/encoder/", "models/encoder"),
        ("leak.safetensors", "leak.safetensors"),
        ("a target", "keyhole/a-target"),
        ("/etc/passwd", "keyhole/etc-passwd"),
        ("../up", "keyhole/up"),
        ("a/../b", "keyhole/a-b"),
        ("http://user:word@host/v2?x=1", "keyhole/http-user-word-host-v2-x-1"),
        ("demo", "keyhole/demo"),
    ],
)
def test_the_file_of_a_result_is_inside_the_repository(target, uri):
    made = sarif.location(called("full scores"), target)["physicalLocation"]
    assert made == {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}}


def test_names_in_other_scripts_have_files_of_their_own():
    first, second = (
        sarif.location(called("full scores"), name)["physicalLocation"]
        for name in ("模型", "модель")
    )
    assert first != second
    assert first["artifactLocation"]["uri"].isascii()


def test_fingerprints_stay_where_findings_move():
    before = by_exposure(run_of(assess(whole())))
    other = replace(
        whole(), findings=tuple(reversed(FINDINGS)), created="2027-01-01T00:00:00Z"
    )
    after = by_exposure(run_of(assess(other)))
    for exposure, result in before.items():
        assert result["partialFingerprints"] == after[exposure]["partialFingerprints"]
    prints = [
        result["partialFingerprints"]["primaryLocationLineHash"]
        for result in before.values()
    ]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
    ("severity", "least", "most"),
    [
        (Severity.CRITICAL, 9.0, 10.0),
        (Severity.HIGH, 7.0, 8.9),
        (Severity.MEDIUM, 4.0, 6.9),
        (Severity.LOW, 0.1, 3.9),
    ],
)
def test_github_calls_a_severity_by_our_name(severity, least, most):
    """The number follows the severity, which a policy may set whatever the score is."""
    made = assess(whole(), override=lambda *_: severity)
    shown = [
        float(rule["properties"]["security-severity"])
        for rule in run_of(made)["tool"]["driver"]["rules"]
        if "security-severity" in rule["properties"]
    ]
    assert len(shown) == len({item.rule.id for item in made.exposed})
    assert all(least <= number <= most for number in shown)
    assert (
        severity is not Severity.CRITICAL or min(shown) > 9.0
    )  # GitHub: over 9.0 is critical


def test_a_rule_has_the_severity_of_its_worst_finding():
    layers = [
        finding(f"hidden states of layer {n}", "text", Status.INEXACT, known=known)
        for n, known in ((1, 0.01), (2, 0.6))
    ]
    made = assess(replace(whole(), findings=tuple(layers), skips=()))
    rules = {rule["id"]: rule for rule in run_of(made)["tool"]["driver"]["rules"]}
    worst = max(item.score for item in made.items)
    assert min(item.score for item in made.items) < worst
    shown = rules["KH-TEXT-HIDDEN-STATES"]["properties"]["security-severity"]
    assert float(shown) == worst


def test_states_and_suppressions():
    results = by_exposure(run_of(judged(whole())))
    assert results["full scores"]["baselineState"] == "updated"  # it was kept
    assert results["signs"]["baselineState"] == "new"
    assert results["hidden states of layer 3"]["baselineState"] == "unchanged"
    assert results["the last token's vector"]["baselineState"] == "absent"
    (ignored,) = results["keys and values of layer 1"]["suppressions"]
    assert ignored["justification"] == "until 2999-01-01: it never leaves the cluster"
    assert all("baselineState" in result for result in results.values())
    assert "baselineState" not in json.dumps(run_of(assess(whole())))


def test_github_gets_what_needs_somebody_and_nothing_else():
    """GitHub takes every result for an open alert, whatever its kind, state or suppressions."""
    alerts = by_exposure(run_of(judged(whole()), sarif.render_alerts))
    assert {result["kind"] for result in alerts.values()} == {"fail", "open"}
    assert "hidden states of layer 3" in alerts
    assert "keys and values of layer 1" not in alerts  # ignored
    assert "the last token's vector" not in alerts  # gone
    assert "something else" in alerts  # nobody knows
    assert run_of(assess(clean()), sarif.render_alerts)["results"] == []


@pytest.mark.parametrize(
    "policy",
    [
        Policy(allow_unchecked=True),
        Policy(ignores=(Ignore("*", "accepted", date(2999, 1, 1)),)),
    ],
)
def test_a_check_without_a_result_that_a_policy_excuses_is_no_alert(policy):
    made = decided(assess(whole()), policy)
    skipped = by_exposure(run_of(made))["something else"]
    assert skipped["kind"] == "open"
    assert skipped["suppressions"][0]["status"] == "accepted"
    alerts = by_exposure(run_of(made, sarif.render_alerts))
    assert "something else" not in alerts
    assert "signs" not in alerts


def test_a_check_of_what_the_service_does_not_return_is_no_alert():
    missing = Skip(
        called("hidden states of layer 1"), "none", "no memory", unchecked=True
    )
    made = assess(replace(whole(), skips=(missing,)), returns=("labels",))
    alerts = by_exposure(run_of(made, sarif.render_alerts))
    assert "hidden states of layer 1" not in alerts
    ended = run_of(made)["invocations"][0]["toolExecutionNotifications"]
    assert [notice["message"]["text"] for notice in ended] == [
        "could not check signs, a model"
    ]


def test_how_it_ended():
    (ended,) = run_of(assess(whole()))["invocations"]
    assert (ended["exitCode"], ended["executionSuccessful"]) == (1, True)
    notices = [
        notice["message"]["text"] for notice in ended["toolExecutionNotifications"]
    ]
    assert notices == [
        "could not check signs, a model",
        "could not check something else",
    ]


def test_messages_make_no_links_and_hold_no_places():
    hostile = replace(
        FINDINGS[0], reason="see [this](https://evil.example) and {0} \\[x]"
    )
    made = assess(replace(whole(), findings=(hostile,)))
    text = by_exposure(run_of(made))["full scores"]["message"]["text"]
    assert "see \\[this\\](https://evil.example) and {{0}} \\\\\\[x\\]" in text
