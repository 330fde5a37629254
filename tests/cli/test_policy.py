"""Policies and baselines on the command line: exit codes, pages, explanations."""

from __future__ import annotations

import json

import pytest

POLICY = """
targets = ["head.safetensors"]
fail-on = ["weights"]
[environment.laboratory]
fail-on = []
"""


SCORES = "audit head.safetensors --only KH-WEIGHTS-SCORES"
SAVED = "keyhole-head.safetensors.json"


@pytest.fixture
def keyhole(keyhole):
    def run(*words):
        ended = keyhole(*words)
        return ended.returncode, ended.stdout + ended.stderr

    return run


@pytest.fixture
def planted(tmp_path, monkeypatch, keyhole):
    monkeypatch.delenv("KEYHOLE_ENVIRONMENT", raising=False)
    assert keyhole("lab plant head.safetensors -o dim=4")[0] == 0
    (tmp_path / "keyhole.toml").write_text(POLICY)
    return tmp_path


def test_a_policy_names_the_target_and_what_fails(planted, keyhole):
    code, words = keyhole("audit --only KH-WEIGHTS-SCORES")
    assert code == 1
    assert "fail-on weights" in " ".join(words.split())
    saved = json.loads((planted / SAVED).read_text())
    assert saved["assessment"]["decision"]["exit_code"] == 1
    assert {f["exposure"]["variant"] for f in saved["findings"]} >= {"full", "budget"}
    assert not any("SIGNS" in f["exposure"]["rule"] for f in saved["findings"])
    assert "fail-on weights" in (planted / "keyhole-head.safetensors.html").read_text()
    laboratory = "--environment laboratory"
    again = "audit --only KH-WEIGHTS-SCORES --force"
    assert keyhole(again, laboratory)[0] == 0
    code, words = keyhole("policy", SAVED, "--json")
    assert code == 1
    rulings = json.loads(words)["rulings"]
    assert {ruling["ruling"] for ruling in rulings} == {"fails", "passes"}
    assert keyhole("policy", SAVED, laboratory)[0] == 0


def test_what_the_service_does_not_return_does_not_fail(planted, keyhole):
    """The head gives scores, but the service in front of it only labels."""
    policy = 'returns = ["labels"]\nallow-unchecked = true\n'
    (planted / "keyhole.toml").write_text(policy)
    code, words = keyhole(SCORES)
    assert code == 0, words
    assert "Hypothetical: not returned, where labels are" in words
    assert "Assumed" not in words
    assert keyhole(SCORES, "--returns labels,scores")[0] == 1
    code, words = keyhole("policy", SAVED)  # as the policy says
    assert code == 0, words
    (planted / "keyhole.toml").unlink()
    code, words = keyhole(SCORES)
    assert code == 1
    assert "Assumed that your service returns all that was looked at: scores." in words
    assert keyhole(SCORES, "--returns nothing")[0] == 2


def test_what_a_baseline_has_does_not_fail(planted, keyhole):
    (planted / "keyhole.toml").unlink()
    assert keyhole(SCORES, "--output json=old.json")[0] == 1
    judged = "--baseline old.json --force"
    code, words = keyhole(SCORES, judged, "--output sarif=new.sarif")
    assert code == 0, words
    assert "in the baseline already" in " ".join(words.split())
    (run,) = json.loads((planted / "new.sarif").read_text())["runs"]
    states = {result.get("baselineState") for result in run["results"]}
    assert states - {None} == {"unchanged"}
    # more than the baseline knows
    code, words = keyhole("audit head.safetensors", judged)
    assert code == 1
    assert "new" in words
    code, words = keyhole("policy old.json --baseline", SAVED)
    assert code == 0
    assert "not tried, as before: weights-signs" in words
    assert "gone" not in words


@pytest.mark.parametrize(
    "words",
    [
        "--baseline=keyhole-head.safetensors.json",  # the findings go there by default
        "--baseline=./link.json",
        "--baseline=keyhole-head.safetensors.json --output=json=link.json",
        "--baseline=old.json --output=html=../{}/old.json --force",
    ],
)
def test_a_run_never_replaces_its_own_baseline(planted, keyhole, words):
    (planted / "keyhole.toml").unlink()
    assert keyhole(SCORES)[0] == 1
    findings = planted / SAVED
    (planted / "old.json").write_bytes(findings.read_bytes())
    (planted / "link.json").symlink_to(findings)
    before = {path.name: path.read_bytes() for path in planted.iterdir()}
    code, output = keyhole(SCORES, words.format(planted.name))
    assert code == 2
    assert "copy the baseline" in " ".join(output.split())
    assert {path.name: path.read_bytes() for path in planted.iterdir()} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policy missing.toml", "a policy"),
        ("--environment nowhere", "no environment nowhere"),
        ("--baseline missing.json", "a JSON file"),
        ("--only everything", "families"),
    ],
)
def test_wrong_input_is_one_line_before_any_work(planted, keyhole, words, message):
    code, output = keyhole("audit head.safetensors", words)
    assert code == 2
    assert message in " ".join(output.split())
    assert not (planted / SAVED).exists()


def test_an_audit_of_nothing_says_what_it_wants(planted, keyhole):
    (planted / "keyhole.toml").write_text("fail-on = []\n")
    code, output = keyhole("audit")
    assert code == 2
    assert "TARGET" in output


def test_several_targets_of_a_policy_are_a_fleet(planted, keyhole):
    assert keyhole("lab plant other.safetensors -o dim=4 --seed 2")[0] == 0
    several = POLICY.replace(
        '"head.safetensors"', '"head.safetensors", "other.safetensors"'
    )
    (planted / "keyhole.toml").write_text(several)
    audit = "audit --only KH-WEIGHTS-SCORES"
    assert keyhole(audit)[0] == 1
    pages = {path.name for path in (planted / "keyhole-fleet").iterdir()}
    assert "index.html" in pages
    assert sum(name.endswith(".json") for name in pages) == 2
    assert keyhole(audit, "--environment laboratory --force")[0] == 0
