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
_ROUNDING = 1e-7  # of a cosine in float32


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

    def nearest(self, estimates: Tensor, count: int = 1, among: Tensor | None = None) -> Tensor:
        """For estimates (m, e) the `count` ids of largest cosine, best first: (m, count).

        `among` names the only ids that count.
        """
        indices = self._best(estimates, count, among)[1]
        return indices if among is None else among[indices]

    def meant(self, estimates: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest ids (m,) for estimates (m, e), and how doubtful each is.

        That is the ratio of the distances (on the unit sphere, squared) to the nearest and to the
        second: 1 if both are as near.
        """
        cosines, ids = self._best(estimates, 2, None)
        away = (1 - cosines).clamp(min=_ROUNDING)
        return ids[:, 0], away[:, 0] / away[:, -1]

    def _best(self, estimates: Tensor, count: int, among: Tensor | None) -> tuple[Tensor, Tensor]:
        table = self.directions if among is None else self.directions[among]
        directions = torch.nn.functional.normalize(estimates - self.centre, dim=-1)
        parts = directions.split(max(1, _CHUNK // len(table)))
        best = [(part @ table.T).topk(min(count, len(table)), -1) for part in parts]
        return torch.cat([top.values for top in best]), torch.cat([top.indices for top in best])
