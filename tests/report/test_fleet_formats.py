"""A fleet in one file, with a run or an entry for each target, valid by the same schemas."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from keyhole.assess import assess, assess_fleet
from keyhole.core import Audit, Fleet, Skip, dump
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.report.fleet import FLEET_FORMATS
from published_schemas import sarif_errors
from sample_audits import clean, empty, judged, whole

HOSTILE = "<b>|`@all \x1b[2J \udcff"
UNOPENED = Audit(
    "gone",
    "",
    (),
    (Skip(Exposure(NOT_CHECKED, "target"), "none", "no such file", unchecked=True),),
)
FLEET = Fleet(
    {
        "a model": whole(),
        "a-model": replace(whole(), target="models/b"),
        "clean": clean(),
        HOSTILE: replace(clean(), target=HOSTILE),
        "gone": UNOPENED,
    },
    12.5,
)
PLAIN = assess_fleet(FLEET)
JUDGED = assess_fleet(
    FLEET, lambda name, audit: (judged if name == "a model" else assess)(audit)
)


@pytest.fixture(params=[PLAIN, JUDGED, assess_fleet(Fleet({"x": empty()}))])
def fleet(request):
    return request.param


def test_sarif_has_a_run_for_each_target(fleet):
    log = json.loads(FLEET_FORMATS["sarif"](fleet))
    assert sarif_errors(log) == []
    assert [run["properties"]["verdict"] for run in log["runs"]] == [
        assessment.verdict for assessment in fleet.targets.values()
    ]
    ids = [run["automationDetails"]["id"] for run in log["runs"]]
    assert len(set(ids)) == len(ids)  # GitHub takes two runs of one id for one
    codes = [run["invocations"][0]["exitCode"] for run in log["runs"]]
    assert codes == [assessment.exit_code for assessment in fleet.targets.values()]


def test_ids_of_runs_do_not_depend_on_the_other_targets_order():
    turned = Fleet(dict(reversed(FLEET.audits.items())), 12.5)
    first, second = (
        [
            run["automationDetails"]["id"]
            for run in json.loads(FLEET_FORMATS["sarif"](made))["runs"]
        ]
        for made in (PLAIN, assess_fleet(turned))
    )
    assert first == second[::-1]


def test_json_is_what_a_fleet_is_loaded_from(tmp_path, fleet):
    (tmp_path / "fleet.json").write_text(FLEET_FORMATS["json"](fleet), "utf-8")
    loaded = Fleet.load(tmp_path / "fleet.json")
    # Half of a surrogate pair is no character, and a character for private use stands for it.
    saved = dump(fleet.fleet.to_dict()).replace("\\udcff", "\\ue4ff")
    assert dump(loaded.to_dict()) == saved
    assessment = json.loads((tmp_path / "fleet.json").read_text("utf-8"))["assessment"]
    assert (assessment["verdict"], assessment["exit_code"]) == (
        fleet.verdict,
        fleet.exit_code,
    )
    assert set(assessment["targets"]) == set(fleet.targets)


def test_the_exit_code_is_that_of_the_worst():
    codes = {
        1: Fleet({"a": clean(), "b": whole(), "c": UNOPENED}),
        3: Fleet({"a": clean(), "c": UNOPENED}),
        0: Fleet({"a": clean()}),
    }
    for code, made in codes.items():
        assert assess_fleet(made).exit_code == code == made.exit_code
