"""The command line in real processes: exit codes, and errors of one line."""

from __future__ import annotations

import importlib.metadata
import json
import re
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command_line import KEYHOLE, finished, interrupted, started
from keyhole import invert, oracle
from keyhole.audit.run import Checking
from keyhole.core import Audit
from keyhole.core.journal import records_in
from keyhole.extract.extraction import Extraction


@pytest.fixture
def target(tmp_path) -> Path:
    path = tmp_path / "target.safetensors"
    oracle.save(oracle.plant(dim=8, rank=2, seed=1), path)
    return path


def test_extract_writes_json_to_stdout_and_a_line_about_it_to_stderr(
    target, tmp_path, keyhole
):
    done = keyhole(
        "extract target.safetensors --method single-head --json --out r.json"
    )
    assert done.returncode == 1  # something was given away
    assert json.loads(done.stdout)["queries"] == 72
    assert re.fullmatch(
        r"extract: (\d+) of \1 queries, the judge's included, .*\n", done.stderr
    )
    result = Extraction.load(tmp_path / "r.json")
    assert torch.allclose(result.model.W, oracle.load(target).W, rtol=0, atol=1e-12)


def test_extract_with_each_method(target, keyhole):
    low = keyhole("extract", target, "--method low-rank --json")
    assert json.loads(low.stdout)["lower_bound"] == 8 + 2 * 2 * 8 - 4
    given = keyhole("extract", target, "--method low-rank -o rank=2 --json")
    assert json.loads(given.stdout)["queries"] == 36
    convex = keyhole("extract", target, "--method nuclear-norm -o rank=2 --json")
    assert json.loads(convex.stdout)["queries"] == 8 + 6 * 2 * 8


METHODS = {
    "tolerant -o answer_error=1e-3": ("head", {"dim": 4}),
    "one-layer": ("one-layer", {"dim": 4, "width": 3}),
    "multi-head": ("multi-head", {"dim": 6, "heads": 2}),
    "full-output": ("attention", {"dim": 4}),
}


def test_a_score_is_not_a_sign(target, keyhole):
    done = keyhole("extract", target, "--json --method sign-only")
    assert json.loads(done.stdout)["status"] == "not applicable"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_auto_recover_their_kind(method, tmp_path, keyhole):
    kind, sizes = METHODS[method]
    oracle.save(oracle.plant(kind, seed=2, **sizes), tmp_path / "t.safetensors")
    view = "extract t.safetensors --json --method"
    done = keyhole(view, method)
    assert json.loads(done.stdout)["status"] == "recovered", done.stderr
    found = json.loads(keyhole(view, "auto").stdout)
    assert found["status"] == "recovered"
    assert ", since " in found["reason"]


def test_a_budget_is_a_result_and_the_ledger_resumes(target, keyhole):
    arguments = "--method single-head --ledger run.db --json"
    first = keyhole("extract", target, "--budget 30", arguments)
    assert first.returncode == 3  # what was not finished was not checked
    result = json.loads(first.stdout)
    assert result["status"] == "budget exhausted"
    assert "stopped after 30 queries" in result["reason"]
    second = keyhole("extract", target, arguments)
    assert second.returncode == 1
    assert json.loads(second.stdout)["remembered"] == 30


def test_audit_writes_a_page_and_report_makes_it_again(target, tmp_path, keyhole):
    done = keyhole("audit", target, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == json.loads(
        (tmp_path / "keyhole-target.safetensors.json").read_text()
    )
    page = (tmp_path / "keyhole-target.safetensors.html").read_text()
    again = keyhole("report keyhole-target.safetensors.json --output html=again.html")
    assert again.returncode == 0
    assert (tmp_path / "again.html").read_text() == page


def test_an_audit_that_was_stopped_goes_on_and_leaves_no_journal(
    target, tmp_path, keyhole, monkeypatch
):
    usual = Checking.take

    def stopping(checking, done):
        usual(checking, done)
        if checking.done == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checking, "take", stopping)
    assert keyhole("audit", target).returncode == 130
    monkeypatch.setattr(Checking, "take", usual)
    (journal,) = tmp_path.glob("*.journal")
    # another command: the journal is none of its own
    other = keyhole("audit", target, "--seed 1")
    assert other.returncode == 1
    assert not other.stderr.startswith("resuming")
    assert journal.exists()
    done = keyhole("audit", target)
    assert done.returncode == 1
    assert re.match(r"resuming: 3 of \d\d checks are done\n", done.stderr)
    assert not list(tmp_path.glob("*.journal"))


def test_what_a_target_did_not_answer_is_tried_again(
    target, tmp_path, keyhole, monkeypatch
):
    """A target that fails for a while: the findings say so, and other results are kept."""
    usual = oracle.Head.__call__

    def silent(head, sequences):
        raise ConnectionError("gone")

    monkeypatch.setattr(oracle.Head, "__call__", silent)
    done = keyhole("audit", target)
    assert done.returncode == 3
    assert "the same command repeats only those" in done.stderr.splitlines()[-1]
    monkeypatch.setattr(oracle.Head, "__call__", usual)
    again = keyhole("audit", target)
    assert again.returncode == 1
    assert again.stderr.startswith("resuming: ")
    assert not list(tmp_path.glob("*.journal"))


def test_a_clean_target_exits_with_zero(tmp_path, keyhole):
    blind = oracle.Head(oracle.plant(dim=4).W, torch.zeros(4, dtype=torch.float64))
    oracle.save(blind, tmp_path / "t.safetensors")
    assert keyhole("audit t.safetensors").returncode == 0
    assert keyhole("extract t.safetensors").returncode == 0


def test_invert_reads_an_input_back_and_proves_it(tmp_path, keyhole):
    planted = "--kind inversion -o dim=4 -o tokens=3 -o scale=0.3"
    assert keyhole("lab plant p.safetensors", planted).returncode == 0
    view = "invert p.safetensors -o starts=32 --certify"
    done = keyhole(view, "--json --out f.json")
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["status"] == "recovered"
    assert data["certificate"]["radius"] < 1e-9
    proved = "proved: exactly one input with this output lies within"
    assert proved in keyhole(view).stdout
    problem, secret = invert.plant(3, 4, scale=0.3)
    found = load_file(tmp_path / "f.safetensors")
    errors = (found["solutions"] - secret).abs().amax((-2, -1))
    assert errors.min() < 1e-8
    assert torch.allclose(problem.output(found["X"]), problem.B, rtol=0, atol=1e-10)


def test_invert_with_leaked_maps_is_closed_form(keyhole):
    planted = "--kind inversion -o dim=4 -o tokens=4 -o scale=0.3 -o maps=true"
    keyhole("lab plant p.safetensors", planted)
    done = keyhole("invert p.safetensors --method closed-form")
    assert done.returncode == 1
    assert "the only input with this output and these maps" in done.stdout


def test_a_nan_in_a_problem_is_wrong_input(tmp_path, keyhole):
    problem, _ = invert.plant(3, 2)
    replace(problem, B=problem.B * torch.nan).save(tmp_path / "p.safetensors")
    done = keyhole("invert p.safetensors --json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("keyhole: B holds 6 NaN")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_gives_the_best_input_so_far(tmp_path):
    problem, _ = invert.plant(12, 12, scale=2.0, seed=1)
    problem.save(tmp_path / "p.safetensors")

    def begun(process):
        assert "144 unknowns" in process.stderr.readline()
        time.sleep(0.7)  # some steps of the first starts
        return True

    view = "invert p.safetensors -o starts=100000 --method levenberg-marquardt"
    done = interrupted(f"{view} --json --out best.json", tmp_path, begun)
    assert done.returncode == 130, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "interrupted"
    assert result["reason"].startswith("stopped; best residual")
    assert load_file(tmp_path / "best.safetensors")["X"].shape == (12, 12)


def test_a_server_that_is_not_there_is_a_failure(keyhole, monkeypatch):
    waits = []
    monkeypatch.setattr("keyhole.oracle.http.time.sleep", waits.append)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = keyhole(f"extract http://127.0.0.1:{port}/v2/models/m")
    assert done.returncode == 3
    waits = [pause for pause in waits if pause]
    assert waits == sorted(waits)
    assert waits  # it was asked again, later and later
    assert re.fullmatch(r"keyhole: no answer from .*: ConnectError.*\n", done.stderr)


def test_version():
    done = finished([*KEYHOLE, "--version"])
    assert done.stdout.strip() == importlib.metadata.version("keyhole")


@pytest.mark.release
def test_three_targets_in_one_folder_and_one_is_killed(tmp_path, keyhole):
    """The journal of a killed command does not disturb other commands, and it resumes from it."""
    names = [f"{name}.safetensors" for name in "abc"]
    for seed, name in enumerate(names):
        oracle.save(oracle.plant(dim=16, seed=seed), tmp_path / name)
    with started([*KEYHOLE, "audit", names[0]], cwd=tmp_path) as process:
        end = time.monotonic() + 60
        while (
            not any(map(records_in, tmp_path.glob("*.journal")))
            and time.monotonic() < end
        ):
            time.sleep(0.02)
        process.kill()
    assert list(tmp_path.glob("*.journal"))
    for name in (names[1], names[2], names[0]):
        done = keyhole("audit", name)
        assert done.returncode == 1, done.stderr
        assert ("resuming" in done.stderr) is (name == names[0])
    identities = {
        Audit.load(tmp_path / f"keyhole-{name}.json").identity for name in names
    }
    assert len(identities) == 3
    assert not list(tmp_path.glob("*.journal"))
