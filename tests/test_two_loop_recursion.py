"""The two-loop recursion against the explicit matrix."""

from __future__ import annotations

import numpy as np
import torch

from keyhole.core.numerics import two_loops


def dense(slope, pairs, scale):
    """`H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ` for one problem, oldest pair first; then `H ∇`."""
    eye = np.eye(len(slope))
    inverse = scale * eye
    for s, y, weight in pairs:
        left = eye - weight * np.outer(s, y)
        inverse = left @ inverse @ left.T + weight * np.outer(s, s)
    return inverse @ slope


def test_the_loops_are_the_matrix():
    stream = np.random.default_rng(0)
    problems = 3
    size = 6
    for count in (0, 1, 4, 9):
        pairs = []
        for _ in range(count):
            s, y = stream.normal(size=(2, problems, size))
            weight = 1 / (s * y).sum(-1)
            weight[stream.integers(problems)] = 0.0  # a pair that this problem left out
            pairs.append((s, y, weight))
        slope = stream.normal(size=(problems, size))
        scale = stream.uniform(0.5, 2, problems)
        given = [tuple(map(torch.from_numpy, pair)) for pair in pairs]
        got = two_loops(torch.from_numpy(slope), given, torch.from_numpy(scale)).numpy()
        for b in range(problems):
            own = [(s[b], y[b], weight[b]) for s, y, weight in pairs]
            wanted = dense(slope[b], own, scale[b])
            assert np.abs(got[b] - wanted).max() <= 1e-9 * max(1, np.abs(wanted).max())
