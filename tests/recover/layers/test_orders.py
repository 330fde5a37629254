"""The judge of rows in no order compares them as a set, and tries other orders."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

import tiny_models as tiny
from keyhole import invert
from keyhole.core import Status
from keyhole.invert import Mark
from keyhole.models import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.layers.judge import judge_rows

IDS = tiny.ids(texts=2, length=14)


@functools.cache
def target():
    return Target.of(tiny.shared("bert", hidden_size=192), tiny.tokenizer())


def permuted(text, precision="float32", layer=2, forms=("permuted",)):
    values = capture(target().model, Exposure("hidden", layer), ids=text[None])[
        "values"
    ][0]
    return invert.degrade(
        invert.HiddenStates(values, layer), precision, seed=4, forms=forms
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("forms", [("permuted",), ("normalised", "permuted")])
def test_the_right_text_is_verified_in_its_own_order_only(precision, forms):
    for text in IDS[:1]:
        leak = permuted(text, precision, forms=forms)
        assert judge_rows(target(), leak, text.tolist()).verified
        for places in ([5, 6], [3, 9]):
            wrong = text.clone()
            wrong[places] = text[places[::-1]]
            assert not judge_rows(target(), leak, wrong.tolist()).verified


def test_a_row_of_another_text_leaves_nothing_verified():
    text, other = IDS
    leak = permuted(text)
    strange = permuted(other)
    values = leak.values.clone()
    values[3] = strange.values[8]
    verdict = judge_rows(target(), replace(leak, values=values), text.tolist())
    assert not verdict.verified
    assert Mark.VERIFIED not in verdict.marks


def test_tokens_that_could_change_places_are_unknown():
    """In embeddings without positions the set of tokens is certain, but no order."""
    blind = tiny.model("bert", hidden_size=192)
    blind.embeddings.position_embeddings.weight.zero_()
    subject = Target.of(blind, tiny.tokenizer())
    text = IDS[0]
    values = capture(blind, Exposure("hidden", 0), ids=text[None])["values"][0]
    verdict = judge_rows(
        subject, invert.HiddenStates(values, 0, permuted=True), text.tolist()
    )
    assert verdict.status is not Status.RECOVERED
    assert set(verdict.marks) == {Mark.UNKNOWN}
    assert f"the order of {len(text)} tokens is unknown" in verdict.reason
