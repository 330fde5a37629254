"""Rules refer to real entries of frameworks, the same in every format."""

from __future__ import annotations

import json
import re

import pytest

from keyhole.assess import assess
from keyhole.core import RULES
from keyhole.report import render, sarif
from sample_audits import whole

FORMS = {
    "owasp": r"LLM(0[1-9]|10):20(25|26)",
    "aisvs": r"v1\.0-C\d+\.\d+\.\d+",
    "atlas": r"AML\.T\d{4}(\.\d{3})?",
    "cwe": r"CWE-\d+",
}
# By hand, from the frameworks' own pages.
EXPECTED = {
    "KH-WEIGHTS-LAST-LAYER": {
        "LLM06:2026",
        "LLM10:2025",
        "v1.0-C11.2.2",
        "v1.0-C11.3.2",
        "AML.T0024.002",
        "CWE-200",
    },
    "KH-TEXT-EMBEDDING": {
        "LLM09:2026",
        "LLM08:2025",
        "LLM02:2026",
        "LLM02:2025",
        "v1.0-C8.2.1",
        "AML.T0024.001",
        "CWE-200",
    },
    "KH-TEXT-GRADIENT": {"LLM02:2026", "LLM02:2025", "CWE-200"},
    "KH-PREDICTIONS-CUTS": {"v1.0-C11.1.3", "v1.0-C11.1.4", "CWE-1039"},
}
ALL = {rule.id: rule.standards for rule in RULES}


def ids(rule):
    return {standard.id for standard in ALL[rule]}


@pytest.mark.parametrize("rule", EXPECTED)
def test_a_rule_names_the_entries_that_are_about_it(rule):
    assert ids(rule) == EXPECTED[rule]


def test_every_rule_that_has_a_name_of_its_own_has_standards_of_known_editions():
    for rule, standards in ALL.items():
        assert standards or rule.endswith("-OTHER"), rule
        assert len(set(standards)) == len(standards), rule
        for standard in standards:
            assert re.fullmatch(FORMS[standard.framework.key], standard.id), standard
            if standard.framework.key == "owasp":
                assert standard.id.endswith(standard.framework.version)


def test_sarif_has_them_as_tags():
    (run,) = json.loads(sarif.render(assess(whole())))["runs"]
    for rule in run["tool"]["driver"]["rules"]:
        tags = {tag.rpartition("/")[2].upper() for tag in rule["properties"]["tags"]}
        if rule["id"] != "KH-NOT-CHECKED":
            assert {name.upper() for name in ids(rule["id"])} <= tags


def test_the_page_shows_them():
    page = render(whole())
    assert "AML.T0024.001</abbr>" in page
    assert "OWASP Top 10 for LLM Applications 2025" in page
