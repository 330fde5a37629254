"""The text of each token, and whether a text was recovered to the character."""

from __future__ import annotations

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tiny_models as tiny
from keyhole.models.demo import load_demo
from keyhole.models.pieces import decoded, unknown_token, written
from keyhole.recover.originals import Original


@pytest.fixture(scope="module")
def wordpiece():
    return load_demo().tokenizer


@pytest.fixture(scope="module")
def bytes_only():
    """A tokenizer like GPT-2's before its first merge: one token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE({letter: id_ for id_, letter in enumerate(letters)}, [])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.fixture(scope="module")
def byte_fallback():
    """A tokenizer like Llama's: bytes for what it has no token for."""
    table = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "<unk>": 257}
    inner = Tokenizer(models.BPE(table, [], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>"
    )


def test_a_character_is_written_where_it_is_complete(bytes_only, byte_fallback):
    ids = bytes_only("né 日😀!")["input_ids"]
    assert written(bytes_only, ids) == [
        *"n",
        "",
        "é",
        " ",
        "",
        "",
        "日",
        "",
        "",
        "",
        "😀",
        "!",
    ]
    assert decoded(bytes_only, ids) == "né 日😀!"
    assert written(byte_fallback, byte_fallback("aéa")["input_ids"]) == [
        "a",
        "",
        "é",
        "a",
    ]


def test_bytes_that_make_no_character_are_spelled(bytes_only, byte_fallback):
    n, high, low = bytes_only("né")["input_ids"]
    assert written(bytes_only, [n, high]) == ["n", "\\xc3"]
    assert written(bytes_only, [high, n, low, high, low]) == [
        "\\xc3",
        "n",
        "\\xa9",
        "",
        "é",
    ]
    assert decoded(bytes_only, [n, high]) == "n\\xc3"
    assert written(byte_fallback, [256, 0xC3]) == ["a", "\\xc3"]
    for tokenizer in (bytes_only, byte_fallback):
        for id_ in range(256):
            assert "\ufffd" not in "".join(written(tokenizer, [id_, 200, id_]))


def test_pieces_make_the_text(wordpiece):
    ids = wordpiece("nobody must read this , please .")["input_ids"]
    pieces = written(wordpiece, ids)
    assert (
        "".join(pieces) == decoded(wordpiece, ids) == "nobody must read this, please."
    )
    assert pieces[0] == pieces[-1] == ""  # special tokens


def test_the_unknown_token_is_shown(wordpiece):
    ids = wordpiece("a 日 film .")["input_ids"]
    assert decoded(wordpiece, ids) == "a [UNK] film."
    assert written(wordpiece, ids) == ["", "a", " [UNK]", " film", ".", ""]
    assert unknown_token(wordpiece) == wordpiece.unk_token_id
    gpt2 = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1})),
        unk_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    assert unknown_token(gpt2) is None


def test_exact_is_every_character_up_to_the_normaliser(wordpiece):
    original = Original.of(wordpiece, "Nobody must  read thïs , please.", 64)
    assert original.notes == ()
    assert original.is_exactly(wordpiece, original.ids)
    other = [*original.ids]
    other[3] = wordpiece.convert_tokens_to_ids("film")
    assert not original.is_exactly(wordpiece, other)


def test_characters_without_a_token_are_not_recovered(wordpiece):
    original = Original.of(wordpiece, "a 日 and 本 , 国 , 語 film", 64)
    assert original.notes == ("the tokenizer knows no token for 日, 本, 国 and 1 more",)
    assert not original.is_exactly(wordpiece, original.ids)


def test_tokens_that_were_cut_off_are_not_recovered(wordpiece):
    original = Original.of(wordpiece, "a film " * 20, 16)
    assert len(original.ids) == 16
    assert original.notes == ("cut off after 16 of 42 tokens",)
    assert not original.is_exactly(wordpiece, original.ids)


def test_characters_that_the_tokenizer_drops_are_noticed():
    inner = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    assert Original.of(words, "abba", 9).is_exactly(words, [0, 1, 1, 0])
    lossy = Original.of(words, "abcba", 9)
    assert lossy.notes == ("the tokenizer does not keep all of its characters",)
    assert not lossy.is_exactly(words, lossy.ids)


def test_words_of_a_tiny_model():
    words = tiny.tokenizer()
    original = Original.of(words, "w1 w2 nobody", 9)
    assert original.notes == ("the tokenizer knows no token for nobody",)
    assert decoded(words, original.ids) == "w1 w2 [UNK]"
