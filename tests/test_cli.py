"""The command line as a person meets it: real processes, exit codes, one line when it is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_classifiers
import tiny_models as tiny
from keyhole import invert, oracle
from keyhole.cli import app
from keyhole.results import Extraction

COMMANDS = sorted(
    [command.name or command.callback.__name__ for command in app.registered_commands]
    + [f"{group.name} {command.name}" for group in app.registered_groups
       for command in group.typer_instance.registered_commands]
)  # fmt: skip


def keyhole(
    *arguments: object, cwd: Path, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "keyhole", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture
def target(tmp_path) -> Path:
    path = tmp_path / "target.safetensors"
    oracle.save(oracle.plant(dim=8, rank=2, seed=1), path)
    return path


def test_extract_writes_json_to_stdout_and_words_to_stderr(target, tmp_path):
    arguments = ("--method", "single-head", "--json", "--out", "r.json")
    done = keyhole("extract", target, *arguments, cwd=tmp_path)
    assert done.returncode == 1  # something was given away
    assert json.loads(done.stdout)["queries"] == 72
    assert "recovered: worst error" in done.stderr
    result = Extraction.load(tmp_path / "r.json")
    assert torch.allclose(result.model.W, oracle.load(target).W, rtol=0, atol=1e-12)


def test_extract_with_each_method(target, tmp_path):
    low = keyhole("extract", target, "--method", "low-rank", "--json", cwd=tmp_path)
    assert json.loads(low.stdout)["floor"] == 8 + 2 * 2 * 8 - 4
    given = keyhole("extract", target, "--method", "low-rank", "--rank", 2, "--json", cwd=tmp_path)
    assert json.loads(given.stdout)["queries"] == 36
    convex = keyhole(
        "extract", target, "--method", "nuclear-norm", "--rank", 2, "--json", cwd=tmp_path
    )
    assert json.loads(convex.stdout)["queries"] == 8 + 5 * 2 * 8


METHODS = {
    "tolerant": ("head", {"dim": 4}, ["--answer-error", "1e-3"]),
    "sign-only": ("head", {"dim": 3}, []),
    "one-layer": ("one-layer", {"dim": 4, "width": 3}, []),
    "multi-head": ("multi-head", {"dim": 6, "heads": 2}, []),
    "full-output": ("attention", {"dim": 4}, []),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_and_auto_recover_their_kind(name, tmp_path):
    kind, sizes, options = METHODS[name]
    oracle.save(oracle.plant(kind, seed=2, **sizes), tmp_path / "t.safetensors")
    view = ("extract", "t.safetensors", "--json", "--method")
    done = keyhole(*view, name, *options, cwd=tmp_path)
    if name == "sign-only":  # a score is not a sign
        assert json.loads(done.stdout)["status"] == "not applicable"
        return
    assert json.loads(done.stdout)["status"] == "recovered", done.stderr
    found = json.loads(keyhole(*view, "auto", cwd=tmp_path).stdout)
    assert found["status"] == "recovered"
    assert ", since " in found["reason"]


def test_a_budget_is_a_result_and_the_ledger_resumes(target, tmp_path):
    arguments = ("--method", "single-head", "--ledger", "run.db", "--json")
    first = keyhole("extract", target, "--budget", 30, *arguments, cwd=tmp_path)
    assert first.returncode == 0
    assert json.loads(first.stdout)["status"] == "budget exhausted"
    assert "stopped after 30 queries" in first.stderr
    second = keyhole("extract", target, *arguments, cwd=tmp_path)
    assert second.returncode == 1
    assert json.loads(second.stdout)["remembered"] == 30


def test_audit_writes_a_page_and_report_makes_it_again(target, tmp_path):
    done = keyhole("audit", target, "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout) == json.loads((tmp_path / "keyhole-report.json").read_text())
    page = (tmp_path / "keyhole-report.html").read_text()
    again = keyhole("report", "keyhole-report.json", "--page", "again.html", cwd=tmp_path)
    assert again.returncode == 0
    assert (tmp_path / "again.html").read_text() == page


def test_a_clean_target_exits_with_zero(tmp_path):
    blind = oracle.Head(oracle.plant(dim=4).W, torch.zeros(4, dtype=torch.float64))
    oracle.save(blind, tmp_path / "t.safetensors")
    assert keyhole("audit", "t.safetensors", cwd=tmp_path).returncode == 0
    assert keyhole("extract", "t.safetensors", cwd=tmp_path).returncode == 0


def test_invert_reads_an_input_back_and_proves_it(tmp_path):
    planted = ("--kind", "inversion", "--dim", 4, "--tokens", 3, "--scale", 0.3)
    assert keyhole("plant", "p.safetensors", *planted, cwd=tmp_path).returncode == 0
    done = keyhole(
        "invert", "p.safetensors", "--starts", 32, "--certify", "--json", "--out", "f.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert data["status"] == "recovered"
    assert data["certificate"]["radius"] < 1e-9
    assert "proved: exactly one input with this output lies within" in done.stderr
    problem, secret = invert.plant(3, 4, scale=0.3)
    found = load_file(tmp_path / "f.safetensors")
    assert min(float((one - secret).abs().max()) for one in found["solutions"]) < 1e-8
    assert torch.allclose(problem.output(found["X"]), problem.B, rtol=0, atol=1e-10)


def test_invert_with_leaked_maps_is_closed_form(tmp_path):
    planted = ("--kind", "inversion", "--dim", 4, "--tokens", 4, "--scale", 0.3, "--maps")
    keyhole("plant", "p.safetensors", *planted, cwd=tmp_path)
    done = keyhole("invert", "p.safetensors", "--method", "closed-form", cwd=tmp_path)
    assert done.returncode == 1
    assert "the only input with this output and these maps" in done.stderr


def test_a_nan_in_a_problem_could_not_be_checked(tmp_path):
    problem, _ = invert.plant(3, 2)
    replace(problem, B=problem.B * torch.nan).save(tmp_path / "p.safetensors")
    done = keyhole("invert", "p.safetensors", "--json", cwd=tmp_path)
    assert done.returncode == 3
    assert json.loads(done.stdout)["reason"].startswith("expected finite numbers in B")


def test_ctrl_c_gives_the_best_input_so_far(tmp_path):
    problem, _ = invert.plant(12, 12, scale=2.0, seed=1)
    problem.save(tmp_path / "p.safetensors")
    process = subprocess.Popen(
        [sys.executable, "-m", "keyhole", "invert", "p.safetensors", "--starts", "100000",
         "--json", "--method", "levenberg-marquardt", "--out", "best.json"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "144 unknowns" in process.stderr.readline()
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    out, words = process.communicate(timeout=60)
    assert process.returncode == 130, words
    assert json.loads(out)["status"] == "interrupted"
    assert load_file(tmp_path / "best.safetensors")["X"].shape == (12, 12)
    assert "stopped; best residual" in words


WRONG = {
    "no such file": (["extract", "no.safetensors"], 2, "there is no such file"),
    "no target": (["extract", "text.txt"], 2, r"expected a \.safetensors file"),
    "nan in it": (["audit", "nan.safetensors"], 2, "expected finite entries in W"),
    "no such method": (["extract", "demo", "--method", "magic"], 2, "magic"),
    "no such command": (["frobnicate"], 2, "frobnicate"),
    "rank missing": (["extract", "demo", "--method", "nuclear-norm"], 2, "expected --rank"),
    "error missing": (["extract", "demo", "--method", "tolerant"], 2, "expected --answer-error"),
    "bad rank": (["plant", "x.safetensors", "--dim", "3", "--rank", "9"], 2, "expected a rank"),
    "bad budget": (["extract", "demo", "--budget", "-1"], 2, "expected a budget"),
    "not writable": (["plant", "no/x.safetensors"], 2, "expected a file to write"),
    "not a ledger": (["extract", "demo", "--ledger", "text.txt"], 2, "expected a Keyhole ledger"),
    "not an audit": (["report", "text.txt"], 2, "expected a JSON file"),
    "bad address": (["audit", "http://127.0.0.1:9/x"], 2, "expected http://host:port/v2/models"),
    "no problem": (["invert", "text.txt"], 2, r"expected a \.safetensors file"),
    "no W, V, B": (["invert", "small.safetensors"], 2, "expected tensors W, V and B"),
    "no maps": (
        ["invert", "p.safetensors", "--method", "closed-form"],
        2,
        "expected attention maps",
    ),
    "no starts": (["invert", "p.safetensors", "--starts", "0"], 2, "expected at least one start"),
    "out nowhere": (
        ["invert", "p.safetensors", "--out", "no/f.json"],
        2,
        "expected a file to write",
    ),
    "no such model": (["audit", "./nowhere/"], 2, r"expected a \.safetensors file"),
    "no weights": (["audit", "empty"], 2, "expected a folder with a config.json"),
    "data for an endpoint": (["audit", "small.safetensors", "--data", "text.txt"], 2, "--data"),
    "no texts": (["audit", "demo", "--data", "empty.txt"], 2, "expected texts in empty.txt"),
    "bad layers": (["audit", "demo", "--layers", "one"], 2, "expected layers such as 1,6,12"),
    "no exposure": (
        ["capture", "demo", "--text", "a", "--expose", "thoughts:1"],
        2,
        "among hidden",
    ),
    "no layer": (["capture", "demo", "--text", "a", "--expose", "hidden:9"], 2, "from 0 to 4"),
    "no text": (["capture", "demo", "--expose", "hidden:1"], 2, "expected --text or --data"),
    "bad precision": (
        ["capture", "demo", "--text", "a", "--expose", "hidden:1", "--precision", "int3"],
        2,
        "expected a precision among",
    ),
    "no leak": (["invert", "text", "demo", "text.txt"], 2, "expected a leak file"),
    "no leaks": (["invert", "text", "demo", "empty"], 2, "expected leaks .* in empty"),
    "another kind of file": (["invert", "text", "demo", "p.safetensors"], 2, "written by Keyhole"),
    "no head": (["disrupt", "headless", "--data", "dev.tsv"], 2, "expected a model with a head"),
    "labels too large": (["disrupt", "demo", "--data", "five.tsv"], 2, "labels from 0 to 1, got 5"),
    "no labels": (["harden", "demo", "--data", "text.txt", "--out", "o"], 2, "with a label"),
    "over another folder": (
        ["harden", "demo", "--data", "dev.tsv", "--out", "headless"],
        2,
        "expected a new folder",
    ),
    "page nowhere": (["audit", "small.safetensors", "--page", "no/p.html"], 2, "expected a file"),
}


@pytest.mark.parametrize(("arguments", "code", "words"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_clear_line(tmp_path, arguments, code, words):
    (tmp_path / "text.txt").write_text("hello, this is not what you are looking for" * 20)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na fine film\t1\nbad\t0\n")
    (tmp_path / "five.tsv").write_text("sentence\tlabel\na fine film\t5\n")
    if "headless" in arguments:
        tiny.save("bert", tmp_path / "headless")
    invert.plant(3, 2, symmetric=True)[0].save(tmp_path / "p.safetensors")
    eye = torch.eye(2, dtype=torch.float64)
    metadata = {"keyhole": "1", "kind": "head"}
    save_file(
        {"W": eye * torch.nan, "v": eye[0].clone()}, tmp_path / "nan.safetensors", metadata=metadata
    )
    save_file({"W": eye, "v": eye[0].clone()}, tmp_path / "small.safetensors", metadata=metadata)
    done = keyhole(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert re.search(words, done.stderr)
    if done.stderr.startswith("keyhole:"):
        assert done.stderr.count("\n") == 1


def test_a_server_that_is_not_there_is_a_failure(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = keyhole("extract", f"http://127.0.0.1:{port}/v2/models/m", cwd=tmp_path)
    assert done.returncode == 3
    assert re.fullmatch(r"keyhole: expected an answer from .*, got ConnectError.*\n", done.stderr)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example(command, tmp_path):
    done = keyhole(*command.split(), "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Example:" in done.stdout.rstrip().rsplit("\n\n", 1)[-1]


def classifier(folder: Path, count: int = 24) -> Path:
    """A small classifier with files to train it and to flip it."""
    name = folder / "my-classifier"
    tiny_classifiers.model(labels=2).save_pretrained(name)
    tiny.tokenizer().save_pretrained(name)
    for seed, file in enumerate(("train.tsv", "dev.tsv")):
        rows = [f"{one.text}\t{one.label}\n" for one in tiny_classifiers.examples(count, seed)]
        (folder / file).write_text("sentence\tlabel\n" + "".join(rows))
    return name


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "serve"])
def test_the_examples_run(command, tmp_path):
    tiny.save("bert", tmp_path / "my-model")  # the examples' own
    classifier(tmp_path)
    (tmp_path / "texts.txt").write_text("w1 w2 w3\nw4 w5 w6 w7\n")
    (tmp_path / "texts.tsv").write_text("sentence\tlabel\nw1 w2 w3\t0\nw4 w5\t1\n")
    text = keyhole(*command.split(), "--help", cwd=tmp_path).stdout
    lines = [shlex.split(line)[1:] for line in text.rsplit("Example:", 1)[1].strip().splitlines()]
    assert lines
    for arguments in lines:
        done = keyhole(*arguments, cwd=tmp_path)
        assert done.returncode in (0, 1), done.stderr


def test_version(tmp_path):
    assert keyhole("--version", cwd=tmp_path).stdout.strip() == importlib.metadata.version(
        "keyhole"
    )


def test_ctrl_c_leaves_a_ledger_that_resumes(tmp_path):
    oracle.save(oracle.plant(dim=192, seed=1), tmp_path / "big.safetensors")
    command = [sys.executable, "-m", "keyhole", "extract", "big.safetensors", "--ledger", "run.db"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    ledger = tmp_path / "run.db-wal"
    while time.monotonic() < deadline and not (ledger.exists() and ledger.stat().st_size > 1 << 18):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"stopped; [\d,]+ answers are in run.db: the same command resumes", words)
    assert "Traceback" not in words
    again = keyhole(*command[3:], "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["status"] == "recovered"
    assert json.loads(again.stdout)["remembered"] > 0
