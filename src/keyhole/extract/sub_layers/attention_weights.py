"""Scores of every head from one answer, once it is known where each head writes and reads values.

The sequence `[0 ; w_1 ; … ; w_p ; 0 ; … ; 0 ; x]` makes the last token answer with

    Σ_h (Σ_j a_hj·w_j + a_h·x) V_h O_h,    a_hj = e^{z_hj}/(c + e^{s_h} + Σ_j e^{z_hj}),

c the number of zero tokens, whose score and value are 0. The parts of the heads fall apart
(value_spaces.py), each is k numbers, and with p + 1 ≤ k tokens that have a value the weights follow
by a linear solve. What they leave of 1 is c/(…), so logarithms give the scores z_hj of the keys and
s_h of x with itself: for all heads at once, as many as there are numbers in the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.extract.sub_layers.surroundings import Surroundings
from keyhole.results import Status, Unsuccessful

_EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Reader:
    """Reads scores; `values` (H, d, k) and `apart` (m, H, k) split an answer into heads' parts."""

    view: Surroundings
    values: Tensor
    apart: Tensor

    @property
    def width(self) -> int:
        return self.values.shape[2]

    @property
    def keys(self) -> int:
        """How many keys one sequence may hold."""
        return self.width - 1

    def scores(self, keys: Tensor, xs: Tensor, gap: int = 0) -> Tensor:
        """z and s, (len(xs), H, p + 1), with so many zero tokens between the keys and x."""
        d = keys.shape[1]
        zero = torch.zeros(1, d, dtype=torch.float64)
        ahead = torch.cat([zero, keys, zero.expand(gap, d)]).expand(len(xs), -1, -1)
        answers = self.view.answer(torch.cat([ahead, xs.unsqueeze(1)], 1))
        parts = torch.einsum("bm,mhk->bhk", answers, self.apart)
        tokens = torch.cat([keys.expand(len(xs), -1, -1), xs.unsqueeze(1)], 1)
        values = torch.einsum("bjd,hdk->bhjk", tokens, self.values)
        if values.shape[-2] == self.width:
            weights = torch.linalg.solve(values.mT, parts)
        else:
            weights = torch.linalg.lstsq(values.mT, parts.unsqueeze(-1)).solution.squeeze(-1)
        rest = (1 - weights.sum(-1, keepdim=True)) / (1 + gap)
        if not bool((weights > 0).all() & (rest > 0).all()):
            raise Unsuccessful(
                Status.MISMATCH, "the answers leave the range that attention weights allow"
            )
        return torch.log(weights / rest)
