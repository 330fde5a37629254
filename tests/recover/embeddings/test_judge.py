"""The judge of one vector verifies right texts in every stored form, and never similar ones."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import reference
import tiny_models as tiny
from keyhole.core import Status
from keyhole.models import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.edits import Vectors
from keyhole.recover.embeddings.judge import Stored, judge_vector
from keyhole.recover.leaks import Pooled
from keyhole.recover.recovery import Mark
from keyhole.recover.simulate import degrade, leak_of

FORMS = {
    "float32": lambda leak: leak,
    "float16": lambda leak: degrade(leak, "float16"),
    "bfloat16": lambda leak: degrade(leak, "bfloat16"),
    "int8": lambda leak: degrade(leak, "int8"),
    "int4": lambda leak: degrade(leak, "int4"),
    "binary": lambda leak: degrade(leak, "binary"),
    "half the numbers": lambda leak: degrade(
        leak, forms=["truncated:96", "normalised"]
    ),
    "the first numbers of a unit vector": lambda leak: degrade(
        leak, forms=["truncated:96"]
    ),
    "noise of 1%, stated": lambda leak: replace(
        degrade(leak, noise=0.01), noise=0.01 * float(leak.values.std())
    ),
}
TEXTS = [ids.tolist() for ids in tiny.ids(texts=2, length=7)]


@functools.cache
def target():
    return Target.of(tiny.shared("bert", hidden_size=192), tiny.tokenizer())


def leak_for(ids, whose=None):
    whose = whose or target()
    leak = leak_of(whose.model, whose.tokenizer, ids, Exposure("pooled"))
    return replace(leak, tokens=None, model=None)


@functools.cache
def nearest():
    """The nearest of all texts one edit away."""
    ids = TEXTS[0]
    vectors = Vectors(target(), Exposure("pooled"), ids)
    text = vectors.inside(ids)
    everything = sorted(reference.one_edit_away(text, range(1, 200)))
    order = (vectors(everything) @ vectors([text])[0]).argsort(descending=True)[:20]
    return [
        [*vectors.before, *everything[place], *vectors.after]
        for place in order.tolist()
    ]


@pytest.mark.parametrize("form", FORMS)
def test_the_right_text_is_verified_and_the_nearest_ones_are_not(form):
    ids = TEXTS[0]
    leak = replace(FORMS[form](leak_for(ids)), precision=None)
    verdict = judge_vector(target(), leak, ids)
    assert verdict.verified, verdict
    assert verdict.status is Status.RECOVERED
    assert set(verdict.marks) == {Mark.VERIFIED}
    assert len(verdict.marks) == len(ids)
    assert verdict.similarity > 0.7
    for other in nearest()[:2]:
        verdict = judge_vector(target(), leak, other)
        assert not verdict.verified
        assert Mark.VERIFIED not in verdict.marks
        assert len(verdict.marks) == len(other)


def test_nothing_is_verified_with_noise_that_nobody_stated():
    ids = TEXTS[0]
    for share in (0.01, 0.05):
        verdict = judge_vector(target(), degrade(leak_for(ids), noise=share), ids)
        assert not verdict.verified
        assert verdict.status is Status.INEXACT
        assert Mark.LIKELY in verdict.marks
        assert "not within its precision" in verdict.reason
    verdict = judge_vector(target(), degrade(leak_for(ids), noise=1.5), ids)
    assert set(verdict.marks) == {Mark.UNKNOWN}


def test_noise_that_hides_an_alternative_leaves_the_text_likely():
    ids = TEXTS[0]
    leak = leak_for(ids)
    loud = replace(degrade(leak, noise=0.8), noise=0.8 * float(leak.values.std()))
    verdict = judge_vector(target(), loud, ids)
    assert not verdict.verified
    assert "one edit away are not excluded, such as 'w" in verdict.reason
    assert Mark.UNKNOWN in verdict.marks


def test_a_model_without_positions_leaves_the_order_open():
    model = tiny.model("bert", hidden_size=192)
    model.embeddings.position_embeddings.weight.data.zero_()
    whose = Target.of(model, tiny.tokenizer())
    ids = TEXTS[0]
    verdict = judge_vector(whose, leak_for(ids, whose), ids)
    assert not verdict.verified
    assert verdict.status is Status.NOT_IDENTIFIABLE
    text = whose.decode(ids[1:-1]).split()
    alternative = verdict.reason.rpartition("such as '")[2].rstrip("'").split()
    assert sorted(alternative) == sorted(text)
    assert alternative != text


def test_two_tokens_of_equal_embedding_are_not_distinguished():
    model = tiny.model("bert", hidden_size=192)
    ids = list(TEXTS[0])
    table = model.embeddings.word_embeddings.weight
    table.data[150] = table.data[ids[3]]
    doubled = Target.of(model, tiny.tokenizer())
    leak = leak_for(ids, doubled)
    for token in (ids[3], 150):
        verdict = judge_vector(doubled, leak, [*ids[:3], token, *ids[4:]])
        assert not verdict.verified
        assert verdict.marks[3] is Mark.UNKNOWN
        assert verdict.marks[2] is Mark.LIKELY


def test_few_bits_do_not_verify_a_long_text():
    """Signs of 16 numbers for 6 tokens of 200, which are 46 bits, and odds of e¹⁰ : 1 are 14."""
    small = Target.of(tiny.shared("bert", hidden_size=16), tiny.tokenizer())
    ids = TEXTS[0]
    leak = degrade(leak_for(ids, small), "binary")
    verdict = judge_vector(small, leak, ids)
    assert not verdict.verified
    assert "16 of 16 signs agree" in verdict.reason
    # Where the only other candidates are far away, the bits alone decide.
    short = ids[:2] + ids[-1:]
    apart = {}
    for width in (2, 96):
        leak = degrade(
            leak_for(short), "int8", forms=[f"truncated:{width}", "normalised"]
        )
        apart[width] = judge_vector(target(), replace(leak, tokens=3), short)
    assert apart[96].verified
    assert "bits do not tell it from all others, 22 would" in apart[2].reason


@pytest.mark.parametrize("form", ["float32", "int8", "binary"])
def test_random_vectors_are_not_verified(form):
    stream = torch.Generator().manual_seed(0)
    first, second = (leak_for(ids) for ids in TEXTS)
    other = Target.of(tiny.shared("bert", seed=5, hidden_size=192), tiny.tokenizer())
    mean = torch.nn.functional.normalize(first.values + second.values, dim=0)
    for values in (
        torch.randn(192, generator=stream) / 14,
        mean,
        leak_for(TEXTS[0], other).values,
    ):
        leak = replace(FORMS[form](Pooled(values)), precision=None)
        verdict = judge_vector(target(), leak, TEXTS[0])
        assert not verdict.verified
        assert Mark.VERIFIED not in verdict.marks


def test_no_text_is_run_twice():
    leak = leak_for(TEXTS[0])
    ids = TEXTS[0]
    vectors = Vectors(target(), leak.exposure, ids)
    first = judge_vector(target(), leak, ids, vectors)
    again = judge_vector(target(), degrade(leak, "float16"), ids, vectors)
    assert (first.verified, again.verified) == (True, True)
    assert first.forwards == vectors.passes
    assert again.forwards == 0


@pytest.mark.parametrize("family", ["gpt2", "distilbert"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_other_families_and_poolings(family, pooling):
    causal = family == "gpt2"
    whose = Target.of(tiny.shared(family), tiny.tokenizer(causal))
    ids = tiny.ids(1, 5, causal=causal)[0].tolist()
    way = Exposure("pooled", 0, pooling, normalised=False)
    leak = replace(leak_of(whose.model, whose.tokenizer, ids, way), tokens=None)
    assert judge_vector(whose, leak, ids).verified
    assert not judge_vector(
        whose, leak, [*ids[:2], ids[2] % 100 + 50, *ids[3:]]
    ).verified


def test_nothing_is_verified_if_noise_lets_similar_texts_fit():
    """A text two edits away is not tried: it must not fit, and so one at a neighbour's distance."""
    stream = torch.Generator().manual_seed(0)
    own = torch.nn.functional.normalize(
        torch.randn(384, generator=stream), dim=0
    ).double()
    along = torch.nn.functional.normalize(
        torch.randn(384, generator=stream), dim=0
    ).double()
    noise = 0.01
    stored = Stored.of(Pooled(own.float(), noise=noise), own)
    for far, apart in ((10, False), (17, False), (18, True), (30, True)):
        other = own + far * noise * along
        assert stored.resolves(own, other[None]) is apart
        noisy = (own + noise * torch.randn(384, generator=stream)).float()
        if apart:  # the first test alone distinguishes it
            assert not Stored.of(Pooled(noisy, noise=noise), other).fits(other)
    exact = Stored.of(Pooled(own.float()), own)
    assert exact.resolves(own, own[None])  # no noise: odds alone decide
