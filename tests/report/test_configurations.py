"""SARIF and JSON of check-config are valid and agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keyhole.configs import Checked, Finding, Level, Unread, check
from keyhole.configs.registry import RULES
from keyhole.report.configurations import CONFIG_FORMATS
from keyhole.report.sarif import in_file
from published_schemas import sarif_errors

HOSTILE = "x\x1b[2J|`</details>](http://x) {0} \udcff @all"
RULE = next(rule for rule in RULES.values() if rule.level is Level.HIGH)
LOW = next(rule for rule in RULES.values() if rule.level is Level.LOW)
CHECKED = {
    "open": Checked(
        (
            Finding(RULE, 12, "--slots", "deploy/a b.yml"),
            Finding(RULE, 14, "--slots", "deploy/a b.yml"),
            Finding(LOW, 3, "--metrics", "run.sh"),
        ),
        (Unread("broken.json", "no JSON"),),
        4,
        ("KH-CONFIG-VLLM-OPEN",),
    ),
    "low": Checked((Finding(LOW, 3, "--metrics", "run.sh"),), (), 2),
    "unread": Checked((), (Unread("broken.json", "no JSON"),), 1),
    "clean": Checked((), (), 3),
    "hostile": Checked(
        (Finding(RULE, 1, HOSTILE, HOSTILE),), (Unread(HOSTILE, HOSTILE),), 2
    ),
}
CODES = {"open": 1, "low": 0, "unread": 3, "clean": 0, "hostile": 1}


def rendered(name: str, checked: Checked, least: Level = Level.MEDIUM) -> str:
    return CONFIG_FORMATS[name](checked, least)


@pytest.fixture(params=CHECKED)
def checked(request):
    return CHECKED[request.param]


@pytest.mark.parametrize("name", ["sarif", "sarif-github"])
def test_sarif_is_valid_by_the_schema_of_oasis(checked, name):
    log = json.loads(rendered(name, checked))
    assert sarif_errors(log) == []
    (run,) = log["runs"]
    for result in run["results"]:
        assert (
            run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"]
            == result["ruleId"]
        )
    prints = [json.dumps(result["partialFingerprints"]) for result in run["results"]]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("name", CHECKED)
def test_all_formats_tell_the_same(name):
    checked = CHECKED[name]
    (run,) = json.loads(rendered("sarif", checked))["runs"]
    assert run["invocations"][0]["exitCode"] == CODES[name]
    assert json.loads(rendered("json", checked))["exit_code"] == CODES[name]
    assert len(run["results"]) == len(checked.findings) + len(checked.unread)


def test_a_result_stands_at_its_line():
    (run,) = json.loads(rendered("sarif", CHECKED["open"]))["runs"]
    first, second, low, unread = run["results"]
    where = first["locations"][0]["physicalLocation"]
    assert where["artifactLocation"]["uri"] == "deploy/a%20b.yml"
    assert where["region"] == {"startLine": 12}
    assert second["locations"][0]["physicalLocation"]["region"] == {"startLine": 14}
    assert (first["level"], low["level"]) == ("error", "note")
    assert (unread["kind"], unread["ruleId"]) == ("open", "KH-NOT-CHECKED")
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert rules[RULE.id]["properties"]["security-severity"] == "7.0"
    assert RULE.fix in first["message"]["text"]


def test_fingerprints_stay_where_lines_move():
    moved = Checked((Finding(LOW, 33, "--metrics", "run.sh"),), (), 2)
    logs = [json.loads(rendered("sarif", made)) for made in (CHECKED["low"], moved)]
    first, second = (
        log["runs"][0]["results"][0]["partialFingerprints"] for log in logs
    )
    assert first == second


def test_what_a_file_says_does_nothing_elsewhere():
    message = json.loads(rendered("sarif", CHECKED["hostile"]))["runs"][0]["results"][
        0
    ]["message"]
    assert "\\](http" in message["text"]
    assert "{{0}}" in message["text"]


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("deploy/run.sh", "deploy/run.sh"),
        ("./deploy//run.sh", "deploy/run.sh"),
        ("a/../b.yml", "b.yml"),
        ("..hidden.yml", "..hidden.yml"),
        ("a b#1.yml", "a%20b%231.yml"),
        ("ü.yml", "%C3%BC.yml"),
        ("/etc/x y.yml", "file:///etc/x%20y.yml"),
    ],
)
def test_files_by_their_place_in_the_folder(path, uri):
    assert in_file(path, 2)["physicalLocation"]["artifactLocation"]["uri"] == uri


def test_files_above_this_folder_by_their_whole_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = in_file("../x.yml", 1)["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == (tmp_path.parent / "x.yml").as_uri()


def test_every_example_is_valid(root):
    """The results of all rules on real files: locations, names and messages."""
    checked = check([Path(root / "tests/configs/examples")])
    assert len({finding.rule.id for finding in checked.findings}) > 20
    assert sarif_errors(json.loads(rendered("sarif", checked))) == []
