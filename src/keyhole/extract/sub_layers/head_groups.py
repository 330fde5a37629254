"""All values of all heads, by groups that share them, from the values of a few tokens.

If the spaces that the heads write into are independent (H·k ≤ m), `Σ_h M_h` falls into the heads'
own parts row by row, and that is all of V and O up to a k×k matrix of each head. Heads whose parts
are read from one space share their values (grouped queries, arXiv 2305.13245).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SHARED = 1e-3  # cosines of two spaces that are one differ from 1 by less


@dataclass(frozen=True)
class Values:
    """`V` (G, d, k) and `O` (H, k, m): what is read and written, by groups of heads.

    `groups` are the numbers of the heads that share a V; `O` is in the order of the anchor.
    """

    V: Tensor
    O: Tensor  # noqa: E741
    groups: list[list[int]]

    @classmethod
    def of(cls, total: Tensor, vectors: Tensor, k: int) -> Values:
        """All values from `ωM_h` of some ω and `Σ_h M_h`.

        In a group `ωM_h = (ωV)·O_h` for all its heads with one ωV, so that the O_h of a group are
        one factor of rank k; `Σ_h M_h` is then solved for the V of all groups.
        """
        spaces = torch.linalg.svd(vectors.transpose(0, 1), full_matrices=False)[2][:, :k]
        apart = torch.linalg.pinv(spaces.flatten(0, 1)).unflatten(1, (len(spaces), k))
        groups = _sharing(torch.einsum("dm,mhk->hdk", total, apart))
        O = torch.empty_like(spaces)  # noqa: E741
        for group in groups:
            together = vectors[:, group].flatten(1)
            right = torch.linalg.svd(together, full_matrices=False)[2][:k]
            O[group] = right.unflatten(1, (len(group), -1)).transpose(0, 1)
        sums = torch.cat([O[group].sum(0) for group in groups])
        V = (total @ torch.linalg.pinv(sums)).unflatten(1, (len(groups), k))
        return cls(V.transpose(0, 1).contiguous(), O, groups)

    @property
    def of_heads(self) -> Tensor:
        """`V` (H, d, k) of every head."""
        each = torch.empty(len(self.O), *self.V.shape[1:], dtype=torch.float64)
        for group, V in zip(self.groups, self.V, strict=True):
            each[group] = V
        return each


def _sharing(values: Tensor) -> list[list[int]]:
    """Which heads read the same values; none do if their groups have different sizes."""
    bases = torch.linalg.qr(values)[0]
    groups: list[list[int]] = []
    for head in range(len(values)):
        for group in groups:
            cosines = torch.linalg.svdvals(bases[group[0]].mT @ bases[head])
            if float(cosines.min()) > 1 - _SHARED:
                group.append(head)
                break
        else:
            groups.append([head])
    even = len({len(group) for group in groups}) == 1
    return groups if even else [[head] for head in range(len(values))]
