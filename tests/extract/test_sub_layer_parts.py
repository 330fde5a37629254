"""The steps of AttentionSubLayer, each against what was planted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planted_sub_layers import LLAMA, planted

from keyhole.core import Unsuccessful
from keyhole.extract.sub_layer import Reader, find_planes
from keyhole.extract.sub_layer_values import find_gates, open_surroundings


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=stream, dtype=torch.float64)


def test_all_gates_of_a_column_space_are_found_and_no_others():
    features = normal(20, 4)
    theta = 2 * normal(5, 4, seed=1)
    values = normal(5, 9, seed=2)
    rows = torch.sigmoid(features @ theta.mT) @ values
    found = find_gates(rows, features, 5, torch.Generator().manual_seed(0))
    assert found is not None
    apart = torch.cdist(found, theta)
    assert float(apart.amin(0).max()) < 1e-10
    # What is no sum of gates has none.
    assert (
        find_gates(normal(20, 5, seed=3), features, 5, torch.Generator().manual_seed(0))
        is None
    )


def test_planes_and_their_frequencies():
    frequencies = torch.tensor([1.0, 0.1, 0.002], dtype=torch.float64)
    unknown = normal(6, 6)

    def at(places: int) -> torch.Tensor:
        x, y = normal(8, 6, seed=1).chunk(2, 1)
        cos = (-places * frequencies).cos()
        sin = (-places * frequencies).sin()
        return torch.cat([x * cos - y * sin, x * sin + y * cos], 1) @ unknown

    planes = find_planes(at(0), [at(1), at(61)], (1, 61))
    assert planes.frequencies.sort(descending=True).values.tolist() == pytest.approx(
        frequencies.tolist(), rel=1e-9
    )
    turned = planes.turned(
        at(0) @ planes.basis, torch.full((8,), 17.0, dtype=torch.float64)
    )
    assert torch.allclose(turned, at(17) @ planes.basis, rtol=0, atol=1e-11)
    with pytest.raises(Unsuccessful, match="otherwise than rotary positions"):
        find_planes(at(0), [2 * at(1), at(61)], (1, 61))


@pytest.mark.parametrize("gap", [0, 3])
def test_scores_of_all_heads_from_one_answer(gap):
    truth = planted(residual=True)
    view = open_surroundings(truth, torch.Generator().manual_seed(0))
    assert (view.epsilon, view.residual) == (None, False)  # not separated yet
    view = open_surroundings(planted(), torch.Generator())
    total = torch.einsum("hdk,hkm->dm", truth.V, truth.O)
    apart, beside = (
        Reader(view, truth.V, truth.O, total, place) for place in (True, False)
    )
    keys = normal(2, 12)
    xs = normal(3, 12, seed=1)
    queries = torch.einsum("bd,hdk->bhk", xs, truth.Q) + truth.q
    expected = torch.einsum("bhk,jd,hdk->bhj", queries, keys, truth.K)
    assert torch.allclose(apart.scores(keys, xs, gap), expected, rtol=0, atol=1e-11)
    assert torch.allclose(beside.scores(keys, xs), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-12])
@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_is_undone(epsilon, residual):
    truth = planted(**{**LLAMA, "epsilon": epsilon, "residual": residual})
    view = open_surroundings(truth, torch.Generator().manual_seed(0))
    assert view.residual is residual
    assert view.epsilon == pytest.approx(epsilon, rel=1e-9)
    tokens = normal(2, 1, 16) * 0.3
    expected = torch.einsum("bnd,gdk->bgk", tokens, truth.V).repeat_interleave(2, 1)
    expected = torch.einsum("bhk,hkm->bm", expected, truth.O)
    assert torch.allclose(view.answer(tokens), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1e-3, 1e-5])
def test_a_norm_shows_however_little_its_attention_adds(size):
    truth = planted(residual=True, epsilon=1e-6)
    truth = replace(truth, O=truth.O * size)
    view = open_surroundings(truth, torch.Generator().manual_seed(0))
    assert view.residual
    assert view.epsilon == pytest.approx(1e-6, rel=1e-5)
