"""Some exposures of a target, and what is said of the others."""

from __future__ import annotations

import pytest

from exposures import names
from keyhole.audit import audit
from keyhole.core.errors import InputError
from keyhole.oracle import plant


@pytest.fixture(scope="module")
def target():
    return {"a": plant(dim=4, seed=1), "b": plant(dim=4, seed=2)}


def test_one_rule_of_one_family(target):
    found = audit(target, only=["KH-WEIGHTS-SIGNS"])
    assert set(names(found.findings)) == {"signs"}
    assert names(found.skips) == ["all but KH-WEIGHTS-SIGNS"]
    whole = {finding.exposure: finding for finding in audit(target).findings}
    for finding in found.findings:
        assert finding.status is whole[finding.exposure].status
        assert finding.queries == whole[finding.exposure].queries


def test_a_family_that_the_target_does_not_have(target):
    found = audit(target, only=["text"])
    assert not found.findings
    assert found.exit_code == 3


def test_what_is_no_exposure_is_refused(target):
    with pytest.raises(
        InputError, match=r"weights, inputs, text, predictions.*got everything"
    ):
        audit(target, only=["everything"])
    with pytest.raises(InputError, match="got KH-TEXT-DREAMS"):
        audit(target, only=["KH-TEXT-DREAMS"])


def test_a_journal_of_other_exposures_is_refused(target, tmp_path):
    journal = tmp_path / "journal"
    audit(target, only=["KH-WEIGHTS-SIGNS"], journal=journal)
    with pytest.raises(InputError, match="exposures"):
        audit(target, journal=journal)
