"""Least squares on answers, against a naive fit."""

from __future__ import annotations

import numpy as np
import reference_noise as reference
import torch

from keyhole import oracle
from keyhole.extract.gauss_newton import refined


def test_least_squares_agrees_with_a_dense_fit():
    d = 3
    stream = torch.Generator().manual_seed(0)
    head = oracle.plant(dim=d, seed=5)

    def unit(rows):
        return torch.nn.functional.normalize(
            torch.randn(rows, d, generator=stream, dtype=torch.float64), dim=1
        )

    tokens = 3 * unit(5)
    deltas = unit(4)
    xs = unit(4)
    grid = torch.arange(16)
    i = grid // 4
    j = grid % 4
    xi = torch.rand(16, generator=stream, dtype=torch.float64) + 0.2
    g = torch.rand(16, generator=stream, dtype=torch.float64) + 2
    last = xi[:, None] * xs[j]
    pairs = torch.stack([last + g[:, None] * deltas[i], last], dim=1)
    noisy = oracle.Noisy(head, 1e-2)
    a = noisy(tokens[:, None])
    b = noisy(pairs)
    start = head.v + 0.01, head.W - 0.01
    asked = [(X, y, torch.ones_like(y)) for X, y in ((tokens[:, None], a), (pairs, b))]
    found = refined(oracle.Head(*start[::-1]), ("W", "v"), asked)
    wanted = reference.dense_gauss_newton(
        start[0].numpy(),
        start[1].numpy(),
        [*tokens[:, None].numpy(), *pairs.numpy()],
        torch.cat([a, b]).numpy(),
    )
    assert np.allclose(found.v.numpy(), wanted[0], atol=1e-4)
    assert np.allclose(found.W.numpy(), wanted[1], atol=1e-4)
