"""Masks for training cut the strongest units and do not depend on the labels."""

from __future__ import annotations

import inspect

import pytest
import torch

import tiny_classifiers as small
from keyhole.harden import AttackMasks
from keyhole.harden.defences import attack_masks as module
from keyhole.harden.defences.attack_masks import Cuts, Tokens, removal, strongest
from keyhole.models.masking import rewriting


def masks_of(defence, model, batch, labels, seed=0):
    """Return the cuts of the last pass, one for each site."""
    found = []

    class Recorded(Cuts):
        def cut(self, site, shape):
            made = super().cut(site, shape)
            if made is not None:
                found.append(made)
            return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Cuts", Recorded)
        small.total(defence, model, batch, labels, seed)
    return found[-2:]


def test_removal_against_finite_differences():
    """Cutting a little: the row's weights with unit j scaled by 1 − s and renormalised, at s → 1.

    To first order in the change of the row, which is exact for a loss that is linear in
    it.
    """
    stream = torch.Generator().manual_seed(0)
    scores = torch.randn(6, generator=stream, dtype=torch.float64)
    g = torch.randn(6, generator=stream, dtype=torch.float64)
    a = scores.softmax(-1)
    for unit in range(6):
        cut = scores.clone()
        cut[unit] = -torch.inf
        expected = float(g @ (cut.softmax(-1) - a))
        assert float(removal(a[None], g[None])[0, unit]) == pytest.approx(
            expected, rel=1e-10
        )


def test_the_strongest_units_of_each_head():
    stream = torch.Generator().manual_seed(1)
    a = torch.randn(3, 2, 5, 5, generator=stream).softmax(-1)
    a[0, :, :, 4] = 0  # padding
    g = torch.randn(3, 2, 5, 5, generator=stream)
    special = torch.zeros(3, 5, dtype=torch.bool)
    special[:, 0] = True
    real = torch.ones(3, 5, dtype=torch.bool)
    real[0, 4] = False
    made = strongest(a, g, 0.2, Tokens(real, real & ~special))
    effect = removal(a, g)
    for text in range(3):
        n = 4 if text == 0 else 5
        for head in range(2):
            chosen = sorted(
                (
                    (float(effect[text, head, q, k]), q, k)
                    for q in range(1, n)
                    for k in range(1, n)
                ),
                reverse=True,
            )[: int(0.2 * n * n)]
            expected = {(q, k) for value, q, k in chosen if value > 0}
            assert {tuple(p) for p in made[text, head].nonzero().tolist()} == expected
    assert not strongest(a, g, 0.0).any()
    assert (strongest(a, g, 1e-6).sum((2, 3)) == 1).all(), "at least one"


@pytest.mark.parametrize("kind", ["classes", "choices"])
@pytest.mark.parametrize("label", ["random", "predicted"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_masks_do_not_depend_on_the_labels(kind, label, rounds):
    model = small.model(kind)
    (batch, labels) = small.batch(kind)
    defence = AttackMasks(share=0.1, label=label, rounds=rounds)
    first = masks_of(defence, model, batch, labels)
    other = masks_of(defence, model, batch, 1 - labels)
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert sum(int(a.sum()) for a in first) > 0
    assert "labels" not in inspect.signature(AttackMasks.attack).parameters


def test_random_targets_change_with_the_stream_and_predicted_ones_do_not():
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    for label, same in (("random", False), ("predicted", True)):
        defence = AttackMasks(share=0.1, label=label)
        first, two = (masks_of(defence, model, batch, labels, seed) for seed in (0, 3))
        assert all(torch.equal(a, b) for a, b in zip(first, two, strict=True)) == same


@pytest.mark.parametrize("rounds", [1, 3])
def test_budget_and_spared_positions(rounds):
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    made = masks_of(AttackMasks(share=0.1, rounds=rounds), model, batch, labels)
    lengths = batch["attention_mask"].sum(1)
    for cut in made:
        assert (cut.sum((2, 3)) <= (0.1 * lengths[:, None] ** 2).floor()).all()
        special = batch["special_tokens_mask"].bool()
        assert not (cut & special[:, None, None, :]).any()
        assert not (cut & special[:, None, :, None]).any()


def test_masks_for_the_prediction_lower_it_more_than_random_masks():
    model = small.model(dropout=0.0, seed=3)
    (batch, _) = small.batch(texts=16)
    inputs = {k: v for k, v in batch.items() if k != "special_tokens_mask"}
    with torch.no_grad():
        clean = model(**inputs).logits
    predicted = clean.argmax(-1)

    def loss(cuts):
        rewrite = Cuts()
        rewrite.made = cuts
        with rewriting(model, rewrite), torch.no_grad():
            return float(
                torch.nn.functional.cross_entropy(model(**inputs).logits, predicted)
            )

    made = masks_of(AttackMasks(share=0.1, label="predicted"), model, batch, predicted)
    stream = torch.Generator().manual_seed(0)
    random = [torch.rand(cut.shape, generator=stream) < 0.1 for cut in made]
    before = float(torch.nn.functional.cross_entropy(clean, predicted))
    assert loss(made) > before
    assert loss(made) - before > 3 * abs(loss(random) - before)


def test_the_clean_answer_is_a_constant_in_the_divergence():
    """The gradient of the divergence is that of the masked pass alone."""
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    inputs = {k: v for k, v in batch.items() if k != "special_tokens_mask"}
    defence = AttackMasks(share=0.1, weight=2.0, label="predicted")
    made = masks_of(defence, model, batch, labels)
    loss, gradient = small.total(defence, model, batch, labels)
    model.zero_grad()
    rewrite = Cuts()
    with rewriting(model, rewrite):
        clean = model(**inputs).logits
        rewrite.made = made
        masked = model(**inputs).logits
    p = clean.detach().softmax(-1)
    apart = (p * (p.log() - masked.log_softmax(-1))).sum(-1).mean()
    expected = torch.nn.functional.cross_entropy(clean, labels) + 2 * apart
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    reference = model.get_input_embeddings().weight.grad
    assert torch.allclose(gradient, reference, rtol=1e-3, atol=1e-6)
