"""The tokens, names and numbers that an inexact recovery shares with the text."""

from __future__ import annotations

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

import tiny_models as tiny
from keyhole.models.demo import load_demo
from keyhole.recover.originals import Original, names_and_numbers

WORDS = tiny.tokenizer()


@pytest.mark.parametrize(
    ("given", "f1"),
    [
        ("w1 w2 w3", 1.0),
        ("w3 w2 w1", 1.0),
        ("w1 w1 w4", 2 / 6),
        ("w1", 2 / 4),
        ("w4 w5", 0.0),
    ],
)
def test_tokens_count_once_wherever_they_stand(given, f1):
    original = Original.of(WORDS, "w1 w2 w3", 20)
    assert original.shared(WORDS, WORDS(given)["input_ids"]).f1 == pytest.approx(f1)


def test_a_space_that_the_tokenizer_puts_before_a_text_costs_no_exactness():
    """A server may put a space before the first word."""
    vocabulary = {
        letter: number for number, letter in enumerate(bytes_to_unicode().values())
    }
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    bytes_ = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    original = Original.of(bytes_, "meet me", 30)
    for spaced, exact in (
        (" meet me", True),
        ("meet me ", True),
        ("  meet me", False),
        ("meet  me", False),
        ("meetme", False),
    ):
        assert original.is_exactly(bytes_, bytes_(spaced)["input_ids"]) is exact, spaced


def test_names_are_capitalised_within_a_sentence_and_numbers_have_digits():
    text = 'Dear Anna, the 3 letters of May went to "Bob". They left! Room 12b. I know, Anna.'
    assert names_and_numbers(text) == ["Anna", "3", "May", "Bob", "12b"]
    assert names_and_numbers("nobody said anything") == []


def test_names_come_back_in_the_tokenizers_own_writing():
    tokenizer = load_demo().tokenizer
    original = Original.of(tokenizer, "we met Paul in room 7", 30)
    shared = original.shared(
        tokenizer, tokenizer("room 7 was where we met")["input_ids"]
    )
    assert (shared.read, shared.named) == (1, 2)
    assert str(shared).endswith(", 1 of 2 names and numbers")
    assert (
        str(Original.of(WORDS, "w1", 9).shared(WORDS, [5]))
        == "token F1 0.00, 0 of 1 names and numbers"
    )
    assert original.shared(tokenizer, []).f1 == 0
