"""No command resumes from a file of another run: it is refused, with what differs.

An audit has a journal for each command; tests/audit/test_journal.py tests those of the
library.
"""

from __future__ import annotations

import json
import re

import pytest

import tiny_classifiers
import tiny_models
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


DISRUPT = (
    "disrupt my-classifier --data dev.tsv --method as-released --share 0.2 "
    "--examples 2 --resume {kept}"
)
HARDEN = (
    "harden my-classifier --data train.tsv --method plain --epochs 1 "
    "--resume {kept} --out {out}"
)
TEXT = "recover model model.safetensors --out {kept}"
EXTRACT = "extract target-0.safetensors --ledger {kept}"

# What is replaced in the second command, and what differs then.
TABLE = [
    (DISRUPT, "my-classifier", "other-classifier", "model .*, that of .* has model "),
    (DISRUPT, "dev.tsv", "train.tsv", "data .*, that of .* has data "),
    (DISRUPT, "0.2", "0.3", "method share 0.3, that of .* has method share 0.2"),
    (DISRUPT, "--resume", "--seed 1 --resume", "method seed 1, .* has method seed 0"),
    (
        DISRUPT,
        "--resume",
        "--max-length 6 --resume",
        "max_length 6, that of .* has max_length 128",
    ),
    (DISRUPT, "as-released", "rerank", "method .*, that of .* has method "),
    (HARDEN, "my-classifier", "other-classifier", "model .*, that of .* has model "),
    (HARDEN, "train.tsv", "dev.tsv", "data .*, that of .* has data "),
    (HARDEN, "--out", "--examples 3 --out", "data .*, that of .* has data "),
    (HARDEN, "plain", "r3f", "defence R3F.*, that of .* has defence Plain"),
    (HARDEN, "--epochs 1", "--epochs 2", "epochs 2, that of .* has epochs 1"),
    (HARDEN, "--out", "-o batch=2 --out", "batch 2, that of .* has batch 32"),
    (
        HARDEN,
        "--out",
        "-o learning_rate=0.1 --out",
        "rate 0.1, that of .* has rate 2e-05",
    ),
    (HARDEN, "--out", "--seed 1 --out", "seed 1, that of .* has seed 0"),
    (TEXT, "model model", "other other", "model .*, that of .* has "),
    (
        TEXT,
        "--out",
        "--method encoder-states --out",
        "method encoder-states, that of .* has ",
    ),
    (EXTRACT, "target-0", "target-1", "target head:.*, that of .* has target"),
]


@pytest.mark.parametrize(("line", "old", "new", "words"), TABLE)
def test_refused_with_what_differs(line, old, new, words, place, tmp_path, keyhole):
    kept = tmp_path / "kept"
    first = line.format(kept=kept, out=tmp_path / "first")
    assert keyhole(first, cwd=place).returncode in (0, 1)
    before = contents(kept)
    second = line.replace(old, new).format(kept=kept, out=tmp_path / "second")
    done = keyhole(second, cwd=place)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.match(f"keyhole: this run has {words}", line), line
    assert contents(kept) == before  # and left alone


def contents(path):
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {file: file.read_bytes() for file in files if file.is_file()}


def test_more_of_the_same_data_goes_on(place, tmp_path, keyhole):
    def facts(line):
        outcomes = json.loads(keyhole(line, "--json", cwd=place).stdout)["outcomes"]
        # confidences differ in the last digit: batches are put together differently
        return [(each["id"], each["flipped"], each["cut"]) for each in outcomes]

    line = DISRUPT.format(kept=tmp_path / "kept")
    more = line.replace("--examples 2", "--examples 3")
    facts(line)
    shared = facts(more)
    assert len(shared) == 3
    assert shared == facts(more.partition("--resume")[0])
