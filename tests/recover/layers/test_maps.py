"""Text from attention maps: a closed form at layer 1 and a search above it, with rounded maps."""

from __future__ import annotations

import numpy as np
import pytest
import reference_maps as reference
import torch

import tiny_models as tiny
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.models import Exposure, anatomy, capture, identity
from keyhole.recover import (
    EncoderMaps,
    TokenSearch,
    recover_text,
    recover_texts,
    recovering,
)
from keyhole.recover.attack import Target
from keyhole.recover.layers.map_scores import Anchors, LogMaps, Questions
from keyhole.recover.layers.trials import Comparison
from keyhole.recover.leaks import AttentionMaps

TOKENIZER = tiny.tokenizer()
QUICK = EncoderMaps(deeper=TokenSearch(rounds=2, passes=25, candidates=8))


def maps_of(model, ids, layer=1):
    return capture(model, Exposure("maps", layer), ids=ids)["values"]


def rounded(maps, decimals):
    return (maps * 10**decimals).round() / 10**decimals


@pytest.fixture(scope="module")
def bert():
    return tiny.shared("bert")


def right(result, truth):
    return sum(a == b for a, b in zip(result.ids, truth.tolist(), strict=True))


def test_measured_scores_are_the_naive_loops(bert):
    ids = tiny.ids(1, 7)
    states = capture(bert, Exposure("hidden", 0), ids=ids)["values"][0]
    query, key, _ = anatomy(bert).attention(1).apart
    weights = [
        w.detach().double().numpy()
        for w in (query.weight, query.bias, key.weight, key.bias)
    ]
    expected = reference.scores(states.double().numpy(), *weights, heads=4)
    maps = maps_of(bert, ids)[0]
    assert np.allclose(reference.softmax_rows(expected), maps.numpy(), atol=1e-6)

    anchors = Anchors.of(anatomy(bert), 1, states, torch.tensor([0, 3, 6]))
    as_key, as_query = anchors.measure(states)  # (n, h, a)
    assert np.allclose(
        as_key.numpy(), expected[:, [0, 3, 6]].transpose(2, 0, 1), atol=1e-5
    )
    assert np.allclose(
        as_query.numpy(), expected[:, :, [0, 3, 6]].transpose(1, 0, 2), atol=1e-5
    )

    log = LogMaps.of(AttentionMaps(maps, 1), torch.device("cpu"))
    questions = Questions.of(log, anchors)
    assert np.allclose(questions.key_scores[1].numpy(), as_key[1].numpy(), atol=1e-4)
    assert (
        float(questions.misfit(as_key, as_query).max() / questions.numbers().min())
        < 0.5
    )


def test_the_loss_is_the_naive_loops(bert):
    ids = tiny.ids(2, 6)
    maps = maps_of(bert, ids, 2)
    comparison = Comparison.of(Target.of(bert, TOKENIZER), AttentionMaps(maps[0], 2))
    expected = reference.centred_difference(
        maps[1].double().numpy(), maps[0].double().numpy()
    )
    assert comparison.losses(ids).tolist() == pytest.approx(
        [0.0, expected], rel=1e-4, abs=1e-9
    )


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_layer_one_is_closed_form(family):
    model = tiny.shared(family)
    ids = tiny.ids(3, 12)
    leaks = [AttentionMaps(maps, 1) for maps in maps_of(model, ids)]
    leaks.append(AttentionMaps(maps_of(model, tiny.ids(1, 5, seed=1))[0], 1))
    results = recover_texts(model, TOKENIZER, leaks)
    assert [result.ids for result in results[:3]] == ids.tolist()
    assert results[3].ids == tiny.ids(1, 5, seed=1)[0].tolist()
    assert all(
        result.verified and result.status is Status.RECOVERED for result in results
    )
    assert all(
        result.method == "EncoderMaps" and result.passes == result.forwards
        for result in results
    )
    assert all("closed form" in result.reason for result in results)


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_deeper_layers_are_searched(family):
    model = tiny.shared(family)
    ids = tiny.ids(1, 9, seed=2)
    leak = AttentionMaps(maps_of(model, ids, 2)[0], 2)
    result = recover_text(model, TOKENIZER, leak, method=QUICK)
    assert result.ids == ids[0].tolist()
    assert result.verified
    assert result.forwards < result.passes


@pytest.mark.parametrize(
    ("name", "degrade"),
    [
        ("float16", torch.Tensor.half),
        ("bfloat16", torch.Tensor.bfloat16),
        ("three decimals", lambda maps: rounded(maps, 3)),
        ("two decimals", lambda maps: rounded(maps, 2)),
    ],
)
def test_rounded_maps_still_say_every_token(bert, name, degrade):
    ids = tiny.ids(2, 12, seed=3)
    leaks = [AttentionMaps(degrade(maps), 1) for maps in maps_of(bert, ids)]
    results = recover_texts(bert, TOKENIZER, leaks)
    assert [result.ids for result in results] == ids.tolist(), name
    assert all(len(result.marks) == 12 for result in results)


def test_what_rounding_destroys_is_not_called_verified(bert):
    ids = tiny.ids(4, 8, seed=4)
    leaks = [AttentionMaps(rounded(maps, 0), 1) for maps in maps_of(bert, ids)]
    results = recover_texts(bert, TOKENIZER, leaks)
    wrong = [
        result
        for result, truth in zip(results, ids, strict=True)
        if result.ids != truth.tolist()
    ]
    assert wrong
    assert not any(
        result.verified or result.status is Status.RECOVERED for result in wrong
    )


def test_missing_rows(bert):
    """A query that did not leak is still measured as a key."""
    ids = tiny.ids(1, 12, seed=5)
    maps = maps_of(bert, ids)[0].clone()
    maps[:, [3, 7]] = torch.nan
    result = recover_text(bert, TOKENIZER, AttentionMaps(maps, 1))
    assert right(result, ids[0]) == 12


def test_padding_is_left_out(bert):
    ids = tiny.ids(1, 12, seed=6)
    mask = torch.ones_like(ids)
    ids[:, 8:] = 0
    mask[:, 8:] = 0
    ids[:, 7] = 3
    maps = capture(bert, Exposure("maps", 1), ids=ids, mask=mask)["values"][0]
    result = recover_text(bert, TOKENIZER, AttentionMaps(maps, 1, mask=mask[0]))
    assert result.ids == ids[0, :8].tolist()


def test_another_models_maps_are_never_verified(bert):
    other = tiny.shared("bert", seed=1)
    ids = tiny.ids(3, 10, seed=7)
    leaks = [AttentionMaps(maps, 1) for maps in maps_of(other, ids)]
    results = recover_texts(bert, TOKENIZER, leaks)
    assert not any(
        result.verified or result.status is Status.RECOVERED for result in results
    )
    named = AttentionMaps(maps_of(other, ids)[0], 1, model=identity(other))
    with pytest.raises(InputError, match="the leak is of the model"):
        recover_text(bert, TOKENIZER, named)
    deeper = AttentionMaps(maps_of(other, ids[:1, :6], 2)[0], 2)
    brief = EncoderMaps(deeper=TokenSearch(rounds=1, passes=10, candidates=4))
    results = recover_text(bert, TOKENIZER, deeper, method=brief)
    assert not results.verified
    assert results.status is not Status.RECOVERED


def test_maps_of_another_layer_are_never_verified(bert):
    ids = tiny.ids(2, 10, seed=8)
    leaks = [AttentionMaps(maps, 1) for maps in maps_of(bert, ids, 2)]
    assert not any(result.verified for result in recover_texts(bert, TOKENIZER, leaks))


def test_wrong_arguments(bert):
    maps = maps_of(bert, tiny.ids(1, 6))[0]
    with pytest.raises(InputError, match="only NaN"):
        AttentionMaps(torch.full_like(maps, torch.nan), 1)
    with pytest.raises(InputError, match=r"shape \(4, 6, 6\)"):
        recover_text(bert, TOKENIZER, AttentionMaps(maps[:2], 1))
    with pytest.raises(InputError, match="must be from 1 to 3"):
        recover_text(bert, TOKENIZER, AttentionMaps(maps, 4))


def test_without_known_tokens_layer_one_says_so(bert):
    bare = tiny.tokenizer(causal=True)
    result = recover_text(
        bert, bare, AttentionMaps(maps_of(bert, tiny.ids(1, 6))[0], 1)
    )
    assert result.status is Status.NOT_APPLICABLE
    assert "anchor" in result.reason


def test_maps_of_a_causal_model_have_no_attack_here():
    model = tiny.shared("gpt2")
    maps = maps_of(model, tiny.ids(1, 6, causal=True))[0]
    result = recover_text(model, tiny.tokenizer(causal=True), AttentionMaps(maps, 1))
    assert result.status is Status.NOT_APPLICABLE


def test_gradients_stay_on_between_two_texts(bert):
    leaks = [AttentionMaps(maps, 1) for maps in maps_of(bert, tiny.ids(2, 6))]
    for _number, _found in recovering(bert, TOKENIZER, leaks):
        assert torch.is_grad_enabled()
