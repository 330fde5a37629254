"""200 seeded oracles that are no model: every method ends in a status, never in RECOVERED.

Constant, discontinuous, NaN at random, lying about `dim`, nondeterministic; 40 seeds of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.extract import Extraction, Method, Status
from show import Row

DIM = 4
BEHAVIOURS = ("constant", "discontinuous", "NaN at random", "lying about dim", "nondeterministic")


class Odd:
    """Answers like a planted head, spoilt in one of five ways."""

    dim = DIM

    def __init__(self, behaviour: str, seed: int) -> None:
        self.behaviour = behaviour
        self.stream = torch.Generator().manual_seed(seed)
        size = DIM + 1 + seed % 3 if behaviour == "lying about dim" else DIM
        kind = ("head", "multi-head", "one-layer", "attention")[seed % 4]
        self.inner = oracle.plant(kind, dim=size, heads=2, width=5, seed=seed)
        self.level = float(torch.randn((), generator=self.stream)) + 2

    def __call__(self, sequences: Tensor) -> Tensor:
        answers = self.inner(sequences)
        if self.behaviour == "constant":
            return torch.full_like(answers, self.level)
        if self.behaviour == "discontinuous":
            return torch.floor(self.level * answers)
        if self.behaviour == "nondeterministic":
            noise = torch.randn(answers.shape, generator=self.stream, dtype=torch.float64)
            return answers + noise
        hit = torch.rand(answers.shape, generator=self.stream) < 0.3
        return answers.masked_fill(hit, torch.nan)


def methods(seed: int) -> list[Method]:
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


def attack(behaviour: str, seed: int, method: Method) -> Extraction:
    return method(Odd(behaviour, seed))


def run(quick: bool) -> Iterator[Row]:
    """Quick: each oracle meets one method in turn; full: each meets all of them."""
    for behaviour in BEHAVIOURS:
        statuses: Counter[str] = Counter()
        slowest = 0.0
        for seed in range(40):
            every = methods(seed)
            for method in [every[seed % len(every)]] if quick else every:
                result, seconds = show.timed(lambda: attack(behaviour, seed, method))  # noqa: B023
                statuses[result.status.value] += 1
                slowest = max(slowest, seconds)
        yield Row(
            f"{behaviour}: {statuses.total()} attacks on 40 oracles",
            f"{statuses[Status.RECOVERED.value]} called recovered",
            "0",
            statuses[Status.RECOVERED.value] == 0,
            f"{dict(statuses)}, slowest {slowest:.1f} s",
        )


if __name__ == "__main__":
    show.main(run)
