"""Tokens of a byte-level tokenizer are shown as characters, not in its own spelling."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

import tiny_models as tiny
from keyhole.audit import audit
from keyhole.audit.texts import TextTarget
from keyhole.models import load_model
from keyhole.models.demo import load_demo
from keyhole.models.pieces import labels
from keyhole.report import render

TEXT = "a good né 日!\nno"
# a space, a line's end, half of an é, no character at all
BROKEN = "ĠĊÃ\ufffd"


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    """A language model with a tokenizer like GPT-2's: bytes, a few merges, and Ġ for a space."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {letter: id_ for id_, letter in enumerate([*letters, "Ġg", "oo"])}
    inner = Tokenizer(BPE(table, [("Ġ", "g"), ("o", "o")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="Ā"
    )
    config = tiny.model("gpt2", vocab_size=len(table)).config
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
    folder = tmp_path_factory.mktemp("bytes") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_bytes_are_shown_as_what_they_spell(bytes_model, keyhole):
    leak = "leak.safetensors"
    made = keyhole(
        f"lab capture {bytes_model} --text '{TEXT}' --expose hidden:1 --out {leak}"
    )
    assert made.returncode == 0, made.stderr
    done = keyhole("recover", bytes_model, leak)
    assert done.returncode == 1, done.stderr
    assert TEXT in done.stdout
    assert not set(BROKEN) & set(done.stdout)


def test_bytes_on_the_page(bytes_model):
    loaded = load_model(bytes_model, task="causal")
    made = audit(TextTarget(loaded, [TEXT], layers=[1], precisions=["float32", "int8"]))
    page = render(made)
    read = [finding for finding in made.findings if finding.texts]
    cuts = [cut for finding in made.findings for cut in finding.cuts]
    assert read
    assert cuts
    shown = [
        piece.text
        for finding in read
        for cell in finding.texts
        for reading in cell.readings
        for piece in reading.pieces
    ]
    shown += [word for cut in cuts for word in (*cut.tokens, cut.before, cut.after)]
    assert not set(BROKEN) & set("".join(shown))
    assert "good" in "".join(shown)
    assert all(token for cut in cuts for token in cut.tokens)
    assert " verified</p>" in page  # how many tokens: a mark is a word too


def test_every_token_has_a_label(bytes_model):
    tokenizer = load_model(bytes_model).tokenizer
    ids = tokenizer(TEXT)["input_ids"]
    expected = r"a g oo d ␣ n \xc3 é ␣ \xe6 \x97 日 ! \n n o"
    assert labels(tokenizer, ids) == expected.split()
    eos = [tokenizer.eos_token, "a"]
    assert labels(tokenizer, [tokenizer.eos_token_id, ids[0]]) == eos


def test_parts_of_words_keep_their_sign():
    tokenizer = load_demo().tokenizer
    ids = tokenizer("edges , fine")["input_ids"]
    assert labels(tokenizer, ids) == tokenizer.convert_ids_to_tokens(ids)
    assert "##s" in labels(tokenizer, ids)
