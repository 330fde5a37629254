"""`keyhole disrupt`, `harden` and `audit` on classifiers."""

from __future__ import annotations

import importlib
import json
import re
import sys

import pytest
import torch
import transformers

import tiny_classifiers
import tiny_heads
import tiny_models
from keyhole import disrupt, harden
from keyhole.core import Exposure
from keyhole.disrupt import ATTACKERS, Disruption, HackAttend, Rerank
from keyhole.models import load_model
from tiny_classifiers import classifier


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    classifier(folder, 12)
    return folder


@pytest.fixture
def lightly(monkeypatch):
    tiny_classifiers.attack_lightly(monkeypatch)


@pytest.fixture
def training(place):
    return f"harden {place}/my-classifier --data {place}/train.tsv"


@pytest.fixture
def dev(place):
    return f"--dev {place}/dev.tsv"


def weights(folder):
    return load_model(folder, task="classification").model.state_dict()


def equal(weights, others):
    return all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_disrupt_writes_json(keyhole, place, tmp_path):
    view = "disrupt my-classifier --data dev.tsv --share 0.2 --examples 6 --json"
    done = keyhole(view, "--out", tmp_path / "f.json", cwd=place)
    data = json.loads(done.stdout)
    assert json.loads((tmp_path / "f.json").read_text()) == data
    found = Disruption.from_dict(data)
    assert len(found.outcomes) == 6
    assert done.returncode == (1 if found.flips else 0), done.stderr
    assert found.flips
    assert max(outcome.worst_head for outcome in found.attacked) <= 0.2


def test_any_method_by_its_name(keyhole, place):
    view = "disrupt my-classifier --data dev.tsv --examples 3 --share 0.2 --json"
    methods = {
        "random": HackAttend.random(0.2),
        "as-released -o scale=half -o order=random": HackAttend.as_released(
            0.2, "half", order="random"
        ),
        "as-released -o ranking=attention": HackAttend.as_released(
            0.2, ranking="attention"
        ),
        "rerank -o scope=model -o spare=padding": HackAttend(
            0.2, scope="model", spare="padding"
        ),
    }
    for words, method in methods.items():
        data = json.loads(keyhole(view, "--method", words, cwd=place).stdout)
        assert HackAttend.from_dict(data["method"]) == method
        assert (data["kind"], data["data"], data["task"]) == (
            "disruption",
            "dev.tsv",
            "classification",
        )


@pytest.mark.parametrize("kind", ["random", "partition"])
def test_smoothing_by_the_command(keyhole, place, tmp_path, kind):
    view = (
        "lab certify my-classifier 2 --data dev.tsv --examples 3 --seed 5 "
        f"-o kind={kind} -o keep=0.1 -o samples=100"
    )
    done = keyhole(view, "--json --out", tmp_path / "c.json", cwd=place)
    found = harden.Smoothed.load(tmp_path / "c.json")
    assert found == harden.Smoothed.from_dict(json.loads(done.stdout))
    assert found.smoothing == harden.Smoothing(0.1, kind, samples=100, seed=5)
    assert [sum(ballot.votes) for ballot in found.ballots] == [
        found.smoothing.masks
    ] * 3
    assert done.returncode == (0 if found.certified(2) == 1 else 3)
    assert "unchanged by any cut of 2 units" in keyhole(view, cwd=place).stdout


@pytest.mark.parametrize("kind", ["random", "partition"])
def test_a_model_that_answers_nan_is_refused(keyhole, tmp_path, kind):
    """The argmax of NaN is class 0, so every mask would vote 0, and no cut would flip it."""
    classifier(tmp_path, 12)
    broken = tiny_classifiers.model(labels=2)
    torch.nn.init.constant_(broken.classifier.bias, torch.nan)
    broken.save_pretrained(tmp_path / "my-classifier")
    (tmp_path / "zeros.tsv").write_text("sentence\tlabel\nw1 w2 w3\t0\nw4 w5 w6\t0\n")
    certify = f"lab certify my-classifier 1 -o kind={kind} -o keep=0.1"
    for command in ("disrupt my-classifier", certify):
        done = keyhole(command, "--data zeros.tsv")
        assert done.returncode == 2, done.stdout
        assert "the model gives NaN or infinity" in done.stderr
        assert "classifier.bias" in done.stderr


def test_harden_proves_what_no_cut_can_do(keyhole, training, dev, tmp_path, lightly):
    view = f"{training} {dev} --flips 4 --certify --epochs 1 --out new"
    refused = keyhole(view)
    assert refused.returncode == 2
    assert "give --method sattend -o emptied=true" in refused.stderr
    done = keyhole(view, "--method sattend -o emptied=true -o rate=0.9")
    assert done.returncode == 0, done.stderr
    card = harden.Hardening.load(tmp_path / "new" / "hardening.json")
    (after,) = card.after
    for found in (card.before, after):
        assert found.smoothed.smoothing == harden.Smoothing(0.1, "partition")
        assert len(found.smoothed.ballots) == 4
        assert found.figures()["certified, any 4 units"] == found.smoothed.certified(4)
    assert "certified, any 4 units" in done.stdout


def test_from_python_without_the_command_line(place, tmp_path):
    """The functions behind the commands, with an attacker and a defence of the caller."""
    model = place / "my-classifier"
    rows = []

    def track(name, total=None):
        return lambda done, whole=None, note="": rows.append(
            (name, done, whole or total)
        )

    light = HackAttend(0.2, schedule=Rerank(2, 2, 1), seed=5)
    found = disrupt.run(model, place / "dev.tsv", method=light, examples=4, track=track)
    assert rows == [("disrupt", 0, 4), ("disrupt", 4, 4)]
    assert HackAttend.from_dict(found.method) == light
    rows.clear()
    done = harden.run(
        model,
        place / "train.tsv",
        tmp_path / "new",
        method=harden.SAttend(0.3),
        epochs=1,
        batch=4,
        track=track,
    )
    assert [row for row in rows if row[0] != "harden"] == [
        ("training", step, 3) for step in (1, 2, 3)
    ]
    assert rows[-1] == ("harden", 1, 1)
    assert (done.method, done.before, done.after) == ("SAttend", None, ())
    assert harden.Hardening.load(tmp_path / "new" / "hardening.json") == done
    assert repr(done).splitlines()[0].endswith("my-classifier: SAttend, 12 examples")


def test_labels_by_name_and_none_at_all(keyhole, place, tmp_path):
    rows = [example.text for example in tiny_classifiers.examples(3)]
    (tmp_path / "plain.txt").write_text("\n".join(rows))
    (tmp_path / "named.csv").write_text(
        "text,gold\n" + "".join(f"{row},yes\n" for row in rows)
    )
    view = f"disrupt {place}/my-classifier --method as-released --json --data"
    own = json.loads(keyhole(view, "plain.txt").stdout)
    assert own["own_answers"]
    assert own["accuracy"] is None  # its own answers say nothing about that
    done = keyhole(view, "named.csv --label gold --classes no,yes")
    outcomes = json.loads(done.stdout)["outcomes"]
    assert outcomes
    assert all(each["right"] == (each["before"] == [1]) for each in outcomes)


def test_a_causal_model_is_told_by_its_head(keyhole, tmp_path):
    config = tiny_models.model("gpt2").config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(
            tmp_path / "lm"
        )
    words = tiny_models.tokenizer(causal=True)
    words.save_pretrained(tmp_path / "lm")
    (tmp_path / "t.txt").write_text(
        "w1 w2 w3 w4 w5 w6 w7 w8 w9\nw9 w8 w7 w6 w5 w4 w3 w2\n"
    )
    done = keyhole("disrupt lm --data t.txt --share 0.3 --json")
    data = json.loads(done.stdout)
    assert done.returncode == (1 if data["success"] else 0), done.stderr
    assert data["accuracy"] is None  # of its own answers there is none
    assert data["own_answers"]


def test_harden_resumes_and_writes_a_model_that_loads(
    keyhole, training, dev, tmp_path, lightly
):
    arguments = (
        f"{training} {dev} --flips 4 --method sattend -o rate=0.5 -o mode=token "
        "--epochs 2 -o learning_rate=1e-3 --resume kept --json"
    )
    first = keyhole(arguments, "--out new")
    assert first.returncode == 0, first.stderr
    data = json.loads(first.stdout)
    assert data == json.loads((tmp_path / "new" / "hardening.json").read_text())
    (run,) = data["runs"]
    assert len(run["training"]["losses"]) == 2
    assert 0 <= run["after"]["accuracy"] <= 1
    trained = load_model(tmp_path / "new", task="classification")
    assert trained.tokenizer is not None
    again = json.loads(keyhole(arguments, "--out again").stdout)
    assert again["runs"][0]["training"]["resumed"] == 2
    assert equal(trained.model.state_dict(), weights(tmp_path / "again"))


def test_harden_measures_what_disrupt_finds(keyhole, place, dev, lightly):
    model = place / "my-classifier"
    view = f"--data {place}/dev.tsv --json"
    method = "--method plain --epochs 1 -o learning_rate=1e-3"
    done = keyhole("harden", model, view, dev, method, "--out new")
    result = json.loads(done.stdout)
    (run,) = result["runs"]
    for found, each in ((result["before"], model), (run["after"], "new")):
        done = keyhole("disrupt", each, view, tiny_classifiers.LIGHTLY)
        own = json.loads(done.stdout)
        assert own["success"] > 0
        assert (found["accuracy"], found["examples"]) == (own["accuracy"], 12)
        stronger = found["attacks"]["stronger"]
        assert stronger["flips"] == sum(
            outcome["flipped"] for outcome in own["outcomes"]
        )
        assert stronger["examples"] == sum(
            outcome["right"] for outcome in own["outcomes"]
        )
        assert set(found["attacks"]) == {"stronger", "as released", "random"}
    assert set(run["after"]["transferred"]) == {"the model before"}
    assert set(run["after"]["wrong_label"]) == {"lowered", "raised"}


def test_harden_over_seeds(keyhole, training, dev, tmp_path, lightly):
    view = f"{training} --json --method strongest --epochs 1 -o learning_rate=1e-3"
    both = keyhole(view, dev, "--flips 3 --seeds 2 --out both")
    assert both.returncode == 0, both.stderr
    runs = json.loads(both.stdout)["runs"]
    assert [(run["seed"], run["folder"]) for run in runs] == [
        (0, "seed-0"),
        (1, "seed-1"),
    ]
    keyhole(view, "--seed 1 --out one")
    alone = weights(tmp_path / "one")
    assert equal(alone, weights(tmp_path / "both" / "seed-1"))
    assert not equal(alone, weights(tmp_path / "both" / "seed-0"))


def test_ctrl_c_after_training_leaves_a_model_and_a_card(
    keyhole, training, dev, tmp_path, monkeypatch, lightly
):
    command = f"{training} {dev} --method plain --epochs 1 --flips 2 --out new"
    module = importlib.import_module("keyhole.harden.run")
    evaluate = module.evaluate
    calls = []

    def stop(*given, **named):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*given, **named)

    monkeypatch.setattr(module, "evaluate", stop)
    done = keyhole(command)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "keyhole: stopped"
    card = json.loads((tmp_path / "new" / "hardening.json").read_text())
    assert card["before"] is not None
    assert card["runs"][0]["after"] is None
    assert load_model(tmp_path / "new", task="classification").tokenizer is not None
    other = keyhole(command, "--epochs 2")
    assert other.returncode == 2
    assert re.search(
        r"this run has epochs 2, that of .* has epochs 1: .*--force", other.stderr
    )
    assert keyhole(command).returncode == 0  # the folder is this command's own
    card = json.loads((tmp_path / "new" / "hardening.json").read_text())
    assert card["runs"][0]["after"] is not None
    again = keyhole(command)
    assert again.returncode == 2
    assert re.match(
        r"keyhole: new holds a trained model already: give --force to ", again.stderr
    )
    assert keyhole(command, "--force").returncode == 0


def test_harden_gives_a_headless_model_a_head(keyhole, place, tmp_path):
    tiny_models.save("bert", tmp_path / "base")
    view = f"harden base --data {place}/train.tsv --method plain --epochs 1 --out new"
    done = keyhole(view)
    assert done.returncode == 0, done.stderr
    trained = load_model(tmp_path / "new", task="classification")
    assert trained.model.config.num_labels == 2


def exposed(data):
    """Return the exit code that follows from an audit's findings."""
    statuses = {row["status"] for row in data["findings"] if not row["control"]}
    if statuses & {"recovered", "recovered within a domain", "inexact"}:
        return 1
    return 0 if statuses <= {"unsolved", "not identifiable"} else 3


def written(folder, family, task):
    tiny_heads.model(family, task, seed=1, scale=0.1).save_pretrained(folder)
    tiny_models.tokenizer(causal=task == "causal").save_pretrained(folder)
    lines = [" ".join(f"w{(7 * i + 3 * j) % 50}" for j in range(12)) for i in range(3)]
    (folder.parent / "t.txt").write_text("\n".join(lines))


def read_from_states(findings):
    """Whether the states of layer 1 gave the text back."""
    return {"recovered"} == {
        row["status"]
        for row in findings
        if str(Exposure(**row["exposure"])) == "text-hidden-states-layer-1"
    }


FEW = "--layers 1 --only predictions --only KH-TEXT-HIDDEN-STATES --json"


def test_an_encoder_with_a_decoder_through_the_commands(keyhole, tmp_path):
    written(tmp_path / "model", "t5", "seq2seq")
    options = "--json --share 0.05 -o continuation=2 -o spare=padding"
    cut = json.loads(keyhole("disrupt model --data t.txt", options).stdout)
    assert all(len(outcome["before"]) == 2 for outcome in cut["outcomes"])
    assert cut["own_answers"]
    assert len(cut["outcomes"]) == 3
    done = keyhole("audit model --data t.txt --texts 1 --flips 1", FEW)
    found = json.loads(done.stdout)
    assert done.returncode == exposed(found), done.stderr
    assert {row["sought"] for row in found["findings"]} == {"text", "prediction"}
    assert read_from_states(found["findings"])


def test_audit_of_a_language_model_reads_text_and_flips_tokens(keyhole, tmp_path):
    written(tmp_path / "model", "gpt2", "causal")
    done = keyhole("audit model --data t.txt --texts 1 --layers 1 --json")
    found = json.loads(done.stdout)["findings"]
    assert {row["sought"] for row in found} == {"text", "prediction"}
    assert read_from_states(found)


def test_audit_of_a_classifier_flips_it(keyhole, place):
    view = f"audit {place}/my-classifier --data {place}/dev.tsv --texts 1 --flips 4"
    done = keyhole(view, FEW)
    data = json.loads(done.stdout)
    assert done.returncode == exposed(data), done.stderr
    findings = data["findings"]
    flips = [row for row in findings if row["sought"] == "prediction"]
    assert len(flips) == 4 < len(findings)
    # at 1%; the rest of the model can be checked all the same
    short = "the texts are too short"
    assert all(
        "right answers flipped" in f["reason"] or short in f["reason"] for f in flips
    )


WRONG = {
    "disrupt base --task classification": "has no trained head",
    "disrupt my-classifier -o target=7": "the target must be from 0 to 1 for this model, got 7",
    "disrupt my-classifier --share 2": "share must be at most 1",
    "disrupt my-classifier --examples 0": "--examples must be 1 or more, not 0",
    "disrupt my-classifier --processes -1": "--processes must be 0 or more",
    "disrupt my-classifier -o scale=half": "strongest has no option 'scale'",
    "disrupt my-classifier -o ranking=best": "ranking must be one of removal, .*, not best",
    "disrupt my-classifier --method random -o ranking=removal": "random has no option 'ranking'",
    "disrupt my-classifier --processes 2 --dask tcp://h:1": "give --processes or --dask, not both",
    "lab certify my-classifier 0": "must be 1 or more, not 0",
    "harden my-classifier --out o --certify": "--certify needs --dev: nothing would be measured",
    "disrupt my-classifier -o continuation=2": (
        "continuation is for language models, not for classification"
    ),
    "harden my-classifier --out o --method sattend -o weight=1": "sattend has no option 'weight'",
    "harden my-classifier --out o -o mode=token": "strongest has no option 'mode'",
    "disrupt my-classifier --resume no/run.jsonl": "there is no such folder",
    "disrupt my-classifier --task choice": "must hold choices",
    "disrupt my-classifier --resume dev.tsv": "expected JSON in dev.tsv",
    "disrupt my-classifier --device cuda:77": "is not a device of this machine",
    "harden my-classifier --out o --method r3f -o rate=0.1": "r3f has no option 'rate'",
    "harden my-classifier --out my-classifier": "choose a new folder",
    "harden my-classifier --out o --flips 0": "--flips must be 1",
    "harden my-classifier --out o --method plain -o plain_first=0.5": (
        "plain_first=0.5 needs a defence to go on with: choose another --method than plain"
    ),
    "harden my-classifier --out o --flips 3": "--flips needs --dev",
    "harden my-classifier --out dev.tsv/o": "cannot write dev.tsv/o: Not a directory",
    "harden my-classifier --out o --dev missing.tsv": "there is no such file",
    "harden my-classifier --out o --epochs 0": "--epochs must be 1 or more",
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.items())
def test_wrong_wishes_are_one_line(keyhole, place, arguments, words):
    if " base " in arguments:
        tiny_models.save("bert", place / "base")
    done = keyhole(arguments, "--data dev.tsv", cwd=place)
    assert done.returncode in (2, 3)
    (line,) = done.stderr.splitlines()
    assert re.search(words, line)
    assert not (place / "o").exists()  # what cannot begin leaves nothing behind


@pytest.mark.parametrize("option", ["--column", "--label", "--classes"])
def test_columns_are_of_a_file(keyhole, option):
    done = keyhole("disrupt demo --examples 1", option, "a,b")
    assert done.returncode == 2
    assert f"{option}" in done.stderr


@pytest.mark.parametrize("command", ["disrupt", "harden"])
def test_methods_have_names_of_the_registry(keyhole, place, command):
    out = "" if command == "disrupt" else "--out o"
    view = f"{command} my-classifier --data dev.tsv --method weakest {out}"
    done = keyhole(view, cwd=place)
    assert done.returncode == 2
    names = {"disrupt": ATTACKERS, "harden": harden.DEFENCES}[command]
    assert (
        f"there is no method 'weakest': choose among {', '.join(names)}" in done.stderr
    )


def test_a_cluster_needs_dask(keyhole, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    view = "disrupt my-classifier --data dev.tsv --dask tcp://127.0.0.1:9"
    done = keyhole(view, cwd=place)
    assert done.returncode == 2
    assert "pip install 'keyhole[cluster]'" in done.stderr


@pytest.mark.release
def test_a_cluster_by_address(keyhole, place):
    distributed = pytest.importorskip("distributed")
    view = "disrupt my-classifier --data dev.tsv --share 0.1 --json"
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": ":0"}
    with distributed.LocalCluster(processes=False, **options) as cluster:
        far = keyhole(view, "--dask", cluster.scheduler_address, cwd=place)
    own = keyhole(view, cwd=place)
    after = [
        [outcome["after"] for outcome in json.loads(done.stdout)["outcomes"]]
        for done in (far, own)
    ]
    assert after[0] == after[1]
