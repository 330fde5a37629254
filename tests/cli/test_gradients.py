"""`keyhole lab capture --expose gradient` and `keyhole recover` of a batch."""

from __future__ import annotations

import json

import pytest

TEXTS = ("a warm and funny film .", "my test came back positive .")
BATCH = "lab capture demo --expose gradient --out g.safetensors " + " ".join(
    f"--text '{text}'" for text in TEXTS
)


def test_a_batch_is_captured_and_read(keyhole, tmp_path):
    made = keyhole(BATCH, "-o hide=embeddings")
    assert made.returncode == 0, made.stderr
    assert made.stdout == "g.safetensors: the gradient of a batch of 2 texts, float32\n"
    (tmp_path / "true.txt").write_text("\n".join(TEXTS))
    done = keyhole("recover demo g.safetensors --truth true.txt --json")
    assert done.returncode == 1, done.stderr  # given away
    batch = json.loads(done.stdout)
    assert batch["status"] == "recovered"
    assert batch["exact"] == 2
    assert all(text["verified"] for text in batch["texts"])
    words = keyhole("recover demo g.safetensors").stdout
    assert words.startswith("g.safetensors: recovered (2 of 2 texts")
    assert "a warm and funny film." in words


def test_the_batch_is_the_first_texts_of_a_file(keyhole, tmp_path):
    rows = ["sentence\tlabel", f"{TEXTS[0]}\t0", f"{TEXTS[1]}\t1"]
    (tmp_path / "texts.tsv").write_text("\n".join(rows))
    options = "--expose gradient --examples 1 --out g.safetensors"
    made = keyhole("lab capture demo --data texts.tsv", options)
    assert "of a batch of 1 texts" in made.stdout, made.stderr
    batch = json.loads(keyhole("recover demo g.safetensors --json").stdout)
    assert [text["text"] for text in batch["texts"]] == ["a warm and funny film."]
    assert batch["labels"] == [0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--noise 1", "need clip"),
        ("-o hide=heads", "--hide must be one of embeddings, not heads"),
        (
            "--precision int8",
            "--precision must be one of float32, bfloat16, float16, not int8",
        ),
        ("--degrade permuted", "--degrade permuted cannot be done to a gradient"),
        ("-o steps=0", "must be 1 or more, not 0"),
    ],
)
def test_what_makes_no_gradient(keyhole, options, words):
    done = keyhole(BATCH, options)
    assert done.returncode == 2
    assert words in done.stderr


def test_options_of_gradients_alone(keyhole):
    done = keyhole("lab capture demo --text a --expose hidden:1 -o steps=2")
    assert "a capture of hidden:1 has no option 'steps'" in done.stderr
    keyhole(BATCH)
    done = keyhole("recover demo g.safetensors --noise 0.1")
    assert "--noise is not for gradients" in done.stderr
