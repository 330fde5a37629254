"""Where tokens stand: the gradient's sums over each token and over each position.

With x(v, p) = (ŵ_v + û_p)/s + b (inputs.py), the gradient G = Σ_(v,p) δ_vp x(v, p)ᵀ of the first
maps is

    G = Σ_v α_v ŵ_vᵀ + Σ_p β_p û_pᵀ + γ bᵀ,   α_v = Σ_p δ_vp / s(v, p),   β_p = Σ_v δ_vp / s(v, p).

The ŵ of the batch's tokens, the û and b are linearly independent where there are fewer of them than
the layer is wide, so least squares gives every α_v and β_p. A token that occurs once has all of its
α_v in one β_p, and the α of different tokens are independent as well, so regressing β_p on them
gives a share near 1 where it stands and near 0 elsewhere; a token that occurs several times has
parts. So the pairs that the span of several texts admits besides the true ones are told apart. The
α of one text's tokens also resemble each other, because one loss made them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.recover.gradients.inputs import FirstInputs


@dataclass(frozen=True, eq=False)
class Places:
    """Of tokens (t,): how much of each stands at each position, `shares` (t, n).

    `alike` (t, t) is the cosine of what two tokens' gradients are, over all their positions.
    """

    tokens: Tensor
    shares: Tensor
    alike: Tensor


def places_of(rows: Tensor, inputs: FirstInputs, tokens: Tensor, count: int) -> Places:
    """What the gradient's rows (m, d) say of tokens at the first `count` positions."""
    if inputs.places is None:
        raise ValueError("expected a model with embeddings of positions")
    table = torch.cat([inputs.words[tokens], inputs.places[:count], inputs.offset[None]])
    sums = _solved(table.mT, rows.mT)
    own, at = sums[: len(tokens)], sums[len(tokens) : len(tokens) + count]
    # Only products of these long rows are needed: their coordinates in their own span will do.
    basis = torch.linalg.qr(torch.cat([own, at]).mT).Q
    own, at = own @ basis, at @ basis
    shares = _solved(own.mT, at.mT)
    unit = torch.nn.functional.normalize(own, dim=-1)
    return Places(tokens, shares, unit @ unit.mT)


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """Least squares of least length, whatever the rank."""
    return torch.linalg.pinv(matrix, rtol=1e-9) @ right
