"""Whole Transformer blocks, read from the last token's vectors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import reference
from keyhole import extract
from keyhole.core import Status
from keyhole.oracle import load, plant, save
from keyhole.oracle.block import plant_block

RELU = {"dim": 6, "heads": 4, "head_dim": 1, "width": 6, "activation": "relu", "norm": "none"}
SMALL = {"dim": 10, "heads": 2, "head_dim": 2, "width": 8}
BENT = {**SMALL, "activation": "gelu", "norm": "layer"}
LLAMA = {**SMALL, "head_dim": 4, "width": 5, "activation": "silu", "gated": True, "rotary": True,
         "groups": 1, "biases": False}  # fmt: skip


@pytest.mark.parametrize("kind", [RELU, BENT, {**LLAMA, "rotary": False, "biases": True}])
def test_a_block_answers_as_written(kind):
    target = plant_block(**kind, seed=3)
    X = torch.randn(2, 3, target.dim, generator=torch.Generator().manual_seed(0)).double()
    parts = {name: tensor.numpy() for name, tensor in target.tensors().items()}
    settings = target.activation, target.norm, target.epsilon, target.epsilon_behind
    for tokens, answer in zip(X, target(X), strict=True):
        wanted = torch.from_numpy(reference.block(tokens.numpy(), parts, *settings))
        assert torch.allclose(answer, wanted, rtol=1e-12, atol=1e-12)


def test_a_block_is_stored(tmp_path):
    target = plant_block(**LLAMA)
    save(target, tmp_path / "block.safetensors")
    again = load(tmp_path / "block.safetensors")
    X = torch.ones(1, 2, target.dim, dtype=torch.float64)
    assert torch.equal(target(X), again(X))


NOT_UNIQUE = {**RELU, "width": 12, "seed": 6}  # of the states h that give an answer
CROWDED = {**SMALL, "width": 8, "activation": "silu", "gated": True, "norm": "layer"}
PLACED = {**SMALL, "head_dim": 4, "norm": "none", "rotary": True, "biases": False}


@pytest.mark.parametrize(
    "kind", [RELU, {**RELU, "seed": 7}, NOT_UNIQUE, BENT, LLAMA, CROWDED, PLACED]
)
def test_every_number_comes_back(kind):
    _expect_back(plant_block(**kind))


def test_a_unit_that_is_nearly_always_open_comes_back():
    target = plant_block(**RELU)
    a = target.a.clone()
    a[2] = 4 * target.A[2].norm()
    _expect_back(replace(target, a=a))


def _expect_back(target):
    result = extract.TransformerBlock()(target)
    assert result.status is Status.RECOVERED, result.reason
    found = result.model
    assert (found.activation, found.norm) == (target.activation, target.norm)
    assert extract.judge(target, found, 7).worst < 1e-11
    # A unit's row, its bias and its column of C, of which it is free to be multiplied.
    A, a = target.A, target.a
    if target.norm == "none":
        a = a + A @ target.b
    if target.norm == "layer":
        A = A - A.mean(1, keepdim=True)
    units = torch.cat([A, a[:, None]], 1)
    others = torch.cat([found.A, found.a[:, None]], 1)
    if target.activation == "relu":
        units = units / target.A.norm(dim=1, keepdim=True)
    assert len(units) == len(others)
    assert float(torch.cdist(units, others).amin(1).max()) < 1e-6
    if target.norm != "none":
        assert found.epsilon == pytest.approx(target.epsilon, rel=1e-3)
        assert found.epsilon_behind == pytest.approx(target.epsilon_behind, rel=1e-3)


class _NormBehind:
    """A block whose answers are normed, as BERT's are."""

    def __init__(self):
        self._inner = plant_block(**BENT)
        self.dim = self._inner.dim

    def __call__(self, sequences):
        return torch.nn.functional.layer_norm(self._inner(sequences), (self.dim,))


def test_what_is_not_read_is_refused():
    behind = extract.TransformerBlock()(_NormBehind())
    assert behind.status is Status.NOT_APPLICABLE
    assert "behind the sum" in behind.reason
    scores = extract.TransformerBlock()(plant("head", dim=6))
    assert scores.status is Status.NOT_APPLICABLE


@pytest.mark.parametrize("rounded", [
    lambda y: y.float().double(), lambda y: y.bfloat16().double(), lambda y: y.round(decimals=3),
])  # fmt: skip
def test_coarse_answers_could_not_be_checked(rounded):
    block = plant_block(dim=6, heads=2, width=4, norm="layer")

    class Coarse:
        dim = block.dim

        def __call__(self, sequences):
            return rounded(block(sequences))

    result = extract.TransformerBlock()(Coarse())
    assert result.status is Status.UNVERIFIED
    assert "float64 would do" in result.reason


def test_a_budget_ends_it():
    result = extract.run(plant_block(**BENT), "transformer-block", budget=50)
    assert result.status is Status.BUDGET
