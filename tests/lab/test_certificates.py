"""Certificates against brute force: every unit, and on small models every pair, is really cut."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
import reference_disrupt as reference
import torch

import tiny_heads
from keyhole.core.errors import InputError
from keyhole.data import Example, encode
from keyhole.disrupt import HackAttend
from keyhole.lab.certificates import certify, certify_each
from keyhole.lab.written_out import embedded, jacobian, spectral, written_out
from keyhole.models.demo import EXAMPLES, load_demo

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "peers"))
from auto_lirpa import least_in_layers

FULL = bool(int(os.environ.get("KEYHOLE_FULL", "0")))


def small(seed, scale, length=6, classes=2):
    """A BERT of two layers whose attention is near uniform for a small scale, and one text."""
    model = tiny_heads.model("bert", "classes", classes=classes, seed=seed, scale=scale).double()
    batch = {name: value[:1] for name, value in tiny_heads.texts(1, length, seed=seed).items()}
    return model, batch, int(tiny_heads.own_labels(model, batch))


def margin(model, batch, label, cut):
    """Of the model written out in the reference, with these units cut."""
    ids = batch["input_ids"]
    with torch.no_grad():
        logits = reference.bert_logits(model, ids, torch.ones_like(ids), cut)[0]
    return float(min(logits[label] - logits[c] for c in range(len(logits)) if c != label))


def free_units(model, batch):
    """By hand: no unit of the first or the last token."""
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    words = range(1, batch["input_ids"].shape[1] - 1)
    return list(itertools.product(range(layers), range(heads), words, words))


@pytest.mark.parametrize(("scale", "classes"), [(0.3, 2), (0.1, 3)])
def test_one_unit_is_exact(scale, classes):
    model, batch, label = small(1, scale, classes=classes)
    proof = certify(model, batch, label)
    left = {unit: margin(model, batch, label, [unit]) for unit in free_units(model, batch)}
    worst = min(left, key=left.__getitem__)
    assert proof.units == len(left)
    assert proof.margin == pytest.approx(margin(model, batch, label, []), abs=1e-9)
    assert proof.alone == pytest.approx(left[worst], abs=1e-9)
    unit = proof.unit
    assert left[unit.layer, unit.head, unit.query, unit.key] == pytest.approx(proof.alone, abs=1e-9)
    assert proof.flipped == (min(left.values()) < 0)


@pytest.mark.parametrize(
    ("seed", "scale", "length"),
    [(3, 0.1, 4), *([(0, 0.05, 5), (1, 0.1, 5), (3, 0.1, 5)] if FULL else [])],
)
def test_no_pair_goes_below_its_bound(seed, scale, length):
    """Every pair is cut, in one layer and across layers: the bound is below all of them."""
    model, batch, label = small(seed, scale, length)
    proof = certify(model, batch, label, 2)
    least = {}
    for pair in itertools.combinations(free_units(model, batch), 2):
        layers = {unit[0] for unit in pair}
        place = layers.pop() if len(layers) == 1 else "across"
        least[place] = min(least.get(place, 1e9), margin(model, batch, label, pair))
    assert proof.layers[0] is not None  # of the last layer only [CLS] is read: that is easy
    for layer, bound in enumerate(proof.layers):
        assert bound is None or bound <= least[layer] + 1e-9
    if proof.whole is not None:
        assert proof.whole <= min(least.values()) + 1e-9


def test_the_bound_is_worth_something():
    model, batch, label = small(0, 0.05, length=5)
    proof = certify(model, batch, label, 2)
    assert proof.holds
    assert proof.holds_within_layers()
    assert proof.whole > 0.9 * proof.margin


@pytest.mark.parametrize("k", [3, 6])
def test_no_larger_mask_goes_below_its_bound(k):
    """Random sets, and the worst that HackAttend finds."""
    model, batch, label = small(4, 0.05, length=6)
    proof = certify(model, batch, label, k)
    assert proof.whole is not None
    stream = torch.Generator().manual_seed(0)
    units = free_units(model, batch)
    for _ in range(50):
        chosen = torch.randperm(len(units), generator=stream)[:k].tolist()
        assert margin(model, batch, label, [units[i] for i in chosen]) >= proof.whole - 1e-9
    share = k / (len(free_units(model, batch)) * (6 / 4) ** 2)
    found = HackAttend.strongest(share, "model", rounds=3, refine=3)(
        model, batch, torch.tensor([label])
    )
    cut = [(u.layer, u.head, u.query, u.key) for u in found.outcomes[0].cut]
    assert 0 < len(cut) <= k
    assert margin(model, batch, label, cut) >= proof.whole - 1e-9


@pytest.mark.parametrize("hardened", [False, True])
def test_nothing_certified_is_flipped_in_the_box(hardened):
    loaded = load_demo("classification", hardened=hardened)
    example = EXAMPLES[0] if FULL else Example("short", 1, "a warm film .")
    batch, labels = encode(loaded.tokenizer, [example])
    proof = certify(loaded.model, batch, example.label, 2)
    n = batch["input_ids"].shape[1]
    assert proof.units == 16 * (n - 2) ** 2
    with torch.no_grad():
        inputs = {k: v for k, v in batch.items() if k != "special_tokens_mask"}
        logits = loaded.model(**inputs).logits[0]
    own = float(logits[example.label] - logits[1 - example.label])
    assert proof.margin == pytest.approx(own, abs=1e-4)  # float32 against float64
    found = HackAttend.strongest(2.5 / (16 * n * n), "model", rounds=2, refine=1)(
        loaded.model, batch, labels
    )
    (outcome,) = found.outcomes
    assert outcome.masked <= 2
    assert not (outcome.flipped and (proof.holds or (outcome.masked == 1 and proof.alone > 0)))


@pytest.mark.parametrize("seed", [3])
def test_the_benchmark_tries_what_is_proved_of_a_layer(seed):
    """Units cut one by one, each the worst: as in loops, and never below the bound."""
    model, batch, label = small(seed, 0.1, length=5)
    proofs = certify_each(model, batch, label, [1, 2])
    left = least_in_layers(model, batch, label, 2)
    for layer, margins in enumerate(left):
        units = [unit for unit in free_units(model, batch) if unit[0] == layer]
        first = min(units, key=lambda unit: margin(model, batch, label, [unit]))
        second = min(margin(model, batch, label, [first, unit]) for unit in units)
        assert margins[0] == pytest.approx(margin(model, batch, label, [first]), abs=1e-9)
        assert margins[1] == pytest.approx(second, abs=1e-9)
    single, pair = proofs
    assert min(margins[0] for margins in left) >= single.alone - 1e-9
    for margins, bound in zip(left, pair.layers, strict=True):
        assert bound is None or margins[1] >= bound - 1e-9


def test_the_classifier_written_out_is_the_model():
    model, batch, _ = small(5, 0.3)
    classifier = written_out(model)
    x = embedded(model, batch["input_ids"][0], None)
    logits, traces = classifier.passed(x)
    inputs = {name: value for name, value in batch.items() if name != "special_tokens_mask"}
    with torch.no_grad():
        torch.testing.assert_close(logits, model(**inputs).logits[0], rtol=1e-9, atol=1e-9)
    norm = classifier.layers[0].first
    exact = torch.autograd.functional.jacobian(norm, traces[0].y[0])
    torch.testing.assert_close(jacobian(norm, traces[0].y)[0], exact, rtol=1e-9, atol=1e-9)
    matrices = torch.randn(5, 9, 9, dtype=torch.float64)
    true = torch.linalg.matrix_norm(matrices, ord=2)
    assert bool(
        ((spectral(matrices) >= true) & (spectral(matrices) <= 9 ** (1 / 16) * true + 1e-6)).all()
    )


def test_what_cannot_be_certified_is_said():
    model, batch, label = small(6, 0.1)
    wrong = certify(model, batch, 1 - label)
    assert not wrong.right
    assert not wrong.holds
    with pytest.raises(InputError, match="k must be 1 or more, not 0"):
        certify(model, batch, label, 0)
    with pytest.raises(InputError, match="one text at a time: got 3"):
        certify(model, tiny_heads.texts(3), label)
    padded = {name: value[2:] for name, value in tiny_heads.texts(3).items()}
    with pytest.raises(InputError, match="must not be padded: 2 of 11 tokens"):
        certify(model, padded, label)
    with pytest.raises(InputError, match="needs two classes or more: the model has 1"):
        certify(small(6, 0.1, classes=1)[0], batch, 0)
    with pytest.raises(InputError, match="are for BERT classifiers with gelu"):
        certify(tiny_heads.model("gpt2", "causal"), batch, label)
