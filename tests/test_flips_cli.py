"""`keyhole disrupt`, `harden` and `audit` on classifiers: real processes, as people start them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

import tiny_classifiers
import tiny_models
from keyhole.disrupt import Disruption
from keyhole.models import load_model
from test_cli import classifier, keyhole


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    classifier(folder, 12)
    return folder


def test_disrupt_writes_json_and_a_page(place, tmp_path):
    arguments = ("--share", 0.2, "--examples", 6, "--out", tmp_path / "f.json", "--json")
    page = tmp_path / "f.html"
    done = keyhole(
        "disrupt", "my-classifier", "--data", "dev.tsv", *arguments, "--page", page, cwd=place
    )
    data = json.loads(done.stdout)
    assert json.loads((tmp_path / "f.json").read_text()) == data
    found = Disruption.from_dict(data)
    assert len(found.outcomes) == 6
    assert done.returncode == (1 if found.flips else 0), done.stderr
    assert found.flips, "a share of 20% flips something"
    assert max(one.worst_head for one in found.attacked) <= 0.2
    assert "right answers flipped" in done.stderr
    assert "became <b>LABEL_" in page.read_text()


def test_labels_by_name_and_none_at_all(place, tmp_path):
    rows = [one.text for one in tiny_classifiers.examples(3)]
    (tmp_path / "plain.txt").write_text("\n".join(rows))
    (tmp_path / "named.csv").write_text("text,gold\n" + "".join(f"{row},yes\n" for row in rows))
    model = place / "my-classifier"
    view = ("disrupt", model, "--as-released", "--json", "--data")
    own = json.loads(keyhole(*view, "plain.txt", cwd=tmp_path).stdout)
    assert own["accuracy"] == 1.0  # its own answers are what it holds to be right
    named = ("named.csv", "--label", "gold", "--classes", "no,yes")
    done = keyhole(*view, *named, cwd=tmp_path)
    said = [one["before"] == [1] for one in json.loads(done.stdout)["outcomes"]]
    assert [one["right"] for one in json.loads(done.stdout)["outcomes"]] == said


def test_a_causal_model_is_told_by_its_head(tmp_path):
    import transformers

    config = tiny_models.model("gpt2").config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    words = tiny_models.tokenizer(causal=True)
    words.save_pretrained(tmp_path / "lm")
    (tmp_path / "t.txt").write_text("w1 w2 w3 w4 w5 w6 w7 w8 w9\nw9 w8 w7 w6 w5 w4 w3 w2\n")
    done = keyhole(
        "disrupt", "lm", "--data", "t.txt", "--share", 0.3, "--json", "--page", "p.html",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["accuracy"] == 1.0
    assert (tmp_path / "p.html").exists()


@pytest.mark.parametrize("processes", [0, 2])
def test_ctrl_c_keeps_the_journal_and_the_same_command_goes_on(place, tmp_path, processes):
    command = [
        sys.executable, "-m", "keyhole", "disrupt", str(place / "my-classifier"), "--data",
        str(place / "train.tsv"), "--share", "0.02", "--resume", "run.jsonl", "--json",
        "--processes", str(processes),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    journal = tmp_path / "run.jsonl"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (
        journal.exists() and journal.read_text().count("\n") > 1
    ):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130, words
    assert "stopped; what is finished is in run.jsonl: the same command goes on" in words
    assert "Traceback" not in words
    kept = journal.read_text().splitlines()
    again = keyhole(*command[3:], cwd=tmp_path)
    assert again.returncode in (0, 1), again.stderr
    assert len(json.loads(again.stdout)["outcomes"]) == 12
    lines = journal.read_text().splitlines()
    assert lines[: len(kept)] == kept  # nothing was attacked twice
    assert len(lines) == 1 + 12


def test_harden_resumes_and_writes_a_model_that_loads(place, tmp_path):
    arguments = (
        "harden", place / "my-classifier", "--data", place / "train.tsv", "--dev",
        place / "dev.tsv", "--flips", 4, "--method", "sattend", "--rate", 0.5, "--mode", "token",
        "--epochs", 2, "--learning-rate", 1e-3, "--checkpoint", "kept", "--json",
    )  # fmt: skip
    first = keyhole(*arguments, "--out", "new", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    data = json.loads(first.stdout)
    assert data == json.loads((tmp_path / "new" / "hardening.json").read_text())
    assert len(data["training"]["losses"]) == 2
    assert 0 <= data["after"]["accuracy"] <= 1
    assert "flips" in first.stderr
    trained = load_model(tmp_path / "new", task="classification")
    assert trained.tokenizer is not None
    again = json.loads(keyhole(*arguments, "--out", "again", cwd=tmp_path).stdout)
    assert again["training"]["resumed"] == 2
    same = load_model(tmp_path / "again", task="classification").model.state_dict()
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(weight, same[name])


def test_harden_gives_a_headless_model_a_head(place, tmp_path):
    tiny_models.save("bert", tmp_path / "base")
    view = ("harden", "base", "--data", place / "train.tsv", "--method", "plain", "--epochs", 1)
    done = keyhole(*view, "--out", "new", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_model(tmp_path / "new", task="classification").model.config.num_labels == 2


def test_audit_of_a_classifier_flips_it(place, tmp_path):
    done = keyhole(
        "audit", place / "my-classifier", "--data", place / "dev.tsv", "--texts", 1, "--flips", 4,
        "--layers", 1, "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    findings = json.loads(done.stdout)["findings"]
    flips = [one for one in findings if one["sought"] == "prediction"]
    assert len(flips) == 4
    assert all("right answers flipped" in one["reason"] for one in flips)
