"""The meaning of each status for all commands: exit codes and headlines."""

from __future__ import annotations

import importlib

import pytest

from exposures import called
from keyhole import invert, report
from keyhole.assess import assess
from keyhole.core import OUTCOMES, Audit, Finding, Outcome, Skip, Status, exit_code
from keyhole.disrupt.disruption import Control, Disruption
from keyhole.disrupt.disruption import Outcome as Flip
from keyhole.extract import Extraction
from keyhole.invert import Inversion
from keyhole.recover.recovery import TextRecovery
from keyhole.recover.run import LeakRead

CODES = {  # written down by hand: the code derives it
    Status.RECOVERED: 1,
    Status.WITHIN: 1,
    Status.INEXACT: 1,
    Status.EXPOSED: 1,
    Status.NOT_IDENTIFIABLE: 0,
    Status.UNSOLVED: 0,
    Status.BUDGET: 3,
    Status.UNVERIFIED: 3,
    Status.MISMATCH: 3,
    Status.NOT_APPLICABLE: 3,
    Status.SATURATED: 3,
    Status.ORACLE_FAILED: 3,
    Status.INTERRUPTED: 3,
}
HEADLINES = {0: {"none"}, 1: {"medium", "high", "critical"}, 3: {"unknown"}}


def test_every_status_has_an_outcome_and_advice():
    assert set(CODES) == set(Status) == set(OUTCOMES)
    assert all(status.advice for status in Status)


@pytest.mark.parametrize("status", Status)
def test_one_status_alone(status):
    assert exit_code([status]) == CODES[status]


def test_given_away_wins_and_unchecked_is_never_clean():
    assert exit_code([Status.UNSOLVED, Status.MISMATCH, Status.RECOVERED]) == 1
    assert exit_code([Status.UNSOLVED, Status.MISMATCH]) == 3
    assert exit_code([Status.UNSOLVED, Outcome.UNCHECKED]) == 3
    assert exit_code([Status.UNSOLVED, Status.NOT_IDENTIFIABLE]) == 0
    assert exit_code([]) == 3


def finding(status, **more):
    exposure = called("full scores")
    return Finding(
        exposure, "SingleHead", status, "why", "remedy", None, 1, 0.0, **more
    )


def audit_of(status):
    return Audit("target", "identity", (finding(status),))


def results_of(status):
    """What each command's function returns when it ends in a status."""
    ids = [1] if status is Status.RECOVERED else []
    return {
        "audit": audit_of(status),
        "extract": Extraction(status, "why", "method", None, 1, 0.0),
        "invert": Inversion(status, "why", "method", None, None, 1, 0.0),
        "recover": TextRecovery(status, "why", "method", ids, "", False, 1, 0.0),
    }


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("command", ["audit", "extract", "invert", "recover"])
def test_every_command_ends_with_the_code_of_its_status(
    command, status, tmp_path, monkeypatch, keyhole
):
    result = results_of(status)[command]
    arguments = "demo"
    if command == "invert":
        arguments = "problem.safetensors"
        invert.plant(2, 2)[0].save(tmp_path / arguments)
    if command == "recover":
        arguments = "demo leak.safetensors"
        (tmp_path / "leak.safetensors").write_bytes(b"")
        read = LeakRead(0, "leak", "digest", result)
        updates = importlib.import_module("keyhole.recover.gradients")
        monkeypatch.setattr(updates, "is_update", lambda _: False)

    def ended(*_, notify=lambda _: None, **__):
        notify(read if command == "recover" else None)
        return result

    name = "audit" if command == "audit" else "run"
    module = importlib.import_module(f"keyhole.{command}.run")
    monkeypatch.setattr(module, name, ended)
    done = keyhole(command, arguments)
    interrupted = command == "invert" and status is Status.INTERRUPTED
    assert done.returncode == (130 if interrupted else CODES[status]), done.stderr


@pytest.mark.parametrize("status", Status)
def test_the_page_says_what_the_exit_code_says(status):
    audit = audit_of(status)
    assert audit.exit_code == CODES[status]
    severity = assess(audit).severity
    sentence = assess(audit).verdict
    assert severity in HEADLINES[CODES[status]]
    assert ("Nothing was given away" in sentence) == (CODES[status] == 0)
    assert ("Could not check" in sentence) == (CODES[status] == 3)
    page = report.render(audit)
    assert f'<h1 class="verdict">{sentence}</h1>' in page
    assert f'<p class="counts"><span class="badge {severity}">{severity}</span>' in page


def test_what_could_not_be_checked_keeps_the_rest_from_being_clean():
    mixed = Audit("t", "i", (finding(Status.UNSOLVED), finding(Status.MISMATCH)))
    assert mixed.exit_code == 3
    assert "1 of 2 checks had no result" in assess(mixed).verdict
    assert "not a clean bill" in assess(mixed).verdict
    for unchecked, code in ((True, 3), (False, 0)):
        skip = Skip(called("signs"), "a", "r", unchecked=unchecked)
        skipped = Audit("t", "i", (finding(Status.UNSOLVED),), (skip,))
        assert skipped.exit_code == code


def test_a_control_is_no_exposure():
    control = finding(Status.RECOVERED, sought="prediction", known=1.0, control=True)
    audit = Audit("t", "i", (finding(Status.UNSOLVED), control))
    assert (audit.exposed, audit.exit_code, len(audit.attacks)) == (0, 0, 1)
    assert "the attack that was tried failed" in assess(audit).verdict
    assert Audit("t", "i", (control,)).exit_code == 3  # a control alone checks nothing


def flip(right, flipped, masked):
    return Flip("x", right, flipped, (0,), (1,), 1.0, 0.5, masked=masked, units=100)


@pytest.mark.parametrize(
    ("outcomes", "status", "obstacle"),
    [
        ([], Status.NOT_APPLICABLE, "no example has an outcome"),
        (
            [flip(False, False, 0)],
            Status.NOT_APPLICABLE,
            "the model gets none of 1 right",
        ),
        ([flip(True, False, 0)], Status.NOT_APPLICABLE, "the texts are too short"),
        ([flip(True, False, 3)], Status.UNSOLVED, ""),
        ([flip(True, True, 3), flip(True, False, 3)], Status.INEXACT, ""),
        ([flip(True, True, 3)], Status.RECOVERED, ""),
    ],
)
def test_flips_with_nothing_to_attack_could_not_be_checked(outcomes, status, obstacle):
    disruption = Disruption({}, tuple(outcomes), Control(0.0, 0.0, 0), 0.0)
    assert disruption.status is status
    assert disruption.obstacle.startswith(obstacle)
    assert bool(disruption.obstacle) == bool(obstacle)
    assert ("could not check" in disruption.summary()) == bool(obstacle)
