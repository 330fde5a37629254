"""All formats of one assessment are valid by their official schemas, and agree."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from keyhole.assess import assess
from keyhole.report.formats import FORMATS
from published_schemas import audit_errors, junit_errors, sarif_errors
from sample_audits import ASSESSMENTS, whole


@pytest.fixture(params=ASSESSMENTS)
def assessment(request):
    return ASSESSMENTS[request.param]()


@pytest.mark.parametrize("name", ["sarif", "sarif-github"])
def test_sarif_is_valid_by_the_schema_of_oasis(assessment, name):
    assert sarif_errors(json.loads(FORMATS[name](assessment))) == []


def test_json_is_valid_by_the_published_schema(assessment):
    assert audit_errors(json.loads(FORMATS["json"](assessment))) == []


def test_junit_is_of_the_dialect_of_jenkins(assessment):
    assert junit_errors(ElementTree.fromstring(FORMATS["junit"](assessment))) == []


def test_markdown_has_a_verdict_and_fits(assessment):
    comment = FORMATS["markdown"](assessment)
    assert assessment.verdict in comment.splitlines()[0]
    assert len(comment) < 65_536


def test_all_formats_tell_the_same():
    assessment = ASSESSMENTS["judged"]()
    exposed = {item.id: item.severity.value for item in assessment.exposed}
    run = json.loads(FORMATS["sarif"](assessment))["runs"][0]
    failing = [result for result in run["results"] if result["kind"] == "fail"]
    present = [result for result in failing if result["baselineState"] != "absent"]
    assert {
        r["properties"]["id"]: r["properties"]["severity"] for r in present
    } == exposed
    saved = json.loads(FORMATS["json"](assessment))["assessment"]
    rows = {row["id"]: row["severity"] for row in saved["findings"]}
    assert {name: rows[name] for name in exposed} == exposed
    assert (
        saved["exit_code"]
        == run["invocations"][0]["exitCode"]
        == assessment.decision.exit_code
    )
    assert saved["verdict"] == run["properties"]["verdict"] == assessment.verdict


def test_the_same_audit_gives_the_same_files():
    for name, render in FORMATS.items():
        if name != "html":  # its figure has numbers of its own
            assert render(assess(whole())) == render(assess(whole())), name


def test_these_checks_can_fail():
    log = json.loads(FORMATS["sarif"](assess(whole())))
    log["runs"][0]["results"][0]["level"] = "catastrophe"
    assert sarif_errors(log)
    suites = ElementTree.fromstring(FORMATS["junit"](assess(whole())))
    suites[0].attrib["failures"] = "77"
    suites[0][0].attrib["severity"] = "high"
    assert len(junit_errors(suites)) == 2
