"""A corrector is trained on an encoder's own outputs, kept in a file, and used by the search."""

from __future__ import annotations

import random

import pytest
import torch

from command_line import inside
from keyhole.models.demo import NOTES, load_demo
from keyhole.recover import leak_of
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.corrector import aligned, load_corrector, train
from keyhole.recover.embeddings.counts import Counted, corpus_texts
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.embeddings.sum_search import SumSearch
from reference import edit_distance

NONE = 0


def drawn(count, longest, seed):
    stream = random.Random(seed)
    return [[stream.randint(5, 9) for _ in range(stream.randint(1, longest))] for _ in range(count)]


def test_the_answers_are_those_of_the_fewest_changes():
    texts, truths = drawn(60, 6, 0), drawn(60, 7, 1)
    wanted, missing = aligned(Texts.of(texts, 6), Texts.of(truths, 7), NONE)
    for row, (text, truth) in enumerate(zip(texts, truths, strict=True)):
        kept = wanted[row, : len(text)].tolist()
        gaps = missing[row, : len(text) + 1].tolist()
        put_in = sum(token != NONE for token in gaps)
        changed = sum(token != own for token, own in zip(kept, text, strict=True))
        assert changed + put_in <= edit_distance(text, truth)
        if len(truth) - sum(token != NONE for token in kept) == put_in:  # one token in a gap
            made = [token for pair in zip(gaps, [*kept, NONE], strict=True) for token in pair]
            assert [token for token in made if token != NONE] == truth


@pytest.fixture(scope="module")
def trained(encoder):
    lines = [torch.randint(5, 40, (4,)).tolist() for _ in range(200)]
    encoder = Encoder(encoder.target)
    counted = Counted.of(encoder, lines, 5)
    return counted, train(counted, lines, 5, 1.0)


def test_it_is_kept_with_its_whitening_and_its_texts(trained, encoder, tmp_path):
    counted, corrector = trained
    corrector.save(tmp_path / "kept.safetensors", counted.encoder, ["one", "two"])
    other = Encoder(encoder.target)
    loaded = load_corrector(tmp_path / "kept.safetensors", other)
    assert corpus_texts(tmp_path / "kept.safetensors") == ["one", "two"]
    texts = counted.lines[:3]
    goals, vectors = (counted.encoder.vectors(part) for part in (counted.lines[3:6], texts))
    assert torch.allclose(other.vectors(texts), vectors, atol=1e-5)
    for ours, theirs in zip(
        corrector.likeliest(texts, vectors, goals, 3),
        loaded.likeliest(texts, vectors, goals, 3),
        strict=True,
    ):
        assert torch.allclose(ours[0], theirs[0], atol=0.02)  # kept in half precision


def test_the_search_takes_it(trained):
    counted, corrector = trained
    goals = counted.vectors[:2]
    readings = SumSearch(passes=300, rounds=3)(
        counted.encoder, goals, counted, 5, corrector=corrector
    )
    assert [reading.tokens for reading in readings] == [counted.lines.tokens(k) for k in (0, 1)]


def test_one_of_another_encoder_is_refused(trained, tmp_path):
    counted, corrector = trained
    corrector.save(tmp_path / "kept.safetensors", counted.encoder, ["one"])
    demo = load_demo()
    with pytest.raises(ValueError, match="was not trained for this encoder"):
        load_corrector(
            tmp_path / "kept.safetensors", Encoder(Target.of(demo.model, demo.tokenizer))
        )


def test_the_command_trains_one_that_recover_reads_with(tmp_path, monkeypatch, capsys):
    def keyhole(*words):
        return inside(*words, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)

    demo = load_demo()
    leak_of(demo.model, demo.tokenizer, NOTES[0], "pooled").save(tmp_path / "leak.safetensors")
    (tmp_path / "own.txt").write_text(f"this is no secret .\n{NOTES[0]}\nan old coin\n")
    done = keyhole(
        "lab", "corrector", "demo", "--corpus", "own.txt", "--out", "own.safetensors",
        "--max-length", "12", "-o", "seconds=0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "a corrector trained on 3 texts" in done.stdout
    done = keyhole("recover", "demo", "leak.safetensors", "--corpus", "own.safetensors")
    assert done.returncode == 1, done.stderr
    assert NOTES[0] in done.stdout
