"""Some exposures of a target, and what is said of the others."""

from __future__ import annotations

import pytest
from keyhole.assess.rules import RULES, rule_of_check

from keyhole.audit import Target, audit
from keyhole.audit.plan import checks_of
from keyhole.core.errors import InputError
from keyhole.core.exposure import rule_of
from keyhole.oracle import plant
from keyhole.oracle.target import demo


@pytest.fixture(scope="module")
def target() -> Target:
    return Target("two heads", {"a": plant(dim=4, seed=1), "b": plant(dim=4, seed=2)})


def test_one_rule_of_one_family(target):
    found = audit(target, only=["KH-WEIGHTS-SIGNS"])
    assert {finding.exposure for finding in found.findings} == {"signs"}
    assert [skip.exposure for skip in found.skips] == ["all but KH-WEIGHTS-SIGNS"]
    whole = {(f.surface, f.exposure): f for f in audit(target).findings}
    for finding in found.findings:
        assert finding.status is whole[finding.surface, finding.exposure].status
        assert finding.queries == whole[finding.surface, finding.exposure].queries


def test_a_family_that_the_target_does_not_have(target):
    found = audit(target, only=["text"])
    assert not found.findings
    assert found.exit_code == 3


def test_what_is_no_exposure_is_refused(target):
    with pytest.raises(InputError, match=r"weights, inputs, text, predictions.*got everything"):
        audit(target, only=["everything"])
    with pytest.raises(InputError, match="got KH-TEXT-DREAMS"):
        audit(target, only=["KH-TEXT-DREAMS"])


def test_a_check_falls_under_the_rule_of_its_findings():
    opened = Target("", demo())
    checks = checks_of(opened.surfaces, opened, 0, against_defences=False)
    named = {check.name.partition(": ")[2]: rule_of_check(check.name.partition(": ")[2])
             for check in checks}  # fmt: skip
    assert set(named.values()) <= set(RULES)
    found = audit(Target("", {"": plant(dim=4, seed=1)}))
    for finding in found.findings:
        same = [rule for name, rule in named.items() if f" from {finding.exposure}," in name]
        assert same, finding.exposure
        assert set(same) == {rule_of(finding)}


def test_a_journal_of_other_exposures_is_refused(target, tmp_path):
    journal = tmp_path / "journal"
    audit(target, only=["KH-WEIGHTS-SIGNS"], journal=journal)
    with pytest.raises(InputError, match="exposures"):
        audit(target, journal=journal)
