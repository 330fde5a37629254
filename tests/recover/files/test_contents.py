"""Arrays and files of other programs, read as texts."""

from __future__ import annotations

import os
from itertools import permutations

import numpy as np
import pytest
import torch

import tiny_models as tiny
from keyhole import recover
from keyhole.core.errors import InputError
from keyhole.models import Loaded, identity

FULL = pytest.mark.skipif(
    not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it"
)
TEXTS = ["w1 w20 w3 w4 w99", "w7 w8 w9", "w100 w101 w102 w103"]


def loaded(family, **changes):
    model = tiny.shared(family, **changes)
    return Loaded(
        model, tiny.tokenizer(family in tiny.DECODERS), identity(model), family
    )


def outputs(subject, texts, side="right", **options):
    subject.tokenizer.padding_side = side
    batch = subject.tokenizer(
        texts, padding=True, return_tensors="pt", return_token_type_ids=False
    )
    with torch.no_grad():
        return batch, subject.model(**batch, output_hidden_states=True, **options)


def read(subject, source, **options):
    results = recover.run(subject, source, **options)
    assert all(result.verified for result in results)
    return [result.text for result in results]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_layer_is_found(family):
    # a search at each layer that it is not takes long
    if family == "bert":
        layers = 2
    else:
        layers = 3
    subject = loaded(family, num_hidden_layers=layers)
    _, given = outputs(subject, TEXTS[:1])
    for rows in given.hidden_states:
        result = recover.recover_text(subject.model, subject.tokenizer, rows[0].numpy())
        assert (result.text, result.verified) == (TEXTS[0], True)


def test_all_layers_in_one_array(tmp_path):
    subject = loaded("bert")
    _, given = outputs(subject, TEXTS[:1])
    stacked = torch.stack(given.hidden_states)  # (layers + 1, 1, n, d)
    assert read(subject, stacked) == TEXTS[:1]
    np.save(tmp_path / "states.npy", stacked[:, 0].numpy())  # (layers + 1, n, d)
    assert read(subject, tmp_path / "states.npy") == TEXTS[:1]
    assert read(subject, tmp_path / "states.npy", expose="hidden:2") == TEXTS[:1]
    torch.save(given.hidden_states, tmp_path / "states.pt")
    assert read(subject, tmp_path / "states.pt", expose="hidden:3") == TEXTS[:1]


def test_as_many_texts_as_layers():
    """(4, n, d) of a model of three layers: four texts, or one at all layers."""
    subject = loaded("gpt2")
    texts = ["w1 w2 w3", "w4 w5 w6", "w7 w8 w9", "w10 w11 w12"]
    _, given = outputs(subject, texts)
    assert read(subject, given.hidden_states[2]) == texts
    assert read(subject, given.hidden_states[2], expose="hidden:2") == texts


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_batch_with_its_mask(family, tmp_path):
    subject = loaded(family)
    for side in ("right", "left")[: 2 if family == "llama" else 1]:
        batch, given = outputs(subject, TEXTS, side)
        arrays = {
            "hidden_states": given.hidden_states,
            "attention_mask": batch["attention_mask"],
        }
        torch.save(arrays, tmp_path / "batch.pt")
        for layer in (1, 3):
            assert (
                read(subject, tmp_path / "batch.pt", expose=f"hidden:{layer}") == TEXTS
            )


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_before_a_text_may_count_in_its_positions(family, counted, tmp_path):
    subject = loaded(family)
    subject.tokenizer.padding_side = "left"
    batch = subject.tokenizer(
        TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False
    )
    places = {}  # a plain call counts the padding, and generate() does not
    if not counted:
        places = {"position_ids": (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        given = subject.model(
            **batch, **places, output_hidden_states=True, use_cache=True
        )
    first = given.past_key_values.layers[0]
    for arrays in (
        {"past_key_values.0.0": first.keys, "past_key_values.0.1": first.values},
        {"hidden_states.1": given.hidden_states[1]},
        {"hidden_states.1": given.hidden_states[1], "input_ids": batch["input_ids"]},
    ):
        torch.save(
            {**arrays, "attention_mask": batch["attention_mask"]}, tmp_path / "batch.pt"
        )
        assert read(subject, tmp_path / "batch.pt") == TEXTS


def test_padding_counts_in_an_encoder_as_well():
    subject = loaded("bert")
    batch, given = outputs(subject, TEXTS[:2], "left")
    arrays = {
        "hidden": given.hidden_states[1],
        "attention_mask": batch["attention_mask"],
    }
    assert read(subject, arrays, expose="hidden:1") == TEXTS[:2]


def test_texts_of_many_lengths_in_a_list():
    subject = loaded("bert")
    rows = [outputs(subject, [text])[1].hidden_states[2][0] for text in TEXTS]
    assert read(subject, [array.numpy() for array in rows]) == TEXTS


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_caches(family, tmp_path):
    subject = loaded(family)
    _, given = outputs(subject, TEXTS[:1], use_cache=True)
    cache = given.past_key_values
    torch.save(cache, tmp_path / "cache.pt")
    torch.save(
        tuple((layer.keys, layer.values) for layer in cache.layers),
        tmp_path / "tuple.pt",
    )
    for name in ("cache.pt", "tuple.pt"):
        assert read(subject, tmp_path / name) == TEXTS[:1]
        assert read(subject, tmp_path / name, expose="kv:2") == TEXTS[:1]
    one_layer = torch.stack([cache.layers[1].keys, cache.layers[1].values])
    assert read(subject, one_layer) == TEXTS[:1]  # which layer is found out
    halves = {
        "keys": cache.layers[1].keys.bfloat16(),
        "values": cache.layers[1].values.bfloat16(),
    }
    assert read(subject, halves, expose="kv:1") == TEXTS[:1]


SOON = ("llama", 1, 2)
WRONG = [
    pytest.param(
        family, layer, other, marks=() if (family, layer, other) == SOON else FULL
    )
    for family in ("bert", "llama")
    for layer, other in permutations(range(4), 2)
]


@pytest.mark.parametrize(("family", "layer", "other"), WRONG)
def test_a_wrong_layer_is_never_verified(family, layer, other):
    subject = loaded(family)
    _, given = outputs(subject, TEXTS[:1])
    (result,) = recover.run(
        subject, given.hidden_states[layer], expose=f"hidden:{other}"
    )
    assert not result.verified


def test_rows_of_no_layer_are_refused():
    subject = loaded("gpt2")
    noise = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    with pytest.raises(
        InputError,
        match=r"no text explains these numbers at hidden:.*say what it is with --expo",
    ):
        recover.run(subject, noise)


def test_ids_in_the_file_are_checked_and_not_attacked():
    subject = loaded("gpt2")
    batch, given = outputs(subject, TEXTS[:2])
    arrays = {"hidden_states": given.hidden_states, **batch}
    first, second = recover.run(subject, arrays, expose="hidden:2")
    assert (first.method, first.verified, first.text) == ("WrittenIds", True, TEXTS[0])
    assert second.text == TEXTS[1]
    batch["input_ids"][0, 1] += 1
    changed, second = recover.run(subject, arrays, expose="hidden:2")
    assert not changed.verified
    assert second.verified
    again = recover.run(subject, arrays, expose="hidden:2", method="decoder-states")
    assert [result.text for result in again] == TEXTS[:2]


def test_leaks_of_another_model_are_refused():
    subject = loaded("bert")
    _, given = outputs(subject, TEXTS[:1])
    states = {"hidden_states": given.hidden_states[:2]}
    wrong = {
        "is it another model's": (np.zeros((5, 31), np.float32), None),
        "of int64: is it another": (np.zeros((5, 32), np.int64), None),
        "the file holds hidden:0, hidden:1": (states, "hidden:3"),
        "must be from 0 to 3": (given.hidden_states[1], "hidden:9"),
        "expected mask of shape": (
            {**states, "attention_mask": torch.ones(2, 9)},
            None,
        ),
        "only padding": (
            {**states, "attention_mask": torch.zeros(1, 7, dtype=torch.long)},
            None,
        ),
        "a, b are of several kinds": (
            {"a": torch.ones(3, 32), "b": torch.ones(3, 4, 32)},
            None,
        ),
    }
    for words, (arrays, expose) in wrong.items():
        with pytest.raises(InputError, match=words) as raised:
            recover.run(subject, arrays, expose=expose)
        assert "\n" not in str(raised.value)
