"""Lengths of normalised rows: against planted ones and bisection, and none where none is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
import tiny_models as tiny
from keyhole.models import Exposure, anatomy, capture
from keyhole.recover.attack import Target
from keyhole.recover.layers.row_length import row_lengths, whole_rows
from keyhole.recover.leaks import HiddenStates
from keyhole.recover.simulate import degrade


def layer_norm(gain, bias):
    norm = torch.nn.LayerNorm(len(gain), eps=0.0).double()
    norm.load_state_dict({"weight": torch.tensor(gain), "bias": torch.tensor(bias)})
    return norm


def rms_norm(gain):
    norm = torch.nn.RMSNorm(len(gain), eps=0.0).double()
    norm.load_state_dict({"weight": torch.tensor(gain)})
    return norm


@pytest.mark.parametrize("shift", [0.0, 0.3, 3.0])  # with the largest both roots are positive
def test_lengths_are_the_planted_ones_and_those_of_bisection(shift):
    stream = np.random.default_rng(0)
    gain, bias = stream.uniform(0.3, 2, 40), shift * stream.normal(size=40)
    rows = np.stack([reference.norm_row(x, gain, bias) for x in stream.normal(size=(6, 40))])
    truth = np.linalg.norm(rows, axis=-1)
    u = rows / truth[:, None]
    lengths = row_lengths(torch.tensor(u), layer_norm(gain, bias)).numpy()
    assert lengths == pytest.approx(truth, rel=1e-10)
    assert lengths == pytest.approx([reference.row_length(r, gain, bias) for r in u], rel=1e-9)


def test_an_rms_norm_has_one_length_only():
    stream = np.random.default_rng(1)
    gain = stream.uniform(0.3, 2, 40)
    rows = np.stack([reference.norm_row(x, gain, None) for x in stream.normal(size=(4, 40))])
    truth = np.linalg.norm(rows, axis=-1)
    u = rows / truth[:, None]
    lengths = row_lengths(torch.tensor(u), rms_norm(gain)).numpy()
    assert lengths == pytest.approx(truth, rel=1e-10)
    assert lengths == pytest.approx([reference.row_length(r, gain, None) for r in u], rel=1e-9)


def test_the_smallest_gains_count_too():
    stream = np.random.default_rng(2)
    gain, bias = stream.uniform(0.3, 2, 40), stream.normal(size=40)
    gain[:3], bias[:3] = 1e-30, 1e-31
    x = stream.normal(size=40)
    x[:3] *= 20
    row = reference.norm_row(x, gain, bias)
    u = torch.tensor(row / np.linalg.norm(row))
    norm = layer_norm(gain, bias)
    assert float(row_lengths(u, norm)) == pytest.approx(np.linalg.norm(row), rel=1e-9)
    spoilt = u.clone()
    spoilt[:3] = 1e-3  # noise where next to nothing was
    assert row_lengths(spoilt, norm).isnan()
    assert row_lengths(u, rms_norm(gain)).isnan()  # nothing would show there


@pytest.mark.parametrize("family", tiny.ENCODERS + tiny.DECODERS)
def test_whole_rows_of_every_layer_that_comes_out_of_a_norm(family):
    model = tiny.shared(family)
    target = Target.of(model, tiny.tokenizer(causal=family in tiny.DECODERS))
    ids = tiny.ids(texts=1, length=9)
    for layer in range(anatomy(model).layers + 1):
        true = capture(model, Exposure("hidden", layer), ids=ids)["values"][0]
        leak = degrade(HiddenStates(true, layer), forms=["normalised"])
        (whole,) = whole_rows(target, [leak])
        known = layer == 3 if family in tiny.DECODERS else layer > 0 or family != "albert"
        if known:
            assert torch.allclose(whole.values, true, rtol=1e-4, atol=1e-5)
            assert not whole.normalised
        else:
            assert whole is leak
