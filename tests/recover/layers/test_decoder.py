"""Left-to-right search on tiny random models finds the planted text, or reports failure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny_models as tiny
from keyhole.core import Status
from keyhole.models import Exposure, capture
from keyhole.recover import recover_text, recover_texts
from keyhole.recover.layers.decoder import DecoderStates
from keyhole.recover.leaks import TYPES, HiddenStates
from keyhole.recover.recovery import Mark
from keyhole.recover.simulate import leak_of

TOKENIZER = tiny.tokenizer(causal=True)
QUICK = DecoderStates(samples=512)
SMALL = {
    "initializer_range": 0.05
}  # as in a trained model, tokens show more than contexts


def leaks_of(model, exposure, ids, **about):
    exposure = Exposure.parse(exposure)
    given = capture(model, exposure, ids=ids)
    kind = TYPES[exposure.kind]
    return [
        kind(
            **{name: tensor[text] for name, tensor in given.items()},
            layer=exposure.layer,
            **about,
        )
        for text in range(len(ids))
    ]


@pytest.mark.parametrize("family", tiny.DECODERS)
@pytest.mark.parametrize(
    "exposure", ["hidden:0", "hidden:1", "hidden:3", "kv:2", "attention:2"]
)
def test_every_token_of_every_family(family, exposure):
    model = tiny.shared(family, **SMALL)
    ids = tiny.ids(texts=2, length=9, causal=True, seed=3)
    for result, truth in zip(
        recover_texts(model, TOKENIZER, leaks_of(model, exposure, ids), method=QUICK),
        ids.tolist(),
        strict=True,
    ):
        assert result.ids == truth
        assert result.verified
        assert result.status is Status.RECOVERED
        assert set(result.marks) == {Mark.VERIFIED}
        assert len(truth) <= result.tested < len(truth) * tiny.SHAPE["vocab_size"]


def test_texts_of_different_lengths_side_by_side():
    model = tiny.shared("llama", **SMALL)
    ids = tiny.ids(texts=3, length=12, causal=True)
    leaks = [
        leaks_of(model, "hidden:2", ids[n : n + 1, : 12 - 4 * n])[0] for n in range(3)
    ]
    single = recover_texts(model, TOKENIZER, leaks, method=replace(QUICK, batch=1))
    many = recover_texts(model, TOKENIZER, leaks, method=replace(QUICK, batch=3))
    for n in range(3):
        assert single[n].ids == many[n].ids == ids[n, : 12 - 4 * n].tolist()
        assert single[n].tested == many[n].tested


def test_padding_before_the_text():
    model = tiny.shared("gpt2", **SMALL)
    ids = tiny.ids(texts=1, length=10, causal=True)
    ids[0, :3] = 0
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    values = capture(model, Exposure("hidden", 2), ids=ids, mask=mask)["values"]
    result = recover_text(
        model, TOKENIZER, HiddenStates(values, 2, mask=mask), method=QUICK
    )
    assert result.ids[3:] == ids[0, 3:].tolist()
    assert result.verified


@pytest.mark.parametrize("known", [True, False])
def test_a_first_token_that_the_tokenizer_adds(known):
    """Special tokens are tried first, and dropped if the leak contradicts them."""
    model = tiny.shared("llama", **SMALL)
    framed = tiny.tokenizer(causal=False)
    ids = tiny.ids(texts=1, length=8, causal=True)
    ids[0, 0] = 2 if known else 17
    result = recover_text(
        model, framed, leaks_of(model, "hidden:3", ids)[0], method=QUICK
    )
    assert result.ids == ids[0].tolist()
    assert result.verified


@pytest.mark.parametrize(
    "precision", ["bfloat16", "float16", "int8", "noise", "unknown noise"]
)
@pytest.mark.parametrize("exposure", ["hidden:2", "kv:1"])
def test_rounded_and_noisy_leaks(precision, exposure):
    model = tiny.shared("llama", **SMALL)
    ids = tiny.ids(texts=1, length=10, causal=True)
    leak = leaks_of(model, exposure, ids)[0]
    stream = torch.Generator().manual_seed(0)
    changed = {}
    about = {}
    for name, tensor in leak.tensors.items():
        if precision in ("bfloat16", "float16"):
            changed[name] = tensor.to(getattr(torch, precision))
        elif precision == "int8":
            step = leak.rows(leak.tensors).abs().amax(-1)[..., None] / 127
            changed[name] = (tensor / step).round() * step
        else:
            sigma = 0.02 * float(leak.rows(leak.tensors).std())
            changed[name] = tensor + sigma * torch.randn(tensor.shape, generator=stream)
            about = {"noise": sigma} if precision == "noise" else {}
    result = recover_text(
        model, TOKENIZER, replace(leak, **changed, **about), method=QUICK
    )
    assert result.ids == ids[0].tolist()


def test_a_leak_of_another_model_is_not_believed():
    ids = tiny.ids(texts=1, length=8, causal=True)
    leak = leaks_of(tiny.shared("llama", seed=7, **SMALL), "hidden:3", ids)[0]
    result = recover_text(tiny.shared("llama", **SMALL), TOKENIZER, leak, method=QUICK)
    assert not result.verified
    assert result.status is not Status.RECOVERED
    assert len(result.ids) == 8


def test_the_search_gives_up_and_says_so():
    """With numbers of no model, only two positions are searched."""
    model = tiny.shared("llama", **SMALL)
    values = 50 * torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    result = recover_text(model, TOKENIZER, HiddenStates(values, 3), method=QUICK)
    assert not result.verified
    assert "the search ended at" in result.reason
    assert result.tested <= 2 * tiny.SHAPE["vocab_size"] + 32


def test_a_position_that_did_not_leak():
    """Tokens before the gap are certain; the gap itself is not verified."""
    model = tiny.shared("llama", **SMALL)
    ids = tiny.ids(texts=1, length=8, causal=True)
    leak = leaks_of(model, "hidden:2", ids)[0]
    values = leak.values.clone()
    values[5] = torch.nan
    result = recover_text(model, TOKENIZER, replace(leak, values=values), method=QUICK)
    assert result.ids[:5] == ids[0, :5].tolist()
    assert result.ids[5] == ids[0, 5] or not result.verified


def test_an_encoder_is_not_read_left_to_right():
    model = tiny.shared("bert")
    leak = leaks_of(model, "hidden:1", tiny.ids(texts=1))[0]
    result = recover_text(model, tiny.tokenizer(), leak, method=QUICK)
    assert result.status is Status.NOT_APPLICABLE
    assert "causal" in result.reason


def test_the_model_is_left_as_it_was():
    model = tiny.shared("qwen3", **SMALL)
    ids = tiny.ids(texts=1, length=6, causal=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    recover_text(model, TOKENIZER, leaks_of(model, "kv:1", ids)[0], method=QUICK)
    assert all(
        torch.equal(weight, before[name]) for name, weight in model.state_dict().items()
    )
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )


def test_the_best_token_is_taken_where_noise_is_coarse():
    """A token nearly equal to the right one passes and is tried first, but is not chosen."""
    model = tiny.model("llama")
    words = tiny.tokenizer(causal=True)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[6] = (
            table[5] + 0.02 * table[7]
        )  # w0 is listed first and is nearly the same as w1
    leak = leak_of(model, words, "w1 w50 w0 w60 w1", "hidden:2")
    given = recover_text(
        model, words, replace(leak, noise=0.05 * float(leak.values.std()))
    )
    assert given.text == "w1 w50 w0 w60 w1"
    gap = replace(leak, values=leak.values.clone())
    gap.values[1] = torch.nan
    given = recover_text(
        model, words, replace(gap, noise=0.05 * float(leak.values.std()))
    )
    assert len(given.ids) == 5


@pytest.mark.parametrize("seed", [7, 11])
def test_a_first_row_that_tells_little_is_read_from_the_next_one(seed):
    """Like an attention sink in 8 bits: a few numbers are left, and many tokens fit."""
    model = tiny.model("llama", seed=seed, hidden_size=8, intermediate_size=32)
    ids = tiny.ids(texts=1, length=40, causal=True, seed=seed)
    rows = capture(model, Exposure("hidden", 2), ids=ids)["values"][0].clone()
    step = rows[0].abs().max()
    rows[0] = (rows[0] / step).round() * step
    result = recover_text(model, TOKENIZER, HiddenStates(rows, 2))
    assert result.ids == ids[0].tolist()
    assert result.verified
    # One of the tokens that fit is chosen at once; in turn they cost 200 tests each.
    assert result.tested < 2200
