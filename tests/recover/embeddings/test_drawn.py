"""Texts that a language model writes: whole sentences, each once, the same again."""

from __future__ import annotations

from functools import partial

import pytest

import tiny_models as tiny
from keyhole.core.errors import InputError, KeyholeError
from keyhole.models import load_model
from keyhole.recover.embeddings.drawn import draw_texts, whole_sentences

BEGINS = ["w1 w2", "w3"]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny.save("llama", folder, head="AutoModelForCausalLM")
    return load_model(folder, task="causal")


def test_sentences_that_end_are_kept():
    text = "It rains. Who knows?\nNobody does! And then it"
    whole = ["It rains.", "Who knows?", "Nobody does!"]
    assert list(whole_sentences(text, ended=False)) == whole
    assert list(whole_sentences(f"A headline\n{text}", ended=True)) == whole
    assert list(whole_sentences("no stop", ended=True)) == ["no stop"]
    assert list(whole_sentences("no end", ended=False)) == []
    assert list(whole_sentences("... \n 12 .", ended=True)) == []


def test_texts_differ_begin_as_told_and_come_again(language_model):
    texts = draw_texts(language_model, 6, begins=BEGINS, max_length=10, seed=3)
    assert len(texts) == len(set(texts)) == 6
    assert all(text.startswith(("w1 w2", "w3")) for text in texts)
    assert texts == draw_texts(language_model, 6, begins=BEGINS, max_length=10, seed=3)
    assert texts != draw_texts(language_model, 6, begins=BEGINS, max_length=10, seed=4)


def test_a_run_goes_on_where_it_stopped(language_model, tmp_path, monkeypatch):
    batches, generate = [], language_model.model.generate

    def counted(**given):
        batches.append(given["input_ids"])
        return generate(**given)

    def stopping(name, total):
        def stop(done):
            raise KeyboardInterrupt

        return stop

    monkeypatch.setattr(language_model.model, "generate", counted)
    draw = partial(draw_texts, language_model, 12, begins=BEGINS, max_length=10)
    whole = draw()
    needed = len(batches)
    assert needed > 1
    journal = tmp_path / "texts.journal"
    with pytest.raises(KeyboardInterrupt):
        draw(journal=journal, track=stopping)
    assert len(batches) == needed + 1
    assert draw(journal=journal) == whole
    assert len(batches) == 2 * needed  # the first is not drawn again
    with pytest.raises(InputError, match="seed"):
        draw(journal=journal, seed=1)


def test_sentences_begin_with_words(language_model):
    with pytest.raises(InputError, match="begins must not hold empty words"):
        draw_texts(language_model, 5, begins=["w1", " "])


def test_a_model_that_ends_no_sentence_is_told(language_model, monkeypatch):
    """One that never writes the token at which a text ends, and knows no full stop."""
    ends = [language_model.tokenizer.sep_token_id]
    monkeypatch.setattr(language_model.model.generation_config, "suppress_tokens", ends)
    with pytest.raises(KeyholeError, match="wrote no whole sentence in 20 tries"):
        draw_texts(language_model, 5, begins=BEGINS, max_length=3)
