"""`keyhole lab capture` and `keyhole recover`: a leak is saved, read, and read again."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import torch
from safetensors import safe_open

import tiny_models as tiny
from keyhole import invert
from keyhole.models.demo import load_demo

TEXT = "a warm and funny film ."
CAPTURE = f"lab capture demo --text '{TEXT}' --expose hidden:1"


def test_a_leak_is_captured_and_read(keyhole, tmp_path):
    made = keyhole(f"lab capture demo --text '{TEXT}' --expose hidden:3")
    assert made.returncode == 0
    assert "leak.safetensors: hidden:3 of 8 tokens, float32" in made.stdout
    with safe_open(tmp_path / "leak.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["about"])
    assert about["layer"] == 3
    assert about["precision"] == "float32"
    assert len(about["model"]) == 16
    done = keyhole("recover demo leak.safetensors --json")
    assert done.returncode == 1  # given away
    result = json.loads(done.stdout)
    assert result["verified"]
    assert list(result)[:4] == ["leak", "digest", "format", "kind"]
    assert result["text"] == "a warm and funny film."
    words = keyhole("recover demo leak.safetensors").stdout
    assert words.startswith("leak.safetensors: recovered (")


def test_rows_without_length_and_order(keyhole):
    done = keyhole(CAPTURE, "--degrade permuted --degrade normalised")
    assert done.returncode == 0, done.stderr
    assert "float32, permuted, normalised" in done.stdout
    read = keyhole("recover demo leak.safetensors --json")
    assert read.returncode == 1, read.stderr
    recovery = json.loads(read.stdout)
    assert (recovery["method"], recovery["verified"]) == ("UnorderedStates", True)
    wrong = keyhole(CAPTURE, "--degrade cut --out other.safetensors")
    assert wrong.returncode == 2
    choices = "choose one of truncated:K, normalised, subset:K, permuted, "
    assert choices in wrong.stderr


def test_the_truth_and_the_noise_may_be_stated(keyhole, tmp_path):
    (tmp_path / "truth.txt").write_text(f"{TEXT}\n")
    keyhole(CAPTURE, "--noise 0.02")
    stated = "recover demo leak.safetensors --truth truth.txt --noise 0.02"
    done = keyhole(stated)
    assert done.returncode == 1, done.stderr
    assert "exactly the true text: token F1 1.00" in done.stdout
    result = json.loads(keyhole(stated, "--json").stdout)
    assert result["verified"]
    assert result["exact"]
    assert result["token_f1"] == 1.0
    (tmp_path / "truth.txt").write_text(f"{TEXT}\nanother\n")
    wrong = keyhole(stated)
    assert wrong.returncode == 2
    assert "1 leaks need 1 true texts, not 2" in wrong.stderr
    wrong = keyhole("recover demo leak.safetensors --noise -1")
    assert wrong.returncode == 2
    assert "noise must be 0 or more, not -1" in wrong.stderr


def test_several_leaks_resume(keyhole, tmp_path):
    (tmp_path / "texts.txt").write_text(
        "a good film .\nthe plot is a mess .\nnot bad at all .\n"
    )
    options = "--expose kv:1 --precision int8 --out leaks"
    assert keyhole("lab capture demo --data texts.txt", options).returncode == 0
    found = tmp_path / "found.jsonl"
    read = "recover demo leaks --out found.jsonl --json"
    texts = ["a good film.", "the plot is a mess.", "not bad at all."]
    first = json.loads(keyhole(read).stdout)
    assert [result["text"] for result in first] == texts
    lines = found.read_text().splitlines(keepends=True)
    assert len(lines) == 4  # what the run is, and three results
    found.write_text("".join(lines)[: 40 - len(lines[3])])  # a crash
    again = keyhole(read)
    assert "2 of 3 leaks were read before" in again.stderr
    assert [result["text"] for result in json.loads(again.stdout)] == texts
    assert len(found.read_text().splitlines()) == 4


def test_a_method_by_name(keyhole):
    keyhole(CAPTURE)
    leak = "recover demo leak.safetensors --json --method"
    done = keyhole(leak, "encoder-states")
    assert done.returncode == 1
    assert json.loads(done.stdout)["method"] == "EncoderStates"
    wrong = keyhole(leak, "encoder-maps")
    assert wrong.returncode == 2
    advice = "encoder-maps does not read hidden:1 of an encoder: choose encoder-states"
    assert advice in wrong.stderr
    unknown = keyhole(leak, "magic")
    assert unknown.returncode == 2
    assert "choose among encoder-states, cached-keys" in unknown.stderr


def test_a_leak_of_the_same_name_is_read_again(keyhole):
    for text in ("a good film .", "a bad film ."):
        capture = f"lab capture demo --text '{text}' --expose hidden:1"
        keyhole(capture, "--out l.safetensors --force")
        done = keyhole("recover demo l.safetensors --out f.jsonl --json")
        assert json.loads(done.stdout)["text"] == text.replace(" .", ".")


def test_a_leak_that_is_not_this_models(keyhole, tmp_path):
    model = tiny.model("bert")
    words = tiny.tokenizer()
    leak = invert.leak_of(model, words, "w1 w2", "hidden:1")
    leak.save(tmp_path / "other.safetensors")
    invert.HiddenStates(leak.values, 1).save(tmp_path / "anonymous.safetensors")
    cut = (tmp_path / "other.safetensors").read_bytes()[:-200]
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
        done = keyhole(f"recover demo {name}.safetensors --out none.jsonl")
        assert done.returncode == 2, done.stderr
        assert words in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "none.jsonl").exists()  # nothing half-written


def test_results_of_something_else_are_not_appended_to(keyhole, tmp_path):
    (tmp_path / "notes.txt").write_text("my own notes\n")
    keyhole(CAPTURE)
    done = keyhole("recover demo leak.safetensors --out notes.txt")
    assert done.returncode == 2
    assert (tmp_path / "notes.txt").read_text() == "my own notes\n"


def test_a_text_that_is_read_in_part_is_a_finding_and_its_marks_are_words(
    tmp_path, keyhole
):
    demo = load_demo()
    leak = invert.leak_of(demo.model, demo.tokenizer, TEXT, "hidden:1")
    values = leak.values.clone()
    values[3] = torch.nan  # "and" did not leak
    noisy = invert.degrade(replace(leak, values=values), noise=0.2)
    replace(noisy, precision=None).save(tmp_path / "leak.safetensors")
    done = keyhole("recover demo leak.safetensors")
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
    secret = "a secret of mine"
    leak = invert.leak_of(box.model, box.tokenizer, secret, "hidden:3")
    np.save(tmp_path / "rows.npy", leak.values.numpy())
    done = keyhole("recover demo rows.npy --expose hidden:3 --json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["text"] == secret
    done = keyhole("recover demo rows.npy --expose kv:3")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "keyhole: expected hidden states (n, 128), keys and values"
    )
    assert done.stderr.count("\n") == 1
