"""The pooling of embeddings, found from a known text or guessed from many vectors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.models.capture import POOLINGS, Exposure, capture
from keyhole.recover.embeddings.pooling import (
    embeddings,
    encoder_max_length,
    from_known,
    from_settings,
    from_statistics,
    from_texts,
    likely_prefix,
    ways,
)
from keyhole.recover.simulate import MAX_LENGTH, degrade, leak_of

TEXTS = ["w1 w20 w3 w4", "w9 w8", "w77 w66 w3 w12 w14"]
OTHERS = ["w5 w6 w7", "w100 w101", "w150 w2 w3 w4 w5", "w11 w12 w13 w14"]
MODEL = tiny.model("bert", num_hidden_layers=1)
WORDS = tiny.tokenizer()


@pytest.mark.parametrize(
    "way", ways(MODEL), ids=lambda way: f"{way.pooling} {way.normalised}"
)
def test_every_pooling_is_found(way):
    vectors = embeddings(MODEL, WORDS, TEXTS, way)
    pooling = from_texts(MODEL, WORDS, TEXTS, vectors)
    assert (pooling.exposure.pooling, pooling.exposure.normalised) == (
        way.pooling,
        way.normalised,
    )
    assert pooling.sure
    assert pooling.error == 0.0
    # The same where nobody knows which of the vectors they are.
    among = torch.cat([embeddings(MODEL, WORDS, OTHERS, way), vectors[:1]])
    batches = [(range(4), among[:4]), (range(4, 5), among[4:])]
    known = from_known(MODEL, WORDS, TEXTS[:1], batches)
    assert (known.exposure.pooling, known.exposure.normalised, known.sure) == (
        way.pooling,
        way.normalised,
        True,
    )


@pytest.mark.parametrize("prefix", ["", "w30 w31 "])
def test_a_prefix_is_found(prefix, tmp_path, monkeypatch):
    begun = [prefix + text for text in TEXTS]
    vectors = embeddings(MODEL, WORDS, begun, Exposure("pooled"))
    prefixes = ("", "w40 ", "w30 w31 ")
    for pooling in (
        from_texts(MODEL, WORDS, TEXTS, vectors, prefixes=prefixes),
        from_known(MODEL, WORDS, TEXTS, [(range(3), vectors)], prefixes=prefixes),
    ):
        assert (pooling.prefix, pooling.sure) == (prefix, True)
        assert ('begin with "w30 w31"' in pooling.reason) == bool(prefix)
    # Without known texts: where the encoder says which words it wants.
    assert likely_prefix(MODEL, WORDS, OTHERS, vectors, Exposure("pooled")) == ""
    prompts = {"prompts": {"query": "w40 ", "document": "w30 w31 ", "other": ""}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    monkeypatch.setattr(MODEL, "name_or_path", str(tmp_path))
    assert likely_prefix(MODEL, WORDS, OTHERS, vectors, Exposure("pooled")) == prefix


@pytest.mark.parametrize(
    "way",
    [way for way in ways(MODEL, 20) if way.pooling == "mean"],
    ids=lambda way: f"{way.pooling} {way.normalised} {way.unit}",
)
def test_the_first_numbers_of_every_pooling_are_found(way):
    vectors = embeddings(MODEL, WORDS, TEXTS, way)
    assert vectors.shape == (3, 20)
    pooling = from_texts(MODEL, WORDS, TEXTS, vectors, width=20)
    assert pooling.exposure == way
    assert pooling.error == 0.0
    assert "truncated to the first 20 numbers" in pooling.reason
    known = from_known(MODEL, WORDS, TEXTS[:1], [(range(3), vectors)], width=20)
    assert known.exposure == way


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_lengths_of_truncated_vectors_show_what_was_normalised(
    normalised, unit, tmp_path
):
    way = Exposure("pooled", 0, "mean", normalised, 20, unit)
    vectors = embeddings(MODEL, WORDS, OTHERS, way)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    for pooling in (
        from_statistics(MODEL, WORDS, TEXTS, vectors, 20),
        from_settings(tmp_path, vectors, 20),
    ):
        assert (pooling.exposure.pooling, pooling.exposure.width, pooling.sure) == (
            "mean",
            20,
            False,
        )
        assert (pooling.exposure.normalised, pooling.exposure.unit) == (
            normalised or unit,
            unit,
        )


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_rounding_does_not_matter(precision):
    leaks = [
        degrade(leak_of(MODEL, WORDS, text, "pooled"), precision) for text in TEXTS
    ]
    vectors = torch.stack([leak.tensors["values"] for leak in leaks])
    pooling = from_texts(MODEL, WORDS, TEXTS, vectors)
    assert (pooling.exposure.pooling, pooling.exposure.normalised, pooling.sure) == (
        "mean",
        True,
        True,
    )


def test_another_encoder_is_noticed():
    vectors = embeddings(tiny.model("bert", seed=1), WORDS, TEXTS, Exposure("pooled"))
    pooling = from_texts(MODEL, WORDS, TEXTS, vectors)
    assert not pooling.sure
    assert pooling.reason.startswith("no pooling of this encoder gives the vectors of")


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("name", ["mean", "last"])
def test_a_guess_says_that_it_is_one(name, normalised):
    vectors = embeddings(MODEL, WORDS, OTHERS, Exposure("pooled", 0, name, normalised))
    pooling = from_statistics(MODEL, WORDS, TEXTS, vectors)
    assert (pooling.exposure.pooling, pooling.exposure.normalised) == (name, normalised)
    assert not pooling.sure
    assert pooling.reason.startswith("guessed")
    vectors[3] = 0  # what programs store for a text that they did not embed
    assert from_statistics(MODEL, WORDS, TEXTS, vectors).exposure == pooling.exposure


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode": "weightedmean"}, None),
        ([], None),
    ],
)
def test_settings_of_an_encoder(settings, name, tmp_path):
    vectors = embeddings(MODEL, WORDS, TEXTS, Exposure("pooled", 0, "mean", False))
    assert from_settings(tmp_path, vectors) is None
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    pooling = from_settings(tmp_path, vectors)
    assert (None if pooling is None else pooling.exposure.pooling) == name
    assert pooling is None or not (pooling.exposure.normalised or pooling.sure)


def test_settings_that_name_no_pooling(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(InputError, match="does not hold the settings of a pooling"):
        from_settings(tmp_path, torch.ones(1, 2))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "name", [name for name in POOLINGS if name not in ("cls", "pooler")]
)
def test_padding_does_not_change_an_embedding(name, side):
    """Against a loop over the positions of the text, on states of the whole batch."""
    ids = tiny.ids(texts=3, length=7)
    mask = torch.ones_like(ids)
    spared = slice(0, 2) if side == "left" else slice(5, 7)
    mask[1, spared] = 0
    states = (
        capture(MODEL, Exposure("hidden", 1), ids=ids, mask=mask)["values"]
        .double()
        .numpy()
    )
    way = Exposure("pooled", 0, name, normalised=False)
    pooled = capture(MODEL, way, ids=ids, mask=mask)["values"].double().numpy()
    for row in range(3):
        text = [states[row, place] for place in range(7) if mask[row, place]]
        expected = {
            "mean": sum(text) / len(text),
            "last": text[-1],
            "max": np.max(text, axis=0),
        }
        assert np.abs(pooled[row] - expected[name]).max() < 1e-6


def test_a_text_is_cut_off_where_its_encoder_cuts_it(tmp_path):
    """all-MiniLM-L6-v2 reads 256 tokens of 512: what comes after them is in no vector."""
    settings = tmp_path / "sentence_bert_config.json"
    assert encoder_max_length(tmp_path) == MAX_LENGTH
    settings.write_text('{"max_seq_length": 4, "do_lower_case": false}')
    assert encoder_max_length(tmp_path) == 4
    texts = ["w1 w2 w3 w4", "w9 w8 w7 w6 w5"]  # four: two of their words and the frame
    way = Exposure("pooled", 0, "mean", True)
    vectors = embeddings(MODEL, WORDS, ["w1 w2", "w9 w8"], way)
    assert torch.equal(embeddings(MODEL, WORDS, texts, way, 4), vectors)
    assert from_texts(MODEL, WORDS, texts, vectors, 4).sure
    assert not from_texts(MODEL, WORDS, texts, vectors).sure
    assert from_known(MODEL, WORDS, texts, [(range(2), vectors)], 4).sure
    for wrong in ('{"max_seq_length": "4"}', '{"max_seq_length": 0}', "{"):
        settings.write_text(wrong)
        with pytest.raises(InputError, match="sentence_bert_config"):
            encoder_max_length(tmp_path)
    settings.write_text('{"max_seq_length": null}')
    assert encoder_max_length(tmp_path) == MAX_LENGTH
