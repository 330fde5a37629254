"""Changes of stored vectors that `keyhole audit --against-defences` tries, and their price.

A store may keep changed vectors: with noise, or as signs. `Defence` is such a change
with what an attacker knows of it; audit/stores.py reads the changed vectors. `recall`
is what search loses:

    recall@10   the share of the ten texts nearest to a query by plain vectors that are among the
                ten nearest by stored vectors

benchmarks/protection.py measures more of them (projections, secret rotations, codes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.recover.gradients.update import DELTA, epsilon_of
from keyhole.recover.simulate import ROUNDINGS

NEAREST = 10
DISTANCE = 2.0  # the largest distance of two vectors of length one

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Defence:
    """A defence: `keep` maps vectors (b, d) to stored ones.

    `stated` is what the attacker knows of the stored form, as fields of `Pooled`.
    """

    name: str
    strength: str
    keep: Change
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])


def gaussian_noise(share: float, d: int, seed: int = 0) -> Defence:
    """Return noise whose length is `share` of a vector's, with the ε of one release.

    f + σ g is (ε, δ)-private for σ = Δ·noise(ε), with Δ = 2 the largest distance of two
    vectors (Balle and Wang, arXiv 1805.06530).
    """
    sigma = share * d**-0.5
    return noisy_by(
        sigma, f"ε = {epsilon_of(sigma / DISTANCE):.2g}, δ = {DELTA:g}", seed
    )


def noisy_by(sigma: float, strength: str, seed: int) -> Defence:
    stream = torch.Generator().manual_seed(seed)

    def keep(vectors: Tensor) -> Tensor:
        return vectors + sigma * torch.randn(vectors.shape, generator=stream).to(
            vectors
        )

    return Defence("Gaussian noise", strength, keep, {"noise": sigma})


def rounding(precision: str) -> Defence:
    words = {"int8": "8 bits", "int4": "4 bits", "binary": "signs"}
    return Defence("rounding", words[precision], ROUNDINGS[precision])


def recall(docs: Tensor, kept: Tensor, queries: Tensor, asked: Tensor) -> float:
    """Return the share of the texts nearest by plain vectors that are nearest by stored ones too.

    `docs` are the plain vectors of texts and `queries` those of queries; `kept` and
    `asked` are what the defence makes of them.
    """
    near = [
        (normalize(left, dim=-1) @ normalize(right, dim=-1).T)
        .topk(min(NEAREST, len(docs)))
        .indices
        for left, right in ((queries, docs), (asked, kept))
    ]
    return float((near[0][:, :, None] == near[1][:, None]).any(-1).float().mean())
