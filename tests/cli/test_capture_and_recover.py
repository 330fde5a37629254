"""`keyhole lab capture` and `keyhole recover`: a leak is saved, read, and read again."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

import tiny_models as tiny
from command_line import inside
from keyhole import invert
from keyhole.models.demo import load_demo

TEXT = "a warm and funny film ."


@pytest.fixture
def keyhole(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        return inside(*arguments, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)

    return run


def test_a_leak_is_captured_and_read(keyhole, tmp_path):
    made = keyhole("lab", "capture", "demo", "--text", TEXT, "--expose", "hidden:3")
    assert made.returncode == 0
    assert "leak.safetensors: hidden:3 of 8 tokens, float32" in made.stdout
    with safe_open(tmp_path / "leak.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["about"])
    assert about["layer"] == 3
    assert about["precision"] == "float32"
    assert len(about["model"]) == 16
    done = keyhole("recover", "demo", "leak.safetensors", "--json")
    assert done.returncode == 1  # given away
    result = json.loads(done.stdout)
    assert result["verified"]
    assert list(result)[:4] == ["leak", "digest", "format", "kind"]
    assert result["text"] == "a warm and funny film."
    words = keyhole("recover", "demo", "leak.safetensors").stdout
    assert words.startswith("leak.safetensors: recovered (")


def test_rows_without_length_and_order(keyhole):
    options = ("--degrade", "permuted", "--degrade", "normalised")
    done = keyhole(
        "lab", "capture", "demo", "--text", TEXT, "--expose", "hidden:1", *options
    )
    assert done.returncode == 0, done.stderr
    assert "float32, permuted, normalised" in done.stdout
    read = keyhole("recover", "demo", "leak.safetensors", "--json")
    assert read.returncode == 1, read.stderr
    recovery = json.loads(read.stdout)
    assert (recovery["method"], recovery["verified"]) == ("UnorderedStates", True)
    wrong = keyhole(
        "lab",
        "capture",
        "demo",
        "--text",
        TEXT,
        "--expose",
        "hidden:1",
        "--degrade",
        "cut",
        "--out",
        "other.safetensors",
    )
    assert wrong.returncode == 2
    assert "choose one of truncated:K, normalised, subset:K, permuted, " in (
        wrong.stderr
    )


def test_the_truth_and_the_noise_may_be_stated(keyhole, tmp_path):
    (tmp_path / "truth.txt").write_text(f"{TEXT}\n")
    keyhole(
        "lab",
        "capture",
        "demo",
        "--text",
        TEXT,
        "--expose",
        "hidden:1",
        "--noise",
        "0.02",
    )
    stated = ("leak.safetensors", "--truth", "truth.txt", "--noise", "0.02")
    done = keyhole("recover", "demo", *stated)
    assert done.returncode == 1, done.stderr
    assert "exactly the true text: token F1 1.00" in done.stdout
    result = json.loads(keyhole("recover", "demo", *stated, "--json").stdout)
    assert (result["verified"], result["exact"], result["token_f1"]) == (
        True,
        True,
        1.0,
    )
    (tmp_path / "truth.txt").write_text(f"{TEXT}\nanother\n")
    wrong = keyhole("recover", "demo", *stated)
    assert wrong.returncode == 2
    assert "1 leaks need 1 true texts, not 2" in wrong.stderr
    wrong = keyhole("recover", "demo", "leak.safetensors", "--noise", "-1")
    assert wrong.returncode == 2
    assert "noise must be 0 or more, not -1" in wrong.stderr


def test_several_leaks_resume(keyhole, tmp_path):
    (tmp_path / "texts.txt").write_text(
        "a good film .\nthe plot is a mess .\nnot bad at all .\n"
    )
    options = ("--expose", "kv:1", "--precision", "int8", "--out", "leaks")
    assert (
        keyhole("lab", "capture", "demo", "--data", "texts.txt", *options).returncode
        == 0
    )
    first = keyhole("recover", "demo", "leaks", "--out", "found.jsonl", "--json")
    assert [result["text"] for result in json.loads(first.stdout)] == [
        "a good film.",
        "the plot is a mess.",
        "not bad at all.",
    ]
    lines = (tmp_path / "found.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 4  # what the run is, and three results
    (tmp_path / "found.jsonl").write_text(
        lines[0] + lines[1] + lines[2] + lines[3][:40]
    )  # a crash
    again = keyhole("recover", "demo", "leaks", "--out", "found.jsonl", "--json")
    assert "2 of 3 leaks were read before" in again.stderr
    texts = [
        [result["text"] for result in json.loads(run.stdout)] for run in (first, again)
    ]
    assert texts[0] == texts[1]
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 4


def test_a_file_of_another_model_or_method_is_refused(keyhole, tmp_path):
    keyhole("lab", "capture", "demo", "--text", TEXT, "--expose", "hidden:1")
    leak = ("recover", "demo", "leak.safetensors", "--out", "f.jsonl")
    assert keyhole(*leak).returncode == 1
    done = keyhole(*leak, "--method", "encoder-states")
    assert done.returncode == 2
    assert "this run has method encoder-states, that of f.jsonl has method None" in (
        done.stderr
    )


def test_a_method_by_name(keyhole):
    keyhole("lab", "capture", "demo", "--text", TEXT, "--expose", "hidden:1")
    leak = ("recover", "demo", "leak.safetensors", "--json", "--method")
    done = keyhole(*leak, "encoder-states")
    assert done.returncode == 1
    assert json.loads(done.stdout)["method"] == "EncoderStates"
    wrong = keyhole(*leak, "encoder-maps")
    assert wrong.returncode == 2
    assert (
        "encoder-maps does not read hidden:1 of an encoder: choose encoder-states"
        in (wrong.stderr)
    )
    unknown = keyhole(*leak, "magic")
    assert unknown.returncode == 2
    assert "choose among encoder-states, cached-keys" in unknown.stderr


def test_a_leak_of_the_same_name_is_read_again(keyhole):
    for text in ("a good film .", "a bad film ."):
        leak = ("--expose", "hidden:1", "--out", "l.safetensors", "--force")
        keyhole("lab", "capture", "demo", "--text", text, *leak)
        done = keyhole("recover", "demo", "l.safetensors", "--out", "f.jsonl", "--json")
        assert json.loads(done.stdout)["text"] == text.replace(" .", ".")


def test_a_leak_that_is_not_this_models(keyhole, tmp_path):
    model = tiny.model("bert")
    words = tiny.tokenizer()
    leak = invert.leak_of(model, words, "w1 w2", "hidden:1")
    leak.save(tmp_path / "other.safetensors")
    invert.HiddenStates(leak.values, 1).save(tmp_path / "anonymous.safetensors")
    values = torch.full((4, 128), torch.nan)
    values[0] = 1.0
    whole = invert.HiddenStates(values, 1)
    whole.save(tmp_path / "whole.safetensors")
    cut = (tmp_path / "whole.safetensors").read_bytes()[:-200]
    (tmp_path / "cut.safetensors").write_bytes(cut)
    invert.HiddenStates(torch.ones(4, 128), 9).save(tmp_path / "deep.safetensors")
    wrong = {
        "other": "the leak is of the model",
        "anonymous": "is it another model's",
        "cut": "as a leak file",
        "deep": "must be from 0 to 4",
        "nowhere": "as a leak file",
    }
    for name, words in wrong.items():
        done = keyhole("recover", "demo", f"{name}.safetensors", "--out", "none.jsonl")
        assert done.returncode == 2, done.stderr
        assert words in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "none.jsonl").exists()  # nothing half-written


def test_results_of_something_else_are_not_appended_to(keyhole, tmp_path):
    (tmp_path / "notes.txt").write_text("my own notes\n")
    keyhole("lab", "capture", "demo", "--text", TEXT, "--expose", "hidden:1")
    done = keyhole("recover", "demo", "leak.safetensors", "--out", "notes.txt")
    assert done.returncode == 2
    assert (tmp_path / "notes.txt").read_text() == "my own notes\n"


def test_a_text_that_is_read_in_part_is_a_finding_and_its_marks_are_words(
    tmp_path, keyhole
):
    demo = load_demo()
    leak = invert.leak_of(demo.model, demo.tokenizer, TEXT, "hidden:1")
    values = leak.values.clone()
    values[3] = torch.nan  # "and" did not leak
    replace(
        invert.degrade(replace(leak, values=values), noise=0.2), precision=None
    ).save(tmp_path / "leak.safetensors")
    done = keyhole("recover", "demo", "leak.safetensors")
    assert done.returncode == 1, done.stderr
    assert "leak.safetensors: inexact (" in done.stdout
    words = " ".join(done.stdout.split())
    assert re.search(
        r" \[a warm\] ?\{[^}]+\} ?\[funny film\.\] 7 likely, 1 unknown of 8 tokens: ",
        words,
    )
    assert "8 tokens: likely in [brackets], unknown in {braces} " in words


def test_an_array_that_another_program_wrote(keyhole, tmp_path):
    box = load_demo()
    rows = invert.leak_of(
        box.model, box.tokenizer, "a secret of mine", "hidden:3"
    ).values
    np.save(tmp_path / "rows.npy", rows.numpy())
    done = keyhole("recover", "demo", "rows.npy", "--expose", "hidden:3", "--json")
    assert (done.returncode, json.loads(done.stdout)["text"]) == (
        1,
        "a secret of mine",
    ), done.stderr
    done = keyhole("recover", "demo", "rows.npy", "--expose", "kv:3")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "keyhole: expected hidden states (n, 128), keys and values"
    )
    assert done.stderr.count("\n") == 1
