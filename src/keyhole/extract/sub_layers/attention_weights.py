"""Scores of every head from one answer, once its values are known.

The sequence `[0 ; w_1 ; … ; w_p ; 0 ; … ; 0 ; x]` makes the last token answer with

    Σ_h (Σ_j a_hj·w_j + a_h·x) M_h,    a_hj = e^{z_hj}/(c + e^{s_h} + Σ_j e^{z_hj}),

c the number of zero tokens, whose score and value are 0. The answer is m numbers, so that as many
as H(p + 1) ≤ m weights follow by a linear solve, of all heads at once. What they leave of 1 is
c/(…), so logarithms give the scores z_hj of the keys and s_h of x with itself.

All heads are solved for together, and not one by one after a projection onto the space that each
writes into: those spaces are independent but nearly meet (the output projection of SmolLM2's first
block has condition 4e4), the values of half as many tokens do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.extract.sub_layers.surroundings import Surroundings

_FULL = 0.6  # of the weights that an answer could tell apart: the last ones cost many digits


@dataclass(frozen=True)
class Reader:
    """Reads scores where the values are known: `values` (H, d, k) and `outputs` (H, k, m)."""

    view: Surroundings
    values: Tensor
    outputs: Tensor

    @property
    def keys(self) -> int:
        """How many keys a sequence should hold at most."""
        return max(1, math.floor(_FULL * self.outputs.shape[2] / len(self.outputs)) - 1)

    def _written(self, tokens: Tensor) -> Tensor:
        """`t M_h` of tokens (n, d): (n, H, m)."""
        return torch.einsum(
            "nhk,hkm->nhm", torch.einsum("nd,hdk->nhk", tokens, self.values), self.outputs
        )

    def scores(self, keys: Tensor, xs: Tensor, gap: int = 0) -> Tensor:
        """z and s, (len(xs), H, p + 1), with so many zero tokens between the keys and x."""
        (p, d), heads = keys.shape, len(self.outputs)
        zero = torch.zeros(1, d, dtype=torch.float64)
        ahead = torch.cat([zero, keys, zero.expand(gap, d)]).expand(len(xs), -1, -1)
        answers = self.view.answer(torch.cat([ahead, xs.unsqueeze(1)], 1)).unsqueeze(-1)
        # The keys' part of the system is the same for all x: it is factored once.
        Q, R = torch.linalg.qr(self._written(keys).transpose(0, 1).flatten(0, 1).mT)
        own = self._written(xs).mT
        outside, rest = (part - Q @ (Q.mT @ part) for part in (own, answers))
        of_x = torch.linalg.lstsq(outside, rest).solution
        of_keys = torch.linalg.solve_triangular(R, Q.mT @ (answers - own @ of_x), upper=True)
        weights = torch.cat([of_keys.reshape(-1, heads, p), of_x], -1)
        rest = (1 - weights.sum(-1, keepdim=True)) / (1 + gap)
        if not bool((weights > 0).all() & (rest > 0).all()):
            raise Unsuccessful(
                Status.MISMATCH, "the answers leave the range that attention weights allow"
            )
        return torch.log(weights / rest)
