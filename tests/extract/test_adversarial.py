"""Oracles that are no model: whatever the method, they end in a status."""

from __future__ import annotations

import pytest
import torch

from keyhole import extract, oracle
from keyhole.extract import Status

DIM = 4
BEHAVIOURS = (
    "constant",
    "discontinuous",
    "NaN at random",
    "lying about dim",
    "nondeterministic",
)


class Odd:
    """Answers like a planted head, spoilt in one of five ways."""

    dim = DIM

    def __init__(self, behaviour, seed):
        self.behaviour = behaviour
        self.stream = torch.Generator().manual_seed(seed)
        size = DIM + 1 + seed % 3 if behaviour == "lying about dim" else DIM
        kind = ("head", "multi-head", "one-layer", "attention")[seed % 4]
        self.inner = oracle.plant(kind, dim=size, heads=2, width=5, seed=seed)
        self.level = float(torch.randn((), generator=self.stream)) + 2

    def __call__(self, sequences):
        answers = self.inner(sequences)
        if self.behaviour == "constant":
            return torch.full_like(answers, self.level)
        if self.behaviour == "discontinuous":
            return torch.floor(self.level * answers)
        if self.behaviour == "nondeterministic":
            noise = torch.randn(
                answers.shape, generator=self.stream, dtype=torch.float64
            )
            return answers + noise
        hit = torch.rand(answers.shape, generator=self.stream) < 0.3
        return answers.masked_fill(hit, torch.nan)


def methods(seed):
    return [
        extract.Auto(seed=seed),
        extract.SingleHead(seed=seed),
        extract.LowRank(seed=seed),
        extract.NuclearNorm(rank=1, seed=seed),
        extract.Tolerant(1e-3, seed=seed),
        extract.SignOnly(accuracy=1e-2, seed=seed),
        extract.OneLayerTransformer(seed=seed),
        extract.OneLayerTransformer(attention=extract.MultiHead(), seed=seed),
        extract.ReluNetwork(seed=seed),
        extract.MultiHead(seed=seed),
        extract.OrthogonalHeads(seed=seed),
        extract.FullOutput(seed=seed),
    ]


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_ends_in_a_status(behaviour):
    for seed in range(9):
        every = methods(seed)
        method = every[(seed + BEHAVIOURS.index(behaviour)) % len(every)]
        odd = Odd(behaviour, seed)
        result = method(odd)
        if (
            behaviour == "nondeterministic" and result.status is Status.RECOVERED
        ):  # behind noise
            tokens = torch.eye(DIM, dtype=torch.float64)[None]
            assert torch.allclose(result.model(tokens), odd.inner(tokens), rtol=1e-6)
            continue
        assert result.status is not Status.RECOVERED, (seed, method)
        assert result.status.advice
        assert "\n" not in result.reason
