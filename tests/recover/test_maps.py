"""Text from attention maps: closed form at layer 1, a search above; rounding, gaps, mismatches."""

from __future__ import annotations

import numpy as np
import pytest
import reference_maps as reference
import torch

import tiny_models as tiny
from keyhole.errors import InputError
from keyhole.models import Exposure, anatomy, capture, identity
from keyhole.recover import EncoderMaps, TokenSearch, recover_text, recover_texts, recovering
from keyhole.recover.attack import Target
from keyhole.recover.leaks import AttentionMaps
from keyhole.recover.search.comparison import Comparison
from keyhole.recover.search.map_scores import Anchors, LogMaps, Questions
from keyhole.results import Status

TOKENIZER = tiny.tokenizer()
QUICK = EncoderMaps(deeper=TokenSearch(rounds=2, passes=25, candidates=8))


def maps_of(model, ids, layer=1):
    return capture(model, Exposure("maps", layer), ids=ids)["values"]


def rounded(maps, decimals):
    return (maps * 10**decimals).round() / 10**decimals


@pytest.fixture(scope="module")
def bert():
    return tiny.model("bert")


def right(found, truth):
    return sum(a == b for a, b in zip(found.ids, truth.tolist(), strict=True))


def test_measured_scores_are_the_naive_loops(bert):
    ids = tiny.ids(1, 7)
    states = capture(bert, Exposure("hidden", 0), ids=ids)["values"][0]
    part = anatomy(bert).attentions[0]
    weights = [w.detach().double().numpy() for w in (
        part.query.weight, part.query.bias, part.key.weight, part.key.bias)]  # fmt: skip
    expected = reference.scores(states.double().numpy(), *weights, heads=4)
    maps = maps_of(bert, ids)[0]
    assert np.allclose(reference.softmax_rows(expected), maps.numpy(), atol=1e-6)

    anchors = Anchors.of(anatomy(bert), 1, states, [0, 3, 6])
    as_key, as_query = anchors.measure(states)  # (n, h, a)
    assert np.allclose(as_key.numpy(), expected[:, [0, 3, 6]].transpose(2, 0, 1), atol=1e-5)
    assert np.allclose(as_query.numpy(), expected[:, :, [0, 3, 6]].transpose(1, 0, 2), atol=1e-5)

    log = LogMaps.of(AttentionMaps(maps, 1), torch.device("cpu"))
    questions = Questions.of(log, anchors)
    assert np.allclose(questions.key_scores[1].numpy(), as_key[1].numpy(), atol=1e-4)
    assert float(questions.misfit(as_key, as_query).max() / questions.numbers().min()) < 0.5


def test_the_loss_is_the_naive_loops(bert):
    ids = tiny.ids(2, 6)
    maps = maps_of(bert, ids, 2)
    comparison = Comparison.of(Target.of(bert, TOKENIZER), AttentionMaps(maps[0], 2))
    expected = reference.centred_difference(maps[1].double().numpy(), maps[0].double().numpy())
    assert comparison.losses(ids).tolist() == pytest.approx([0.0, expected], rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_layer_one_is_closed_form(family):
    model, ids = tiny.model(family), tiny.ids(3, 12)
    leaks = [AttentionMaps(maps, 1) for maps in maps_of(model, ids)]
    leaks.append(AttentionMaps(maps_of(model, tiny.ids(1, 5, seed=1))[0], 1))
    found = recover_texts(model, TOKENIZER, leaks)
    assert [one.ids for one in found[:3]] == ids.tolist()
    assert found[3].ids == tiny.ids(1, 5, seed=1)[0].tolist()
    assert all(one.verified and one.status is Status.RECOVERED for one in found)
    assert all(one.method == "EncoderMaps" and one.passes == one.forwards for one in found)
    assert all("closed form" in one.reason for one in found)


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_deeper_layers_are_searched(family):
    model, ids = tiny.model(family), tiny.ids(1, 9, seed=2)
    leak = AttentionMaps(maps_of(model, ids, 2)[0], 2)
    found = recover_text(model, TOKENIZER, leak, method=QUICK)
    assert found.ids == ids[0].tolist()
    assert found.verified
    assert found.forwards < found.passes


@pytest.mark.parametrize(
    ("name", "degrade"),
    [("float16", torch.Tensor.half), ("bfloat16", torch.Tensor.bfloat16),
     ("three decimals", lambda maps: rounded(maps, 3)),
     ("two decimals", lambda maps: rounded(maps, 2))],
)  # fmt: skip
def test_rounded_maps_still_say_every_token(bert, name, degrade):
    ids = tiny.ids(2, 12, seed=3)
    leaks = [AttentionMaps(degrade(maps), 1) for maps in maps_of(bert, ids)]
    found = recover_texts(bert, TOKENIZER, leaks)
    assert [one.ids for one in found] == ids.tolist(), name
    assert all(len(one.marks) == 12 for one in found)


def test_what_rounding_destroys_is_not_called_verified(bert):
    ids = tiny.ids(4, 8, seed=4)
    leaks = [AttentionMaps(rounded(maps, 0), 1) for maps in maps_of(bert, ids)]
    found = recover_texts(bert, TOKENIZER, leaks)
    wrong = [one for one, truth in zip(found, ids, strict=True) if one.ids != truth.tolist()]
    assert wrong
    assert not any(one.verified or one.status is Status.RECOVERED for one in wrong)


def test_missing_rows(bert):
    """A query that did not leak is still measured as a key."""
    ids = tiny.ids(1, 12, seed=5)
    maps = maps_of(bert, ids)[0].clone()
    maps[:, [3, 7]] = torch.nan
    found = recover_text(bert, TOKENIZER, AttentionMaps(maps, 1))
    assert right(found, ids[0]) == 12


def test_padding_is_left_out(bert):
    ids = tiny.ids(1, 12, seed=6)
    mask = torch.ones_like(ids)
    ids[:, 8:], mask[:, 8:], ids[:, 7] = 0, 0, 3
    maps = capture(bert, Exposure("maps", 1), ids=ids, mask=mask)["values"][0]
    found = recover_text(bert, TOKENIZER, AttentionMaps(maps, 1, mask=mask[0]))
    assert found.ids == ids[0, :8].tolist()


def test_another_models_maps_are_never_verified(bert):
    other, ids = tiny.model("bert", seed=1), tiny.ids(3, 10, seed=7)
    leaks = [AttentionMaps(maps, 1) for maps in maps_of(other, ids)]
    found = recover_texts(bert, TOKENIZER, leaks)
    assert not any(one.verified or one.status is Status.RECOVERED for one in found)
    named = AttentionMaps(maps_of(other, ids)[0], 1, model=identity(other))
    with pytest.raises(InputError, match="expected a leak of the model"):
        recover_text(bert, TOKENIZER, named)
    deeper = AttentionMaps(maps_of(other, ids[:1, :6], 2)[0], 2)
    brief = EncoderMaps(deeper=TokenSearch(rounds=1, passes=10, candidates=4))
    found = recover_text(bert, TOKENIZER, deeper, method=brief)
    assert not found.verified
    assert found.status is not Status.RECOVERED


def test_maps_of_another_layer_are_never_verified(bert):
    ids = tiny.ids(2, 10, seed=8)
    leaks = [AttentionMaps(maps, 1) for maps in maps_of(bert, ids, 2)]
    assert not any(one.verified for one in recover_texts(bert, TOKENIZER, leaks))


def test_wrong_arguments(bert):
    maps = maps_of(bert, tiny.ids(1, 6))[0]
    with pytest.raises(InputError, match="only NaN"):
        AttentionMaps(torch.full_like(maps, torch.nan), 1)
    with pytest.raises(InputError, match=r"shape \(4, 6, 6\)"):
        recover_text(bert, TOKENIZER, AttentionMaps(maps[:2], 1))
    with pytest.raises(InputError, match="a layer from 1 to 3"):
        recover_text(bert, TOKENIZER, AttentionMaps(maps, 4))


def test_without_known_tokens_layer_one_says_so(bert):
    bare = tiny.tokenizer(causal=True)
    found = recover_text(bert, bare, AttentionMaps(maps_of(bert, tiny.ids(1, 6))[0], 1))
    assert found.status is Status.NOT_APPLICABLE
    assert "anchor" in found.reason


def test_maps_of_a_causal_model_have_no_attack_here():
    model = tiny.model("gpt2")
    maps = maps_of(model, tiny.ids(1, 6, causal=True))[0]
    found = recover_text(model, tiny.tokenizer(causal=True), AttentionMaps(maps, 1))
    assert found.status is Status.NOT_APPLICABLE


def test_gradients_stay_on_between_two_texts(bert):
    leaks = [AttentionMaps(maps, 1) for maps in maps_of(bert, tiny.ids(2, 6))]
    for _number, _found in recovering(bert, TOKENIZER, leaks):
        assert torch.is_grad_enabled()
