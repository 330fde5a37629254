"""Which token is meant by a vector that is near its embedding: the largest cosine.

Encoders normalise their embeddings (LayerNorm) before anything else sees them, so what comes back
from a hidden state is a token's direction; its length is hardly determined, and a distance would
let it decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 2**25  # similarities held at once


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The token table with its mean removed, each row of length one."""

    vectors: Tensor
    centre: Tensor
    directions: Tensor

    @classmethod
    def of(cls, table: Tensor, without: list[int]) -> TokenTable:
        """`without` names the ids that are never meant: padding."""
        vectors = table.float()
        centre = vectors.mean(0)
        directions = torch.nn.functional.normalize(vectors - centre, dim=-1)
        directions[without] = 0.0  # no cosine worth having
        return cls(vectors, centre, directions)

    def nearest(self, estimates: Tensor, count: int = 1) -> Tensor:
        """For estimates (m, e) the `count` ids of largest cosine, best first: (m, count)."""
        directions = torch.nn.functional.normalize(estimates - self.centre, dim=-1)
        size = max(1, _CHUNK // len(self.vectors))
        nearest = [
            (part @ self.directions.T).topk(count, -1).indices for part in directions.split(size)
        ]
        if not nearest:
            return torch.zeros(0, count, dtype=torch.long, device=estimates.device)
        return torch.cat(nearest)
