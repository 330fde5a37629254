"""Policies and baselines on the command line: exit codes, pages, explanations."""

from __future__ import annotations

import json

import pytest

from command_line import inside

POLICY = """
targets = ["head.safetensors"]
fail-on = ["weights"]
[environment.laboratory]
fail-on = []
"""


@pytest.fixture
def keyhole(tmp_path, monkeypatch, capsys):
    def run(*words):
        ended = inside(*words, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
        return ended.returncode, ended.stdout + ended.stderr

    return run


@pytest.fixture
def planted(tmp_path, monkeypatch, keyhole):
    monkeypatch.delenv("KEYHOLE_ENVIRONMENT", raising=False)
    assert keyhole("lab", "plant", "head.safetensors", "-o", "dim=4")[0] == 0
    (tmp_path / "keyhole.toml").write_text(POLICY)
    return tmp_path


def test_a_policy_names_the_target_and_what_fails(planted, keyhole):
    code, words = keyhole("audit", "--only", "KH-WEIGHTS-SCORES")
    assert code == 1
    assert "fail-on weights" in " ".join(words.split())
    saved = json.loads((planted / "keyhole-head.safetensors.json").read_text())
    assert saved["assessment"]["decision"]["exit_code"] == 1
    assert {f["exposure"]["variant"] for f in saved["findings"]} >= {"full", "budget"}
    assert not any("SIGNS" in f["exposure"]["rule"] for f in saved["findings"])
    assert "fail-on weights" in (planted / "keyhole-head.safetensors.html").read_text()
    only = ("--only", "KH-WEIGHTS-SCORES", "--environment", "laboratory")
    code, words = keyhole("audit", *only, "--force")
    assert code == 0
    code, words = keyhole("policy", "keyhole-head.safetensors.json", "--json")
    assert code == 1
    rulings = json.loads(words)["rulings"]
    assert {ruling["ruling"] for ruling in rulings} == {"fails", "passes"}
    code, _ = keyhole(
        "policy", "keyhole-head.safetensors.json", "--environment", "laboratory"
    )
    assert code == 0


def test_what_the_service_does_not_return_does_not_fail(planted, keyhole):
    """The head gives scores, but the service in front of it only labels."""
    (planted / "keyhole.toml").write_text(
        'returns = ["labels"]\nallow-unchecked = true\n'
    )
    scores = ("audit", "head.safetensors", "--only", "KH-WEIGHTS-SCORES")
    code, words = keyhole(*scores)
    assert code == 0, words
    assert "Hypothetical: not returned, where labels are" in words
    assert "Assumed" not in words
    assert keyhole(*scores, "--returns", "labels,scores")[0] == 1
    code, words = keyhole(
        "policy", "keyhole-head.safetensors.json"
    )  # as the policy says
    assert code == 0, words
    (planted / "keyhole.toml").unlink()
    code, words = keyhole(*scores)
    assert code == 1
    assert "Assumed that your service returns all that was looked at: scores." in words
    assert keyhole(*scores, "--returns", "nothing")[0] == 2


def test_what_a_baseline_has_does_not_fail(planted, keyhole):
    (planted / "keyhole.toml").unlink()
    only = ("--only", "KH-WEIGHTS-SCORES")
    assert (
        keyhole("audit", "head.safetensors", *only, "--output", "json=old.json")[0] == 1
    )
    judged = ("head.safetensors", "--baseline", "old.json", "--force")
    code, words = keyhole("audit", *judged, *only, "--output", "sarif=new.sarif")
    assert code == 0, words
    assert "in the baseline already" in " ".join(words.split())
    (run,) = json.loads((planted / "new.sarif").read_text())["runs"]
    states = {
        result["baselineState"]
        for result in run["results"]
        if "baselineState" in result
    }
    assert states == {"unchanged"}
    code, words = keyhole("audit", *judged)  # more than the baseline knows
    assert code == 1
    assert "new" in words
    code, words = keyhole(
        "policy", "old.json", "--baseline", "keyhole-head.safetensors.json"
    )
    assert code == 0
    assert "not tried, as before: weights-signs" in words
    assert "gone" not in words


@pytest.mark.parametrize(
    "words",
    [
        (
            "--baseline=keyhole-head.safetensors.json",
        ),  # the findings go there by default
        ("--baseline=./link.json",),
        ("--baseline=keyhole-head.safetensors.json", "--output=json=link.json"),
        ("--baseline=old.json", "--output=html=../{}/old.json", "--force"),
    ],
)
def test_a_run_never_replaces_its_own_baseline(planted, keyhole, words):
    (planted / "keyhole.toml").unlink()
    scores = ("audit", "head.safetensors", "--only", "KH-WEIGHTS-SCORES")
    assert keyhole(*scores)[0] == 1
    findings = planted / "keyhole-head.safetensors.json"
    (planted / "old.json").write_bytes(findings.read_bytes())
    (planted / "link.json").symlink_to(findings)
    before = {path.name: path.read_bytes() for path in planted.iterdir()}
    code, output = keyhole(*scores, *(word.format(planted.name) for word in words))
    assert code == 2
    assert "copy the baseline" in " ".join(output.split())
    assert {path.name: path.read_bytes() for path in planted.iterdir()} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "missing.toml"), "a policy"),
        (("--environment", "nowhere"), "no environment nowhere"),
        (("--baseline", "missing.json"), "a JSON file"),
        (("--only", "everything"), "families"),
    ],
)
def test_wrong_input_is_one_line_before_any_work(planted, keyhole, words, message):
    code, output = keyhole("audit", "head.safetensors", *words)
    assert code == 2
    assert message in " ".join(output.split())
    assert not (planted / "keyhole-head.safetensors.json").exists()


def test_an_audit_of_nothing_says_what_it_wants(planted, keyhole):
    (planted / "keyhole.toml").write_text("fail-on = []\n")
    code, output = keyhole("audit")
    assert code == 2
    assert "TARGET" in output


def test_several_targets_of_a_policy_are_a_fleet(planted, keyhole):
    assert (
        keyhole("lab", "plant", "other.safetensors", "-o", "dim=4", "--seed", "2")[0]
        == 0
    )
    several = POLICY.replace(
        '"head.safetensors"', '"head.safetensors", "other.safetensors"'
    )
    (planted / "keyhole.toml").write_text(several)
    scores = ("--only", "KH-WEIGHTS-SCORES")
    assert keyhole("audit", *scores)[0] == 1
    pages = {path.name for path in (planted / "keyhole-fleet").iterdir()}
    assert "index.html" in pages
    assert len([name for name in pages if name.endswith(".json")]) == 2
    again = ("--environment", "laboratory", "--force")
    assert keyhole("audit", *scores, *again)[0] == 0
