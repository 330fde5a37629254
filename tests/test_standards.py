"""Rules refer to real entries of frameworks, the same in every format."""

from __future__ import annotations

import json
import re

import pytest

from keyhole.assess import assess, decided, read_policy
from keyhole.core import RULES
from keyhole.core.errors import InputError
from keyhole.core.standards import FRAMEWORKS
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
            assert standard.framework in FRAMEWORKS
            assert re.fullmatch(FORMS[standard.framework.key], standard.id), standard
            if standard.framework.key == "owasp":
                assert standard.id.endswith(standard.framework.version)


def test_sarif_has_them_as_taxonomies_relationships_and_tags():
    (run,) = json.loads(sarif.render(assess(whole())))["runs"]
    taxonomies = run["taxonomies"]
    supported = run["tool"]["driver"]["supportedTaxonomies"]
    assert [(taxonomy["name"], taxonomy["index"]) for taxonomy in supported] == [
        (taxonomy["name"], place) for place, taxonomy in enumerate(taxonomies)
    ]
    for rule in run["tool"]["driver"]["rules"]:
        named = set()
        for relation in rule["relationships"]:
            target = relation["target"]
            taxonomy = taxonomies[target["toolComponent"]["index"]]
            assert taxonomy["name"] == target["toolComponent"]["name"]
            assert target["id"] in {taxon["id"] for taxon in taxonomy["taxa"]}
            named.add(target["id"])
        tags = {tag.rpartition("/")[2].upper() for tag in rule["properties"]["tags"]}
        assert named == (set() if rule["id"] == "KH-NOT-CHECKED" else ids(rule["id"]))
        assert {name.upper() for name in named} <= tags


def test_the_page_shows_them():
    page = render(whole())
    assert "AML.T0024.001</abbr>" in page
    assert "OWASP Top 10 for LLM Applications 2025" in page


def judge(tmp_path, text):
    path = tmp_path / "keyhole.toml"
    path.write_text(text)
    policy = read_policy(path)
    return decided(assess(whole(), policy.severity), policy)


@pytest.mark.parametrize(
    ("entry", "failing"),
    [
        ('owasp = "LLM08:2025"', {"KH-TEXT-EMBEDDING"}),
        ('atlas = "AML.T0024.002"', {"KH-WEIGHTS-SCORES"}),
        ('cwe = ["CWE-1039", "CWE-312"]', {"KH-PREDICTIONS-CUTS"}),
        ('aisvs = "v1.0-C8.2.1"', {"KH-TEXT-EMBEDDING"}),
        (
            'owasp = "LLM02"',  # the same in both editions
            {
                "KH-TEXT-EMBEDDING",
                "KH-TEXT-HIDDEN-STATES",
                "KH-TEXT-KEYS-AND-VALUES",
                "KH-INPUTS-LAYER-OUTPUT",
            },
        ),
    ],
)
def test_a_policy_fails_by_an_entry_of_a_framework(tmp_path, entry, failing):
    assessment = judge(tmp_path, f"fail-on = []\n[[rule]]\n{entry}\nfail = true\n")
    failed = {
        ruled.finding
        for ruled in assessment.decision.rulings
        if ruled.ruling == "fails"
    }
    assert {item.rule.id for item in assessment.items if item.id in failed} == failing


def test_a_policy_rates_by_an_entry_and_by_a_rule_first(tmp_path):
    given = (
        '[severity]\nKH-TEXT-EMBEDDING = "low"\n[[rule]]\nowasp = "LLM02"\nseverity = '
        '"medium"\n'
    )
    severities = {item.rule.id: item.severity for item in judge(tmp_path, given).items}
    assert severities["KH-TEXT-EMBEDDING"] == "low"
    assert severities["KH-TEXT-HIDDEN-STATES"] == "medium"
    assert severities["KH-WEIGHTS-SCORES"] == "critical"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (
            'owasp = "LLM08"\nfail = true',
            "no rule is about owasp LLM08: choose among LLM02:2025",
        ),
        ('owasp = "LLM99:2025"\nfail = true', "no rule is about owasp LLM99:2025"),
        ('iso = "27001"\nfail = true', "must have one of owasp, aisvs, atlas, cwe"),
        ('owasp = "LLM02"', "and severity or fail"),
        ('owasp = "LLM02"\nfail = false', "can only be true"),
        ('owasp = "LLM02"\nseverity = "worst"', "must be one of"),
    ],
)
def test_what_no_framework_has_is_refused(tmp_path, entry, why):
    with pytest.raises(InputError, match=re.escape(why)):
        judge(tmp_path, f"[[rule]]\n{entry}\n")
