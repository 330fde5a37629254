"""Alternatives to a text: one edit away, all kinds of edits, and the nearest token among them."""

from __future__ import annotations

import functools

import torch

import reference
import tiny_models as tiny
from keyhole.models import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.edits import Vectors, alternatives_to

WAY = Exposure("pooled")
VOCABULARY = range(1, 200)  # without padding


@functools.cache
def target():
    return Target.of(tiny.model("bert"), tiny.tokenizer())


def texts(count=3, length=7):
    return [ids.tolist() for ids in tiny.ids(count, length)]


def test_vectors_are_those_of_the_model_in_any_batch():
    ids = texts()[0]
    vectors = Vectors(target(), WAY, ids)
    text = vectors.inside(ids)
    assert [*vectors.before, *text, *vectors.after] == ids
    states = target().model(torch.tensor([ids])).last_hidden_state[0]
    own = torch.nn.functional.normalize(states.mean(0), dim=0)
    rows = vectors([text, text[:2], (*text, 7), text])
    assert torch.allclose(rows[0], own, atol=1e-6)
    assert torch.equal(rows[0], rows[3])
    assert vectors.passes == 3


def test_derivatives_are_those_of_finite_differences():
    ids = texts()[0]
    vectors = Vectors(target(), WAY, ids)
    text = vectors.inside(ids)
    probes, slopes = vectors.probed(text)
    table = target().parts.table
    before = table.data[text[2]].clone()
    step = 1e-2 * torch.randn(32)
    try:
        values = []
        for sign in (1, -1):
            table.data[text[2]] = before + sign * step
            values.append(Vectors(target(), WAY, ids)([text])[0])
    finally:
        table.data[text[2]] = before
    change = probes @ (values[0] - values[1]) / 2
    assert torch.allclose(slopes[:, 2] @ step, change, rtol=2e-2, atol=2e-4)


def test_alternatives_are_one_edit_away_and_of_every_kind():
    ids = texts()[0]
    vectors = Vectors(target(), WAY, ids)
    text = vectors.inside(ids)
    own = vectors([text])[0]
    alternatives = alternatives_to(vectors, text, own, same_length=False)
    assert set(alternatives.texts) <= reference.one_edit_away(text, VOCABULARY)
    assert len(set(alternatives.texts)) == len(alternatives.texts)
    lengths = [len(edit) - len(text) for edit in alternatives.texts]
    assert {lengths.count(1) > len(text), lengths.count(-1) == len(text)} == {True}
    swaps = [edit for edit in alternatives.texts if sorted(edit) == sorted(text)]
    assert len(swaps) == len(text) * (len(text) - 1) // 2
    same = alternatives_to(vectors, text, own, same_length=True)
    assert {len(edit) for edit in same.texts} == {len(text)}
    assert torch.equal(vectors(alternatives.texts), alternatives.vectors)
    for edit, touched in zip(
        alternatives.texts, alternatives.touched.tolist(), strict=True
    ):
        if len(edit) == len(text):
            assert touched == [a != b for a, b in zip(text, edit, strict=True)]
        elif len(edit) < len(text):
            assert sum(touched) == 1
        else:
            assert 1 <= sum(touched) <= 2


def test_the_nearest_of_all_edits_is_an_alternative():
    """Compare with every text one edit away."""
    hits = 0
    for ids in texts(4, 5):
        vectors = Vectors(target(), WAY, ids)
        text = vectors.inside(ids)
        own = vectors([text])[0]
        everything = sorted(reference.one_edit_away(text, VOCABULARY))
        best = everything[int((vectors(everything) @ own).argmax())]
        hits += best in alternatives_to(vectors, text, own, same_length=False).texts
    assert hits == 4


def test_a_long_text_has_a_bounded_number_of_alternatives():
    ids = texts(1, 72)[0]
    small = Target.of(tiny.model("bert", num_hidden_layers=1), tiny.tokenizer())
    vectors = Vectors(small, WAY, ids)
    text = vectors.inside(ids)
    alternatives = alternatives_to(vectors, text, vectors([text])[0], same_length=False)
    assert len(alternatives.texts) <= 64 * 12 + 128 + 64 + 5 * 65
    assert alternatives.touched.any(0).sum() >= 64
