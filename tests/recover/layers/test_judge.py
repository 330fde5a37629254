"""The judge verifies right texts at the leak's precision, and never wrong ones."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import replace

import pytest
import torch

import tiny_models as tiny
from keyhole import invert
from keyhole.core import Status
from keyhole.invert import Mark
from keyhole.models import Exposure, capture
from keyhole.models.demo import load_demo
from keyhole.recover.attack import Target
from keyhole.recover.files.contents import WrittenIds
from keyhole.recover.layers.judge import Compared, alternatives, judge_rows
from keyhole.recover.layers.precision import FLOAT32, precision_of
from keyhole.recover.simulate import degrade
from keyhole.recover.simulate import leak_of as simulated

FULL = bool(os.environ.get("KEYHOLE_FULL"))


@functools.cache
def target(family="bert", seed=0):
    return Target.of(tiny.shared(family, seed=seed, hidden_size=192), tiny.tokenizer())


def leak_of(ids, layer=2, whose=None):
    values = capture(
        (whose or target()).model, Exposure("hidden", layer), ids=ids[None]
    )
    return invert.HiddenStates(values["values"][0], layer)


def rounded(values, most):
    step = values.abs().amax(-1, keepdim=True) / most
    return (values / step).round() * step


def noisy(values, share, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return values + share * values.std() * torch.randn(values.shape, generator=stream)


DAMAGE = {
    "exact": lambda v: v,
    "bfloat16": lambda v: v.bfloat16().float(),
    "float16": lambda v: v.half().float(),
    "int8": lambda v: rounded(v, 127),
    "decimals": lambda v: (v * 20).round() / 20,
    "noise 1%": lambda v: noisy(v, 0.01),
    "noise 10%": lambda v: noisy(v, 0.1),
}
IDS = tiny.ids(texts=2, length=14)


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_right_text_is_verified_and_one_wrong_token_is_not(damage):
    for text in IDS[:1]:
        leak = leak_of(text)
        leak = replace(leak, values=DAMAGE[damage](leak.values))
        verdict = judge_rows(target(), leak, text.tolist())
        assert verdict.verified, verdict
        assert verdict.status is Status.RECOVERED
        assert set(verdict.marks) == {Mark.VERIFIED}
        for place in (1, 12):
            other = text.clone()
            other[place] = 5 + (int(text[place]) + 11) % 190
            verdict = judge_rows(target(), leak, other.tolist())
            assert not verdict.verified
            assert verdict.status is Status.INEXACT  # the other tokens are known
            assert verdict.marks[place] is Mark.UNKNOWN
            assert Mark.VERIFIED not in verdict.marks


@pytest.mark.parametrize(
    ("damage", "exact"),
    [
        ("exact", True),
        ("bfloat16", False),
        ("float16", False),
        ("int8", False),
        ("decimals", False),
        ("noise 10%", True),
    ],
)
def test_rounding_is_read_off_the_numbers(damage, exact):
    leak = leak_of(IDS[0])
    values = DAMAGE[damage](leak.values)
    result = precision_of(replace(leak, values=values))
    if exact:
        assert torch.allclose(result.rounding, FLOAT32 * values.square().mean().sqrt())
    else:
        error = float((values - leak.values).square().mean().sqrt())
        assert float(result.sigma.square().mean().sqrt()) == pytest.approx(
            error, rel=0.2
        )


def test_int4_and_stated_noise():
    leak = leak_of(IDS[0])
    steps = leak.values.abs().amax(-1, keepdim=True) / 7
    found = precision_of(replace(leak, values=rounded(leak.values, 7)))
    assert torch.allclose(
        found.rounding * 12**0.5, steps.expand_as(leak.values), rtol=0.01
    )
    sigma = 0.1 * float(leak.values.std())
    result = precision_of(replace(leak, noise=sigma))
    assert float(result.sigma.mean()) == pytest.approx(sigma, rel=1e-3)
    verdict = judge_rows(
        target(),
        replace(leak, values=noisy(leak.values, 0.1), noise=sigma),
        IDS[0].tolist(),
    )
    assert verdict.verified
    # The residual is far above the stated noise.
    verdict = judge_rows(
        target(),
        replace(leak, values=noisy(leak.values, 0.4), noise=sigma),
        IDS[0].tolist(),
    )
    assert not verdict.verified


def test_leaks_of_something_else():
    text = IDS[0]
    right = text.tolist()
    other_model = leak_of(text, whose=target(seed=5))
    other_layer = replace(leak_of(text, 3), layer=2)
    other_text = leak_of(IDS[1])
    stream = torch.Generator().manual_seed(0)
    nothing = replace(
        other_text, values=torch.randn(other_text.values.shape, generator=stream)
    )
    for leak in (other_model, other_layer, other_text, nothing):
        verdict = judge_rows(target(), leak, right)
        assert not verdict.verified
        assert verdict.status is Status.UNSOLVED  # another text might explain it
        assert Mark.VERIFIED not in verdict.marks


@pytest.mark.parametrize("width", [32, 192])
def test_two_texts_in_one_leak_are_never_verified(width):
    """In a spliced or mixed leak each position may fit, but the residual is not noise."""
    whose = Target.of(tiny.shared("bert", hidden_size=width), tiny.tokenizer())
    first, second = tiny.ids(texts=2, length=14, seed=9)
    a = leak_of(first, 1, whose)
    b = leak_of(second, 1, whose)
    for cut in (2, 5, 8, 12):
        spliced = replace(a, values=torch.cat([a.values[:cut], b.values[cut:]]))
        verdict = judge_rows(
            whose, spliced, [*first[:cut].tolist(), *second[cut:].tolist()]
        )
        assert not verdict.verified
    for share in (0.02, 0.1, 0.3, 0.5):
        mixed = replace(a, values=(1 - share) * a.values + share * b.values)
        assert not judge_rows(whose, mixed, first.tolist()).verified


def test_unknown_noise_in_too_few_numbers_is_not_vouched_for():
    whose = Target.of(tiny.shared("bert"), tiny.tokenizer())
    leak = leak_of(IDS[0], whose=whose)
    loud = replace(leak, values=noisy(leak.values, 0.05))
    verdict = judge_rows(whose, loud, IDS[0].tolist())
    assert verdict.status is Status.INEXACT
    assert set(verdict.marks) == {Mark.LIKELY}
    assert "was not stated" in verdict.reason
    stated = replace(loud, noise=0.05 * float(leak.values.std()))
    assert judge_rows(whose, stated, IDS[0].tolist()).verified


def test_a_common_shift_is_not_noise():
    leak = leak_of(IDS[0])
    shift = 0.1 * leak.values.std() * torch.ones(leak.values.shape[-1])
    assert not judge_rows(
        target(), replace(leak, values=leak.values + shift), IDS[0].tolist()
    ).verified


def test_noise_of_unknown_strength_needs_several_positions():
    leak = leak_of(IDS[0])
    only = leak.values.clone()
    only[1:] = torch.nan
    assert (
        judge_rows(target(), replace(leak, values=only), IDS[0].tolist()).status
        is Status.RECOVERED
    )
    verdict = judge_rows(
        target(),
        replace(leak, values=noisy(only.nan_to_num(), 0.1) + only * 0),
        IDS[0].tolist(),
    )
    assert not verdict.verified


def test_equal_tokens_cannot_be_told_apart():
    """A leak fits two tokens with the same embedding, so neither is verified."""
    model = tiny.model("bert", hidden_size=192)
    text = IDS[0].clone()
    table = model.embeddings.word_embeddings.weight
    table.data[150] = table.data[text[5]]
    doubled = Target.of(model, tiny.tokenizer())
    leak = leak_of(text, whose=doubled)
    for token in (int(text[5]), 150):
        verdict = judge_rows(
            doubled, leak, [*text[:5].tolist(), token, *text[6:].tolist()]
        )
        assert not verdict.verified
        assert verdict.status is Status.INEXACT
        assert verdict.marks[5] is Mark.UNKNOWN  # the equal token is as likely
        assert verdict.marks[3] is Mark.VERIFIED
        assert "1 of 14 tokens could be others" in verdict.reason


def test_positions_that_did_not_leak():
    leak = leak_of(IDS[0])
    values = leak.values.clone()
    values[1::2] = torch.nan
    half = replace(leak, values=values)
    assert judge_rows(target(), half, IDS[0].tolist()).verified
    other = IDS[0].clone()
    other[3] = 5 + (int(other[3]) + 11) % 190
    assert not judge_rows(target(), half, other.tolist()).verified
    loud = replace(leak, values=noisy(values.nan_to_num(), 0.4) + values * 0)
    verdict = judge_rows(target(), loud, IDS[0].tolist())
    assert not verdict.verified  # a missing position could be many words


def test_a_text_of_another_length():
    shorter = WrittenIds([IDS[0][:-1].tolist()])
    whose = target()
    verdict = invert.recover_text(
        whose.model, whose.tokenizer, leak_of(IDS[0]), method=shorter
    )
    assert verdict.status is Status.UNSOLVED
    assert "13 tokens proposed for 14 positions" in verdict.reason


def test_the_whole_leak_speaks_for_a_token(monkeypatch):
    """A row shows only the token before it; in MiniLM, [CLS] shows only in the other rows."""
    table = target().parts.table
    ids = tiny.ids(texts=1, length=14)[0]

    def rows(_target, _leak, text, _mask, each=lambda rows: rows):
        return each(table[text].roll(1, dims=1))

    monkeypatch.setattr(Target, "rows", rows)
    values = table[ids].roll(1, dims=0)
    noise = 0.05 * float(values.std())
    leak = invert.HiddenStates(noisy(values, 0.05), 2, noise=noise)
    assert judge_rows(target(), leak, ids.tolist()).verified
    wrong = ids.clone()
    wrong[3] = ids[3] + 1
    assert not judge_rows(target(), leak, wrong.tolist()).verified


def test_an_alternative_that_no_row_excludes_is_not_verified(monkeypatch):
    """No row shows the token at 3, though other alternatives change some rows."""
    table = target().parts.table
    ids = tiny.ids(texts=1, length=40)[0]

    def rows(_target, _leak, text, _mask, each=lambda rows: rows):
        shown = table[text].clone()
        shown[:, 3] = shown[:, 19] + shown[:, 35]  # other tokens do change its row
        return each(shown)

    monkeypatch.setattr(Target, "rows", rows)
    values = rows(None, None, ids[None], None)[0]
    leak = invert.HiddenStates(noisy(values, 0.05), 2, noise=0.05 * float(values.std()))
    result = judge_rows(target(), leak, ids.tolist())
    assert not result.verified
    assert [
        place for place, mark in enumerate(result.marks) if mark is not Mark.VERIFIED
    ] == [3]


def test_nothing_is_known_of_another_text():
    verdict = judge_rows(target(), leak_of(IDS[1]), IDS[0].tolist())
    assert verdict.status is Status.UNSOLVED
    assert set(verdict.marks[1:-1]) == {Mark.UNKNOWN}


def test_a_token_whose_position_did_not_leak_needs_a_fine_leak():
    """With noise, wrong tokens at missing positions can make up for each other."""
    leak = leak_of(IDS[0])
    values = leak.values.clone()
    values[3] = torch.nan
    assert judge_rows(target(), replace(leak, values=values), IDS[0].tolist()).verified
    sigma = 0.05 * float(leak.values.std())
    loud = replace(
        leak, values=noisy(values.nan_to_num(), 0.05) + values * 0, noise=sigma
    )
    verdict = judge_rows(target(), loud, IDS[0].tolist())
    assert verdict.marks[3] is Mark.UNKNOWN
    assert verdict.status is Status.INEXACT
    assert Mark.VERIFIED not in verdict.marks  # more than one token in twenty is open
    assert verdict.marks.count(Mark.LIKELY) == 13


@functools.cache
def shipped():
    demo = load_demo()
    return Target.of(demo.model, demo.tokenizer)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2] if FULL else [0.1])
def test_a_word_of_like_meaning_is_tried_as_an_alternative(share):
    """The classifier gives words of one sentiment similar states, so a wrong one may fit."""
    tokenizer = shipped().tokenizer
    ids = tokenizer("a solid film , well told and refreshingly funny .")["input_ids"]
    values = capture(shipped().model, Exposure("hidden", 4), ids=torch.tensor([ids]))[
        "values"
    ][0]
    words = ["solid", "enjoyable", "unique", "touching"]
    words = [
        number
        for number in tokenizer.convert_tokens_to_ids(words)
        if number is not None
    ]
    noise = share * float(values.std())
    for seed in range(5 if FULL else 1):
        leak = invert.HiddenStates(noisy(values, share, seed), 4, noise=noise)
        for word in words:
            verdict = judge_rows(shipped(), leak, [*ids[:2], word, *ids[3:]])
            assert verdict.marks[2] is Mark.UNKNOWN or word == ids[2]


def test_noise_does_not_hide_the_right_token_among_many_alternatives():
    """For a rare word part, the right token is far down in the order by rows."""
    demo = load_demo()
    target = Target.of(demo.model, demo.tokenizer)
    text = (
        "there 's something auspicious , and daring , too , about the artistic instinct that "
        "pushes a majority-oriented director like steven spielberg to follow a.i. with this "
        "challenging report so liable to unnerve the majority ."
    )
    right = torch.tensor(demo.tokenizer(text)["input_ids"])
    own, other = demo.tokenizer.convert_tokens_to_ids(["##erv", "##rence"])
    place = right.tolist().index(own)
    leak = invert.HiddenStates(torch.ones(len(right), 128), 4)
    clean = target.rows(leak, right[None])[0]
    strength = 0.2 * float(clean.std())
    wrong = right.clone()
    wrong[place] = other
    given = target.rows(leak, wrong[None])[0]
    odds = 2 * (math.log(target.vocabulary) + 10)
    missed = 0
    for seed in (3, 4, 5):
        added = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
        leak = invert.HiddenStates(clean + strength * added, 4, noise=strength)

        def misfits(rows, leaked=leak.values):
            return ((rows - leaked) / strength).square().sum(-1)

        def margin(noisy, leak=leak, misfits=misfits):
            hidden = torch.zeros_like(right, dtype=torch.bool)
            compared = Compared(
                target, leak, wrong, leak.values, given, hidden, misfits
            )
            tried = alternatives(compared, noisy)[:, place]
            texts = wrong.repeat(len(tried), 1)
            texts[:, place] = tried
            rows = target.rows(leak, texts)
            return float((misfits(rows).sum(-1) - misfits(given).sum()).min())

        missed += margin(noisy=False) > odds
        assert margin(noisy=True) < odds
    assert missed  # fewer alternatives would have verified the wrong token


def test_a_row_of_one_number_verifies_no_wrong_token():
    """Its error is a small share of the spread, but among 5000 tokens many fit."""
    model = tiny.model("gpt2", vocab_size=5000)
    tokenizer = tiny.tokenizer(causal=True)
    ids = torch.randint(
        5, 5000, (3,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    leak = simulated(model, tokenizer, ids, "hidden:1")
    narrow = degrade(leak, "bfloat16", forms=["truncated:1"])
    result = invert.recover_text(model, tokenizer, narrow)
    assert result.ids != ids
    assert Mark.VERIFIED not in result.marks
    wide = invert.recover_text(model, tokenizer, degrade(leak, "bfloat16"))
    assert wide.verified
    assert wide.forwards == 2  # no alternatives


@pytest.mark.parametrize("exposure", ["hidden:0", "kv:0"])
def test_a_text_for_which_the_model_gives_nan_does_not_fit(exposure):
    model = tiny.model("llama")
    tokenizer = tiny.tokenizer(causal=True)
    ids = tiny.ids(texts=1, length=8, causal=True)[0].tolist()
    leak = simulated(model, tokenizer, ids, exposure)
    wrong = next(token for token in range(5, 200) if token not in ids)
    model.embed_tokens.weight[wrong] = torch.nan
    target = Target.of(model, tokenizer)
    verdict = judge_rows(target, leak, [*ids[:7], wrong])
    assert not verdict.verified
    assert verdict.status is not Status.RECOVERED


@pytest.mark.parametrize("exposure", ["hidden:1", "kv:0"])
def test_tokens_that_were_never_trained_pass_for_each_other(exposure):
    """Their embeddings are far apart for their size, and all nearly zero."""
    model = tiny.model("llama")
    tokenizer = tiny.tokenizer(causal=True)
    stream = torch.Generator().manual_seed(0)
    model.embed_tokens.weight[[50, 60]] = 1e-8 * torch.randn(2, 32, generator=stream)
    ids = tiny.ids(texts=1, length=8, causal=True)[0].tolist()
    ids[4] = 60
    leak = simulated(model, tokenizer, ids, exposure)
    verdict = judge_rows(Target.of(model, tokenizer), leak, [*ids[:4], 50, *ids[5:]])
    assert not verdict.verified
    result = invert.recover_text(model, tokenizer, leak)
    assert result.marks[4] is not Mark.VERIFIED


def test_a_large_constant_makes_no_leak_fine():
    """The constant is nearly all of the spread, so the noise hides all other numbers."""
    model = tiny.model("gpt2")
    tokenizer = tiny.tokenizer(causal=True)
    model.wpe.weight[:, 0] += 300
    ids = tiny.ids(texts=1, length=8, causal=True)[0].tolist()
    leak = degrade(
        simulated(model, tokenizer, ids, "hidden:1"), noise=0.004
    ).with_noise(0.004)
    result = invert.recover_text(model, tokenizer, leak)
    assert result.ids != ids
    assert Mark.VERIFIED not in result.marks
