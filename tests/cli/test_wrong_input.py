"""Every mistake on the command line ends with one clear line."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

import tiny_models as tiny
from command_line import inside
from keyhole import invert

WRONG = {
    "no such file": (["extract", "no.safetensors"], 2, "there is no such file"),
    "no target": (["extract", "text.txt"], 2, "as a .safetensors file"),
    "nan in it": (["audit", "nan.safetensors"], 2, "W holds NaN or infinity"),
    "no such method": (
        ["extract", "demo", "--method", "magic"],
        2,
        "there is no method 'magic': choose among auto",
    ),
    "no such command": (["frobnicate"], 2, "No such command .frobnicate."),
    "a slip of the finger": (
        ["audti", "demo"],
        2,
        "No such command .audti.. Did you mean .audit.?",
    ),
    "no such option": (
        ["audit", "demo", "--outputs", "x"],
        2,
        "^keyhole: No such option: --outputs .*See 'keyhole audit --help'.$",
    ),
    "no number": (
        ["audit", "demo", "--seed", "x"],
        2,
        "^keyhole: Invalid value for '--seed'",
    ),
    "rank missing": (
        ["extract", "demo", "--method", "nuclear-norm"],
        2,
        "nuclear-norm needs its rank: give -o rank=VALUE",
    ),
    "error missing": (
        ["extract", "demo", "--method", "tolerant"],
        2,
        "tolerant needs its answer_error",
    ),
    "bad rank": (
        ["lab", "plant", "x.safetensors", "-o", "dim=3", "-o", "rank=9"],
        2,
        "rank must be from 1 to dim = 3, not 9",
    ),
    "bad budget": (
        ["extract", "demo", "--budget", "-1"],
        2,
        "budget must be 0 or more, not -1",
    ),
    "not writable": (["lab", "plant", "no/x.safetensors"], 2, "cannot write"),
    "not a ledger": (
        ["extract", "demo", "--ledger", "text.txt"],
        2,
        "as a Keyhole ledger",
    ),
    "not an audit": (["report", "text.txt"], 2, "is not a JSON file"),
    "bad address": (
        ["audit", "http://127.0.0.1:9/x"],
        2,
        "must have the form http://host:port/v2/models",
    ),
    "no problem": (["invert", "text.txt"], 2, "as a .safetensors file"),
    "no W, V, B": (["invert", "small.safetensors"], 2, "must hold tensors W, V and B"),
    "no maps": (
        ["invert", "p.safetensors", "--method", "closed-form"],
        2,
        "needs the attention maps",
    ),
    "no starts": (
        ["invert", "p.safetensors", "-o", "starts=0"],
        2,
        "starts must be 1 or more",
    ),
    "out nowhere": (
        ["invert", "p.safetensors", "--out", "no/f.json"],
        2,
        "cannot write",
    ),
    "no such model": (["audit", "./nowhere/"], 2, "there is no"),
    "nothing of that name": (["audit", "./missing-model"], 2, "there is no .*: give"),
    "no weights": (["audit", "empty"], 2, "it has no config.json"),
    "data for an endpoint": (
        ["audit", "small.safetensors", "--data", "text.txt"],
        2,
        "--data does not apply to the endpoint",
    ),
    "a ledger for a model": (
        ["audit", "empty", "--ledger", "run.db"],
        2,
        "--ledger keeps the answers of an endpoint, and empty is a model: leave",
    ),
    "no texts": (
        ["audit", "demo", "--data", "empty.txt"],
        2,
        "there are no texts in empty.txt",
    ),
    "bad layers": (["audit", "demo", "--layers", "one"], 2, "--layers takes numbers"),
    "no exposure": (
        ["lab", "capture", "demo", "--text", "a", "--expose", "thoughts:1"],
        2,
        "one of hidden",
    ),
    "no layer": (
        ["lab", "capture", "demo", "--text", "a", "--expose", "hidden:9"],
        2,
        "from 0 to 4",
    ),
    "no text": (
        ["lab", "capture", "demo", "--expose", "hidden:1"],
        2,
        "give texts with --text or --data",
    ),
    "nothing in the text": (
        ["lab", "capture", "demo", "--text", " ", "--expose", "hidden:1"],
        2,
        "a text must have at least one token: ' '",
    ),
    "bad precision": (
        [
            "lab",
            "capture",
            "demo",
            "--text",
            "a",
            "--expose",
            "hidden:1",
            "--precision",
            "int3",
        ],
        2,
        "precision .*float32",
    ),
    "no leak": (["recover", "demo", "text.txt"], 2, "text.txt is not a leak file"),
    "no leaks": (["recover", "demo", "empty"], 2, "empty holds no leaks"),
    "another kind of file": (
        ["recover", "demo", "p.safetensors"],
        2,
        "written by Keyhole",
    ),
    "no head": (
        ["disrupt", "headless", "--data", "dev.tsv"],
        2,
        "has no head for a task",
    ),
    "processes": (
        ["disrupt", "demo", "--processes", "-1"],
        2,
        "^keyhole: --processes must be 0 ",
    ),
    "labels too large": (
        ["disrupt", "demo", "--data", "five.tsv"],
        2,
        "be from 0 to 1 .*got 5",
    ),
    "no labels": (
        ["harden", "demo", "--data", "text.txt", "--out", "o"],
        2,
        "with a label",
    ),
    "over another folder": (
        ["harden", "demo", "--data", "dev.tsv", "--out", "headless"],
        2,
        "choose a new folder",
    ),
    "page nowhere": (
        ["audit", "small.safetensors", "--output", "html=no/p.html"],
        2,
        "cannot write no/p.html",
    ),
}


@pytest.mark.parametrize(("arguments", "code", "words"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_clear_line(
    tmp_path, monkeypatch, capsys, arguments, code, words
):
    (tmp_path / "text.txt").write_text(
        "hello, this is not what you are looking for" * 20
    )
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
        {"W": eye * torch.nan, "v": eye[0].clone()},
        tmp_path / "nan.safetensors",
        metadata=metadata,
    )
    save_file(
        {"W": eye, "v": eye[0].clone()},
        tmp_path / "small.safetensors",
        metadata=metadata,
    )
    done = inside(*arguments, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert done.returncode == code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert re.search(words, done.stderr)
    if done.stderr.startswith("keyhole:"):
        assert done.stderr.count("\n") == 1
