"""Texts that a language model writes: whole sentences, each once, the same again."""

from __future__ import annotations

import pytest

import tiny_models as tiny
from keyhole.core.errors import InputError, KeyholeError
from keyhole.models import load_model
from keyhole.recover.embeddings import drawn
from keyhole.recover.embeddings.drawn import draw_texts

BEGINS = ["w1 w2", "w3"]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setitem(drawn._BATCH_SIZE, "cpu", 32)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny.save("llama", folder, head="AutoModelForCausalLM")
    return load_model(folder, task="causal")


def test_sentences_that_end_are_kept():
    text = "It rains. Who knows?\nNobody does! And then it"
    whole = ["It rains.", "Who knows?", "Nobody does!"]
    assert list(drawn._whole_sentences(text, ended=False)) == whole
    assert list(drawn._whole_sentences(f"A headline\n{text}", ended=True)) == whole
    assert list(drawn._whole_sentences("no stop", ended=True)) == ["no stop"]
    assert list(drawn._whole_sentences("no end", ended=False)) == []
    assert list(drawn._whole_sentences("... \n 12 .", ended=True)) == []


def test_texts_differ_begin_as_told_and_come_again(language_model):
    texts = draw_texts(language_model, 6, begins=BEGINS, max_length=10, seed=3)
    assert len(texts) == len(set(texts)) == 6
    assert all(text.startswith(("w1 w2", "w3")) for text in texts)
    assert texts == draw_texts(language_model, 6, begins=BEGINS, max_length=10, seed=3)
    assert texts != draw_texts(language_model, 6, begins=BEGINS, max_length=10, seed=4)


def test_a_run_goes_on_where_it_stopped(language_model, tmp_path, monkeypatch):
    whole = draw_texts(language_model, 12, begins=BEGINS, max_length=10)
    batches: list[int] = []
    batch = drawn._batch

    def stopped(loaded, begins, max_length, seed):
        if len(batches) == 1:
            raise KeyboardInterrupt
        batches.append(seed)
        return batch(loaded, begins, max_length, seed)

    monkeypatch.setattr(drawn, "_batch", stopped)
    journal = tmp_path / "texts.journal"
    with pytest.raises(KeyboardInterrupt):
        draw_texts(language_model, 12, begins=BEGINS, max_length=10, journal=journal)
    monkeypatch.setattr(drawn, "_batch", batch)
    assert draw_texts(language_model, 12, begins=BEGINS, max_length=10, journal=journal) == whole
    with pytest.raises(InputError, match="seed"):
        draw_texts(language_model, 12, begins=BEGINS, max_length=10, journal=journal, seed=1)


def test_sentences_begin_with_words(language_model):
    with pytest.raises(InputError, match="begins must not hold empty words"):
        draw_texts(language_model, 5, begins=["w1", " "])


def test_a_model_that_ends_no_sentence_is_told(language_model, monkeypatch):
    monkeypatch.setattr(drawn, "_batch", lambda *_: [])
    with pytest.raises(KeyholeError, match="wrote no whole sentence"):
        draw_texts(language_model, 5, begins=BEGINS)
