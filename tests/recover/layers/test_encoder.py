"""Text from hidden states of encoders: all families and layers, with realistic leaks."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny_models as tiny
from keyhole import invert
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.invert import Mark
from keyhole.models import Exposure, capture, identity
from keyhole.recover import EncoderStates
from keyhole.recover.attack import Target
from keyhole.recover.layers.encoder import EncoderBatch
from keyhole.recover.layers.inverse_map import TokenTable, inverse_map, random_texts

WORDS = tiny.tokenizer()


@functools.cache
def model(family="bert"):
    return tiny.shared(family)


def leaks(family, layer, ids, change=lambda values: values, **about):
    values = capture(model(family), Exposure("hidden", layer), ids=ids)["values"]
    return [invert.HiddenStates(change(text), layer, **about) for text in values]


def noisy(share):
    stream = torch.Generator().manual_seed(0)
    return lambda v: v + share * v.std() * torch.randn(v.shape, generator=stream)


def int8(values):
    step = values.abs().amax(-1, keepdim=True) / 127
    return (values / step).round() * step


@pytest.mark.parametrize("family", tiny.ENCODERS)
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_every_family_and_layer(family, layer):
    ids = tiny.ids(texts=3, length=12)
    results = invert.recover_texts(model(family), WORDS, leaks(family, layer, ids))
    for result, truth in zip(results, ids.tolist(), strict=True):
        assert result.ids == truth
        assert result.verified
        assert result.status is Status.RECOVERED
        assert result.text == WORDS.decode(truth, skip_special_tokens=True)
        assert result.marks == (Mark.VERIFIED,) * 12
        assert (
            result.passes >= result.forwards >= 2
        )  # one of the attack, one of the judge
        assert result.fitting > 0


@pytest.mark.parametrize(
    "change",
    [lambda v: v.bfloat16(), lambda v: v.half(), int8],
    ids=["bfloat16", "float16", "int8"],
)
def test_rounded_leaks(change):
    ids = tiny.ids(texts=3, length=12, seed=1)
    results = invert.recover_texts(model(), WORDS, leaks("bert", 2, ids, change))
    assert [result.ids for result in results] == ids.tolist()
    assert all(result.verified for result in results)


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_noisy_leaks(share):
    """With unknown noise in few numbers the text is likely; with stated noise it is verified."""
    ids = tiny.ids(texts=3, length=12, seed=1)
    given = leaks("bert", 2, ids, noisy(share))
    results = invert.recover_texts(model(), WORDS, given)
    assert [result.ids for result in results] == ids.tolist()
    assert not any(result.verified for result in results)
    assert {mark for result in results for mark in result.marks} == {Mark.LIKELY}
    stated = [replace(leak, noise=share * float(leak.values.std())) for leak in given]
    results = invert.recover_texts(model(), WORDS, stated)
    assert [result.ids for result in results] == ids.tolist()
    assert all(result.verified for result in results)


def test_texts_of_different_lengths_in_the_order_given():
    ids = [tiny.ids(texts=1, length=n, seed=n)[0] for n in (9, 4, 30, 2, 12, 60)]
    given = [leaks("roberta", 2, text[None])[0] for text in ids]
    method = EncoderStates(batch=64)
    results = invert.recover_texts(model("roberta"), WORDS, given, method=method)
    assert [result.ids for result in results] == [text.tolist() for text in ids]
    assert all(result.verified for result in results)
    numbers = [
        n for n, _ in invert.recovering(model("roberta"), WORDS, given, method=method)
    ]
    assert sorted(numbers) == list(range(6))


@pytest.mark.parametrize("side", ["after", "before"])
def test_padding_is_left_alone(side):
    ids = tiny.ids(texts=1, length=12, seed=2)
    mask = torch.ones(1, 16, dtype=torch.long)
    padding = slice(12, 16) if side == "after" else slice(0, 4)
    mask[:, padding] = 0
    padded = torch.zeros(1, 16, dtype=torch.long)
    padded[mask.bool()] = ids[0]
    values = capture(model(), Exposure("hidden", 2), ids=padded, mask=mask)["values"]
    result = invert.recover_text(
        model(), WORDS, invert.HiddenStates(values[0], 2, mask=mask[0])
    )
    assert result.verified
    assert result.text == WORDS.decode(ids[0], skip_special_tokens=True)


def test_special_tokens_where_nobody_expects_them():
    """Texts without special tokens, or with a separator inside, are found in the end."""
    ids = tiny.ids(texts=2, length=10, seed=3, causal=True)
    ids[1, 5] = 3
    method = EncoderStates(rounds=12, opening=8)  # the missing frame is given up sooner
    results = invert.recover_texts(model(), WORDS, leaks("bert", 2, ids), method=method)
    assert [result.ids for result in results] == ids.tolist()
    assert all(result.verified for result in results)


def test_some_positions_did_not_leak():
    def every_second(values):
        return values.where((torch.arange(len(values)) % 2 == 0)[:, None], torch.nan)

    ids = tiny.ids(texts=2, length=10, seed=4)
    method = EncoderStates(rounds=6)
    results = invert.recover_texts(
        model(), WORDS, leaks("bert", 2, ids, every_second), method=method
    )
    for result, truth in zip(results, ids.tolist(), strict=True):
        assert result.ids[::2] == truth[::2] or not result.verified
        assert not result.verified or result.ids == truth
        assert len(result.marks) == 10
        for mark, token, right in zip(result.marks, result.ids, truth, strict=True):
            assert mark is not Mark.VERIFIED or token == right


def test_what_cannot_be_found_is_not_claimed():
    """A leak of another layer, and one of noise, end with a status and no claim."""
    ids = tiny.ids(texts=1, length=8)
    wrong = leaks("bert", 3, ids)[0]
    wrong = invert.HiddenStates(wrong.values, 1)
    stream = torch.Generator().manual_seed(0)
    nonsense = invert.HiddenStates(torch.randn(8, 32, generator=stream), 1)
    method = EncoderStates(rounds=2)
    for leak in (wrong, nonsense):
        result = invert.recover_text(model(), WORDS, leak, method=method)
        assert not result.verified
        assert result.status is Status.UNSOLVED
        assert Mark.VERIFIED not in result.marks
        assert result.reason
        assert result.advice


def test_leaks_that_cannot_be_this_models():
    ids = tiny.ids(texts=1, length=8)
    good = leaks("bert", 2, ids, model=identity(model()))[0]
    assert invert.recover_text(model(), WORDS, good).verified
    with pytest.raises(InputError, match="the leak is of the model"):
        invert.recover_text(model("roberta"), WORDS, good)
    with pytest.raises(InputError, match="must be from 0 to 3"):
        invert.recover_text(model(), WORDS, invert.HiddenStates(good.values, 9))
    with pytest.raises(InputError, match=r"shape \(8, 32\), got \(8, 31\)"):
        invert.recover_text(model(), WORDS, invert.HiddenStates(good.values[:, 1:], 2))
    with pytest.raises(InputError, match="takes at most 80"):
        invert.recover_text(model(), WORDS, invert.HiddenStates(torch.ones(81, 32), 2))
    with pytest.raises(InputError, match="no arrays or tensors in object"):
        invert.recover_text(model(), WORDS, object())
    assert invert.recover_text(model(), WORDS, good.values).ids == ids[0].tolist()
    with pytest.raises(InputError, match="expected a tokenizer"):
        invert.recover_text(model(), None, good)
    with pytest.raises(InputError, match="leaks are of several exposures"):
        invert.recover_texts(model(), WORDS, [good, leaks("bert", 1, ids)[0]])
    for wrong in ({"steps": 0}, {"opening": 0}, {"rounds": -1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            EncoderStates(**wrong)
    assert invert.recover_texts(model(), WORDS, []) == []


def test_the_map_is_the_least_squares_one():
    """The map agrees with NumPy on random texts, and is remembered."""
    target = Target.of(model("albert"), WORDS)
    leak = invert.HiddenStates(torch.ones(3, target.parts.width), 2)
    result = inverse_map(target, leak, 1500, 7)
    assert inverse_map(target, leak, 1500, 7) is result
    stream = torch.Generator().manual_seed(3)
    ids = random_texts(target, 200, 20, stream)
    states = capture(target.model, Exposure("hidden", 2), ids=ids)["values"][:, 1:-1]
    truth = target.parts.table[ids[:, 1:-1]]
    off = (result.estimate(states) - truth).flatten(0, 1).numpy()
    inputs = np.c_[states.flatten(0, 1).numpy(), np.ones(200 * 18)]
    best = np.linalg.lstsq(inputs, truth.flatten(0, 1).numpy(), rcond=None)[1].sum()
    assert best <= (off**2).sum() <= 1.3 * best
    covariance = np.cov(off.T)
    root = result.root.numpy()
    assert np.abs(root @ root.T - covariance).max() < 0.3 * np.abs(covariance).max()


def test_random_texts_stand_in_the_frame():
    target = Target.of(model(), WORDS)
    ids = random_texts(target, 50, 12, torch.Generator().manual_seed(0))
    assert (ids[:, 0] == 2).all()
    assert (ids[:, -1] == 3).all()
    assert (ids[:, 1:-1] >= 5).all()


def test_the_table_reads_directions():
    table = TokenTable.of(model().embeddings.word_embeddings.weight, without=[0])
    estimates = table.centre + 0.2 * (table.vectors[7:20] - table.centre)
    assert table.nearest(estimates)[:, 0].tolist() == list(range(7, 20))
    assert 0 not in table.nearest(-table.vectors[:1], 50)[0, :10].tolist()
    few = torch.tensor([30, 8, 41])
    assert table.nearest(estimates[1:2], 3, few)[0, 0] == 8
    assert set(table.nearest(estimates[1:2], 3, few)[0].tolist()) == {30, 8, 41}


def test_the_table_says_how_doubtful_a_token_is():
    table = TokenTable.of(model().embeddings.word_embeddings.weight, without=[0])
    between = table.centre + (table.directions[[7]] + table.directions[[9]]) / 2
    ids, doubt = table.meant(torch.cat([table.vectors[[7]], between]))
    assert ids[0] == 7
    assert ids[1] in (7, 9)
    assert doubt[0] < 1e-5
    assert doubt[1] == pytest.approx(1.0, abs=1e-4)


def test_a_token_fixed_by_mistake_becomes_open():
    """Clear tokens are fixed, but not a wrong one with the largest residual."""
    ids = tiny.ids(texts=1, length=14, seed=8)
    target = Target.of(model(), WORDS)
    leak = leaks("bert", 2, ids)[0]
    back = inverse_map(target, leak, 1500, 0)
    table = TokenTable.of(target.parts.table, without=target.pads())
    texts = EncoderBatch(target, {0: leak}, back, table)
    texts.begin(True)
    texts.ids = ids.clone()
    texts.ids[0, 5] = ids[0, 5] + 1
    texts.estimates = table.vectors[texts.ids].clone()
    texts.check()
    texts.fix_clear()
    assert texts.open[0].nonzero().flatten().tolist() == [5]
    assert texts.unknowns == 1
    anchored = texts.anchored()
    assert torch.equal(anchored[0, 4], table.vectors[ids[0, 4]])
    assert torch.allclose(anchored[0, 5], back.estimate(leak.values[5]), atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"opening": 1}])
def test_stages_of_any_length_lead_there(settings):
    """Gradients find the text without forward-only passes."""
    ids = tiny.ids(texts=1, length=10, seed=5)
    method = EncoderStates(feedback=0, samples=300, **settings)
    results = invert.recover_texts(
        model("albert"), WORDS, leaks("albert", 3, ids), method=method
    )
    assert [result.ids for result in results] == ids.tolist()
    assert all(result.verified for result in results)
    assert all(result.forwards < result.passes < 100 for result in results)


def test_the_leak_survives_a_file(tmp_path):
    ids = tiny.ids(texts=1, length=8)
    leak = leaks("distilbert", 2, ids, model=identity(model("distilbert")))[0]
    leak.save(tmp_path / "leak.safetensors")
    back = invert.load_leak(tmp_path / "leak.safetensors")
    result = invert.recover_text(model("distilbert"), WORDS, back)
    assert result.ids == ids[0].tolist()
    assert result.to_dict()["verified"] is True
