"""L-BFGS: the two-loop recursion against the explicit matrix, and many problems at once."""

from __future__ import annotations

import numpy as np
import torch

from keyhole.core.lbfgs import LBFGS, two_loops


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


def test_lbfgs_solves_many_problems_at_once():
    """Quadratics of different condition agree with the closed form; one leaves early."""
    stream = torch.Generator().manual_seed(0)
    A = (
        torch.randn(3, 12, 6, generator=stream)
        * torch.tensor([1.0, 3.0, 0.2])[:, None, None]
    )
    b = torch.randn(3, 12, generator=stream)

    def objective(rows):
        def at(z):
            off = torch.einsum("bij,bj->bi", A[rows], z) - b[rows]
            return off.square().sum(-1), 2 * torch.einsum("bij,bi->bj", A[rows], off)

        return at

    search = LBFGS.begin(torch.zeros(3, 6), first=0.1)
    for _ in range(5):
        search = search.step(objective([0, 1, 2]))
    search = search.keep(torch.tensor([True, False, True]))
    for _ in range(40):
        search = search.step(objective([0, 2]))
    best = torch.linalg.lstsq(A[[0, 2]], b[[0, 2]].unsqueeze(-1)).solution[..., 0]
    assert torch.allclose(search.x, best, atol=1e-3)
