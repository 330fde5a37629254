"""One vector of any kind is read with counts of a corpus, by default the one that ships."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import tiny_models as tiny
from keyhole.audit import Audit
from keyhole.core import Status
from keyhole.data import read_texts
from keyhole.models.capture import Exposure
from keyhole.models.demo import NOTES, TEXTS, load_demo
from keyhole.recover import leak_of, recover_texts
from keyhole.recover.embeddings.counts import SHIPPED
from keyhole.recover.embeddings.pooling import embeddings
from keyhole.recover.embeddings.reader import CountedReader, beginnings
from keyhole.recover.embeddings.sum_search import SumSearch
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


def test_a_short_text_is_read_with_a_corpus(keyhole, tmp_path):
    demo = load_demo()
    leak = leak_of(demo.model, demo.tokenizer, NOTES[0], "pooled")
    leak.save(tmp_path / "leak.safetensors")
    (tmp_path / "own.txt").write_text(f"this is no secret .\n{NOTES[0]}\nan old coin\n")
    done = keyhole("recover demo leak.safetensors --corpus own.txt")
    assert done.returncode == 1, done.stderr
    assert NOTES[0] in done.stdout
    words = "recovered (cosine 1.000000, within its precision (float32); read with counts of the "
    assert f"{words}corpus, nothing learnt)" in " ".join(done.stdout.split())


def test_a_store_is_read_without_a_corpus(keyhole, tmp_path):
    demo = load_demo()
    note = min(NOTES, key=len)
    vectors = embeddings(demo.model, demo.tokenizer, [note], Exposure("pooled"))
    name = jsonl(tmp_path, vectors.float().numpy(), [note])
    done = keyhole("audit", name, "--model demo")
    assert done.returncode == 1, done.stderr
    (finding,) = Audit.load(tmp_path / "keyhole-vectors.jsonl.json").findings
    assert (finding.status, finding.attack) == (Status.RECOVERED, "CountedReader")
    assert finding.reason.endswith(READ_WITH)


def test_its_settings_follow_from_the_corpus():
    first = CountedReader()
    second = CountedReader(["a text"])
    assert first.settings["corpus"] != second.settings["corpus"]
    assert first.settings == CountedReader(SHIPPED).settings


LINES = [
    " ".join(f"w{(k * j + k) % 40}" for j in range(1, 2 + k % 3)) for k in range(1, 200)
]
SECRETS = ["w31 w2", "w8 w27"]
KINDS = {
    "the last state of a decoder": ("gpt2", Exposure("pooled", pooling="last")),
    "[CLS] alone": ("bert", Exposure("pooled", pooling="cls")),
    "the maximum": ("bert", Exposure("pooled", pooling="max", normalised=False)),
    "next-token logits": ("gpt2", Exposure("logits")),
    "those of another family": ("qwen3", Exposure("logits")),
    "log-probabilities": ("llama", Exposure("logits", log_probabilities=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_vector_of_any_kind_is_read(kind):
    family, exposure = KINDS[kind]
    causal = family in tiny.DECODERS
    model = tiny.language_model(family) if causal else tiny.model(family)
    words = tiny.tokenizer(causal)
    attack = CountedReader(LINES, max_length=2, search=SumSearch(passes=4_000))
    leaks = [leak_of(model, words, text, exposure) for text in SECRETS]
    recoveries = recover_texts(model, words, leaks, method=attack)
    assert [recovery.text for recovery in recoveries] == SECRETS
    assert all(recovery.verified for recovery in recoveries)


def test_beginnings_are_of_every_line_and_of_all_lengths():
    lines = [list(range(9))] * 200
    made = beginnings(lines, 4)
    assert {len(line) for line in made} == {1, 2, 3, 4}
    assert all(line == lines[0][: len(line)] for line in made)
    assert made == beginnings(lines, 4)


def test_one_token_is_proposed_for_a_repeated_token():
    """Attention over equal values is that value: the state does not say how often it stood."""
    model = tiny.language_model("llama")
    words = tiny.tokenizer(causal=True)
    attack = CountedReader(
        ["w5 w5", "w7 w7 w7", "w5 w7"], max_length=3, search=SumSearch(passes=500)
    )
    leak = replace(leak_of(model, words, "w7 w7", Exposure("logits")), tokens=None)
    (recovery,) = recover_texts(model, words, [leak], method=attack)
    assert recovery.text == "w7"
    assert not recovery.verified
