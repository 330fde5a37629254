"""No command resumes from a file of another run: it is refused, with what differs.

An audit has a journal for each command; tests/audit/test_journal.py tests those of the
library.
"""

from __future__ import annotations

import json
import re
from functools import partial

import pytest

import tiny_classifiers
import tiny_models
from command_line import inside
from keyhole import oracle, recover
from keyhole.models import load_model
from tiny_classifiers import classifier


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models, two data sets, two leaks and two targets."""
    folder = tmp_path_factory.mktemp("two-of-each")
    classifier(folder, 4)
    tiny_classifiers.model(seed=5, labels=2).save_pretrained(
        folder / "other-classifier"
    )
    tiny_models.tokenizer().save_pretrained(folder / "other-classifier")
    for seed, name in enumerate(("model", "other")):
        tiny_models.model("bert", seed).save_pretrained(folder / name)
        tiny_models.tokenizer().save_pretrained(folder / name)
        loaded = load_model(folder / name)
        recover.capture(
            loaded, "w1 w2 w3", "hidden:1", out=folder / f"{name}.safetensors"
        )
        oracle.save(
            oracle.plant(dim=3, seed=seed), folder / f"target-{seed}.safetensors"
        )
    return folder


@pytest.fixture
def keyhole(place, monkeypatch, capsys):
    return partial(inside, cwd=place, monkeypatch=monkeypatch, capsys=capsys)


DISRUPT = {
    "model": "my-classifier",
    "--data": "dev.tsv",
    "--method": "as-released",
    "--share": 0.2,
    "--examples": 2,
    "--resume": "",
}
HARDEN = {
    "model": "my-classifier",
    "--data": "train.tsv",
    "--method": "plain",
    "--epochs": 1,
    "--out": "",
    "--resume": "",
}
TEXT = {"model": "model", "leak": "model.safetensors", "--out": ""}
EXTRACT = {"target": "target-0.safetensors", "--ledger": ""}

# What is changed in the second command, and what differs then.
TABLE = [
    (
        "disrupt",
        DISRUPT,
        {"model": "other-classifier"},
        "model .*, that of .* has model ",
    ),
    ("disrupt", DISRUPT, {"--data": "train.tsv"}, "data .*, that of .* has data "),
    (
        "disrupt",
        DISRUPT,
        {"--share": 0.3},
        "method share 0.3, that of .* has method share 0.2",
    ),
    ("disrupt", DISRUPT, {"--seed": 1}, "method seed 1, that of .* has method seed 0"),
    (
        "disrupt",
        DISRUPT,
        {"--max-length": 6},
        "max_length 6, that of .* has max_length 128",
    ),
    ("disrupt", DISRUPT, {"--method": "rerank"}, "method .*, that of .* has method "),
    (
        "harden",
        HARDEN,
        {"model": "other-classifier"},
        "model .*, that of .* has model ",
    ),
    ("harden", HARDEN, {"--data": "dev.tsv"}, "data .*, that of .* has data "),
    ("harden", HARDEN, {"--examples": 3}, "data .*, that of .* has data "),
    (
        "harden",
        HARDEN,
        {"--method": "r3f"},
        "defence R3F.*, that of .* has defence Plain",
    ),
    ("harden", HARDEN, {"--epochs": 2}, "epochs 2, that of .* has epochs 1"),
    ("harden", HARDEN, {"-o=batch": 2}, "batch 2, that of .* has batch 32"),
    (
        "harden",
        HARDEN,
        {"-o=learning_rate": 0.1},
        "rate 0.1, that of .* has rate 2e-05",
    ),
    ("harden", HARDEN, {"--seed": 1}, "seed 1, that of .* has seed 0"),
    (
        "recover",
        TEXT,
        {"model": "other", "leak": "other.safetensors"},
        "model .*, that of .* has ",
    ),
    (
        "recover",
        TEXT,
        {"--method": "encoder-states"},
        "method encoder-states, that of .* has ",
    ),
    (
        "extract",
        EXTRACT,
        {"target": "target-1.safetensors"},
        "target head:.*, that of .* has target",
    ),
]


def memory(folder, command, options):
    """Return options with this test's own files, and the file to resume from."""
    names = {"--resume": "kept", "--out": "out", "--ledger": "run.db"}
    given = {
        key: folder / names[key] if value == "" else value
        for key, value in options.items()
    }
    for key in ("--resume", "--ledger", "--out"):
        if key in given:
            return given, given[key]
    raise AssertionError(command)


def words_of(command, options):
    named = []
    for key, value in options.items():
        flag, mark, name = key.partition("=")  # -o=batch is given as -o batch=…
        if key[0] == "-":
            named += [flag, f"{name}={value}" if mark else value]
    return [
        *command.split(),
        *(value for key, value in options.items() if key[0] != "-"),
        *named,
    ]


@pytest.mark.parametrize(
    ("command", "options", "change", "words"),
    TABLE,
    ids=[f"{row[0]} {' '.join(row[2])}" for row in TABLE],
)
def test_refused_with_what_differs(
    command, options, change, words, place, tmp_path, keyhole, monkeypatch
):
    monkeypatch.chdir(place)
    given, file = memory(tmp_path, command, options)
    assert keyhole(*words_of(command, given)).returncode in (0, 1)
    before = contents(file)
    if command == "harden":
        given["--out"] = tmp_path / "second"
    done = keyhole(*words_of(command, {**given, **change}))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("keyhole: this run has ")
    assert re.search(f"this run has {words}", line), line
    assert contents(file) == before  # and left alone


def contents(path):
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {file: file.read_bytes() for file in files if file.is_file()}


def test_more_of_the_same_data_goes_on(place, tmp_path, keyhole):
    given, _ = memory(tmp_path, "disrupt", DISRUPT)
    more = {**given, "--examples": 3}
    keyhole(*words_of("disrupt", given))
    shared = json.loads(keyhole(*words_of("disrupt", more), "--json").stdout)
    del more["--resume"]
    alone = json.loads(keyhole(*words_of("disrupt", more), "--json").stdout)
    facts = [
        [
            (outcome["id"], outcome["flipped"], outcome["cut"])
            for outcome in result["outcomes"]
        ]
        for result in (shared, alone)
    ]  # confidences differ in the last digit: batches are put together differently
    assert len(facts[0]) == 3
    assert facts[0] == facts[1]
