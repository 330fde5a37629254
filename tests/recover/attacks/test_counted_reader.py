"""Without a corpus of one's own: the one that ships reads short texts of the demo's classifier."""

from __future__ import annotations

import re

import pytest

from command_line import inside
from keyhole.audit import Audit
from keyhole.data import read_texts
from keyhole.models.capture import Exposure
from keyhole.models.demo import NOTES, TEXTS, load_demo
from keyhole.recover.attacks.counted_reader import CountedReader
from keyhole.recover.embedding.counted import SHIPPED
from keyhole.recover.pooling import embeddings
from keyhole.recover.simulate import leak_of
from keyhole.results import Status
from made_stores import jsonl

READ_WITH = "read with counts of the corpus that ships"


def runs(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + 3]) for start in range(len(words) - 2)}


def test_the_corpus_that_ships_is_sentences_and_none_of_what_the_demo_reads():
    lines = read_texts(SHIPPED)
    assert len(lines) == len(set(lines)) > 1_000
    assert all(line == line.strip() and line[-1] in ".?!" for line in lines)
    read_back = set().union(*map(runs, (*TEXTS, *NOTES)))
    assert not [line for line in lines if runs(line) & read_back]


@pytest.fixture
def keyhole(tmp_path, monkeypatch, capsys):
    return lambda *words: inside(*words, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)


def test_a_short_text_is_read_without_a_corpus_and_with_one(keyhole, tmp_path):
    demo = load_demo()
    leak_of(demo.model, demo.tokenizer, NOTES[0], "pooled").save(tmp_path / "leak.safetensors")
    done = keyhole("invert", "text", "demo", "leak.safetensors")
    assert done.returncode == 1, done.stderr
    assert f"recovered (cosine 1.000000, within its precision (float32); {READ_WITH})" in (
        " ".join(done.stdout.split())
    )
    assert NOTES[0] in done.stdout
    (tmp_path / "own.txt").write_text(f"this is no secret .\n{NOTES[0]}\nan old coin\n")
    done = keyhole("invert", "text", "demo", "leak.safetensors", "--corpus", "own.txt")
    assert READ_WITH not in done.stdout
    assert "read with counts of the corpus, nothing learnt" in done.stdout


def test_a_store_is_read_without_a_corpus(keyhole, tmp_path):
    demo = load_demo()
    vectors = embeddings(demo.model, demo.tokenizer, NOTES, Exposure("pooled")).float().numpy()
    name = jsonl(tmp_path, vectors, list(NOTES))
    done = keyhole("audit", name, "--model", "demo")
    assert done.returncode == 1, done.stderr
    (finding,) = Audit.load(tmp_path / "keyhole-report.json").findings
    assert (finding.status, finding.attack) == (Status.RECOVERED, "CountedReader")
    assert finding.reason.endswith(READ_WITH)


def test_its_settings_follow_from_the_corpus():
    first, second = CountedReader(), CountedReader(["a text"])
    assert first.settings["corpus"] != second.settings["corpus"]
    assert first.settings == CountedReader(SHIPPED).settings
