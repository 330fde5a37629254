"""Hessians from answers, and the finest blocks that several matrices share."""

from __future__ import annotations

import numpy as np
import pytest
import reference_layers as reference
import torch
from planted_heads import orthogonal_heads

from any_function import normal
from keyhole.extract.bilinear import random_orthogonal, read_values
from keyhole.extract.orthogonal_heads import QuadraticForms, finest_blocks
from keyhole.oracle import Counted


def test_the_hessian_is_the_one_the_paper_derives():
    truth, _ = orthogonal_heads([2, 3])
    Ws = [W.numpy() for W in truth.W]
    vs = [v.numpy() for v in truth.v]
    x = normal(0, 5).numpy()
    numerical = reference.numerical_hessian(
        lambda d: reference.response(d, x, Ws, vs), 5, 1e-4
    )
    assert np.allclose(reference.hessian(x, Ws, vs), numerical, atol=1e-6)


@pytest.mark.parametrize(("levels", "accuracy"), [(1, 1e-8), (2, 1e-10), (3, 1e-11)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_hessians_by_finite_differences(levels, accuracy, size):
    truth, _ = orthogonal_heads([2, 3, 3], scale=size)
    counted = Counted(truth)
    v = read_values(counted)
    forms = QuadraticForms(counted, v, 1e-16 ** (1 / (2 * levels + 1)), levels)
    x = normal(1, 8)
    x = x / torch.linalg.vector_norm(x)
    found = forms.hessian(x, torch.Generator().manual_seed(0)).numpy()
    exact = reference.hessian(
        x.numpy(), [W.numpy() for W in truth.W], [v.numpy() for v in truth.v]
    )
    assert np.abs(found - exact).max() <= accuracy * np.abs(exact).max()
    assert counted.queries <= 8 + levels * 36 + 12 * 4


def test_blocks_of_exact_matrices():
    Q = random_orthogonal(9, torch.Generator().manual_seed(0))
    sizes = [1, 2, 2, 4]
    matrices = []
    for seed in range(2):
        parts = [normal(10 * seed + k + i, k, k) for i, k in enumerate(sizes)]
        matrices.append(
            Q @ torch.block_diag(*[part + part.mT for part in parts]) @ Q.mT
        )
    blocks = finest_blocks(matrices, 1e-13, torch.Generator().manual_seed(1))
    assert sorted(block.shape[1] for block in blocks) == sizes
    for block in blocks:
        for matrix in matrices:
            moved = matrix @ block
            assert torch.allclose(moved, block @ (block.mT @ moved), atol=1e-9)
