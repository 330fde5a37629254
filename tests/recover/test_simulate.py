"""Simulated leaks hold the model's own numbers, with the stated rounding and noise."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.models import capture, identity
from keyhole.recover.leaks import HiddenStates
from keyhole.recover.simulate import degrade, leak_of

TEXT = "w1 w20 w3 w4 w100"


@pytest.fixture(scope="module")
def bert():
    return tiny.model("bert"), tiny.tokenizer()


def test_a_leak_is_what_the_model_returns(bert):
    model, words = bert
    ids = torch.tensor([words(TEXT)["input_ids"]])
    own = model(ids, output_hidden_states=True, output_attentions=True)
    leak = leak_of(model, words, TEXT, "hidden:2")
    assert torch.equal(leak.values, own.hidden_states[2][0])
    assert leak.model == identity(model)
    assert torch.equal(
        leak_of(model, words, TEXT, "maps:1").values, own.attentions[0][0]
    )
    pooled = leak_of(model, words, TEXT, "pooled")
    mean = torch.nn.functional.normalize(own.last_hidden_state[0].mean(0), dim=0)
    assert torch.allclose(pooled.values, mean, atol=1e-6)
    assert pooled.tokens == ids.shape[1]


def test_ids_will_do_for_a_text(bert):
    model, words = bert
    by_text = leak_of(model, words, TEXT, "hidden:2")
    by_ids = leak_of(model, None, words(TEXT)["input_ids"], "hidden:2")
    assert torch.equal(by_ids.values, by_text.values)
    assert by_ids.model == by_text.model


@pytest.mark.parametrize("text", ["", " \n", []])
def test_nothing_leaks_of_nothing(bert, text):
    with pytest.raises(InputError, match="token"):
        leak_of(*bert, text, "hidden:2")


def test_unknown_words_are_a_text_all_the_same(bert):
    assert leak_of(*bert, "nobody knows", "hidden:2").length == 4


def test_rounding_is_as_coarse_as_it_says():
    stream = torch.Generator().manual_seed(0)
    leak = HiddenStates(torch.randn(5, 40, generator=stream), 1)
    for precision, most in (("int8", 127), ("int4", 7)):
        rounded = degrade(leak, precision)
        steps = rounded.values / (leak.values.abs().amax(-1, keepdim=True) / most)
        assert torch.allclose(steps, steps.round(), atol=1e-4)
        assert int(steps.abs().max().round()) == most
        assert rounded.precision == precision
    half = degrade(leak, "bfloat16").values
    assert torch.equal(half, leak.values.bfloat16().float())
    assert torch.equal(degrade(leak).values, leak.values)


def test_noise_has_the_strength_asked_for_and_is_repeatable():
    leak = HiddenStates(
        torch.randn(200, 200, generator=torch.Generator().manual_seed(1)) * 3, 1
    )
    noisy = degrade(leak, noise=0.1, seed=4)
    strength = float((noisy.values - leak.values).std() / leak.values.std())
    assert strength == pytest.approx(0.1, rel=0.02)
    assert torch.equal(noisy.values, degrade(leak, noise=0.1, seed=4).values)
    assert not torch.equal(noisy.values, degrade(leak, noise=0.1, seed=5).values)
    stream = torch.Generator().manual_seed(4)
    assert torch.equal(noisy.values, degrade(leak, noise=0.1, seed=stream).values)
    assert not torch.equal(noisy.values, degrade(leak, noise=0.1, seed=stream).values)


@pytest.mark.parametrize(
    ("precision", "noise", "words"),
    [("int3", 0.0, "precision .*int8"), ("int8", -1.0, "noise")],
)
def test_wrong_wishes(precision, noise, words):
    with pytest.raises(InputError, match=words):
        degrade(HiddenStates(torch.ones(2, 2), 1), precision, noise)


def test_forms_are_what_they_say(bert):
    leak = leak_of(*bert, TEXT, "hidden:2")
    cut = degrade(leak, forms=["truncated:10", "normalised"])
    assert torch.equal(
        cut.values, torch.nn.functional.normalize(leak.values[:, :10], dim=-1)
    )
    assert (cut.width, cut.normalised, cut.permuted) == (10, True, False)
    few = degrade(leak, forms=["subset:3"])
    kept = few.values.isfinite().all(-1)
    assert int(kept.sum()) == 3
    assert torch.equal(few.values[kept], leak.values[kept])
    mixed = degrade(leak, forms=["permuted"], seed=5)
    assert mixed.permuted
    assert not torch.equal(mixed.values, leak.values)
    assert sorted(mixed.values.tolist()) == sorted(leak.values.tolist())


@pytest.mark.parametrize(
    "forms",
    [
        ["shorter"],
        ["subset"],
        ["subset:0"],
        ["subset:x"],
        ["normalised:3"],
        ["normalised:"],
        ["truncated:99"],
        ["permuted", "permuted"],
        [""],
    ],
)
def test_other_forms_are_refused(bert, forms):
    with pytest.raises(InputError, match=r"unknown form|given twice|exceeds"):
        degrade(leak_of(*bert, TEXT, "hidden:2"), forms=forms)


def test_only_hidden_states_take_other_forms(bert):
    with pytest.raises(
        InputError, match="only hidden states can be permuted, not maps:1"
    ):
        degrade(leak_of(*bert, TEXT, "maps:1"), forms=["permuted"])


def test_a_pooled_embedding_is_cut_normalised_and_reduced_to_signs(bert):
    leak = leak_of(*bert, TEXT, "pooled")
    cut = degrade(leak, forms=["truncated:20"])
    assert torch.equal(cut.values, leak.values[:20])
    assert (cut.width, cut.exposure.unit) == (20, False)
    both = degrade(leak, "binary", forms=["normalised", "truncated:20"])
    assert torch.equal(both.values, leak.values[:20].sign())
    again = degrade(leak, forms=["normalised", "truncated:20"])
    assert float(again.values.norm()) == pytest.approx(1, abs=1e-6)
    given = capture(
        bert[0], again.exposure, ids=torch.tensor([bert[1](TEXT)["input_ids"]])
    )
    assert torch.allclose(given["values"][0], again.values, atol=1e-6)
    for form in ("permuted", "subset:2"):
        with pytest.raises(
            InputError, match=f"only hidden states can be {form.split(':')[0]}"
        ):
            degrade(leak, forms=["normalised", form])
    with pytest.raises(InputError, match="exceeds the 32 numbers"):
        degrade(leak, forms=["truncated:33"])
    with pytest.raises(InputError, match="precision"):
        degrade(leak_of(*bert, TEXT, "hidden:1"), "binary")


def test_noise_that_is_stated_is_what_was_added():
    stream = torch.Generator().manual_seed(0)
    leak = HiddenStates(torch.randn(50, 400, generator=stream), 1)
    for share in (0.05, 0.5):
        stated = degrade(leak, noise=share, seed=7).with_noise(share)
        assert stated.noise == pytest.approx(share * float(leak.values.std()), rel=0.01)
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="noise"):
            leak.with_noise(wrong)
