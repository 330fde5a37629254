"""Where tokens stand: the gradient's sums over each token and over each position.

With x(v, p) = (ŵ_v + û_p)/s + b (inputs.py), the gradient G = Σ_(v,p) δ_vp x(v, p)ᵀ of the first
maps is

    G = Σ_v α_v ŵ_vᵀ + Σ_p β_p û_pᵀ + γ bᵀ,   α_v = Σ_p δ_vp / s(v, p),   β_p = Σ_v δ_vp / s(v, p).

The ŵ of the batch's tokens, the û and b are linearly independent where there are fewer of them than
the layer is wide, so least squares gives every α_v and β_p. A token that occurs once has all of its
α_v in one β_p, and the α of different tokens are independent as well, so regressing β_p on them
gives a share near 1 where it stands and near 0 elsewhere; a token that occurs several times has
parts. So the pairs that the span of several texts admits besides the true ones are told apart.

The same sums say which tokens stand together. A value's gradient is Σ_i A_ij o_i in each head, with
o_i the gradient of the head's output at position i of the same text and A_ij the attention: in
every head the tokens of one text share a direction nearly, because one loss made them. Cosines of
the value map's α, head by head, are therefore near 1 within a text and near 0 between texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.recover.gradients.inputs import FirstInputs

_RANK = 1e-9  # of the largest singular value: what counts as dependent
_WHOLE = 0.8  # of a token's share: it stands there, and nowhere else
_GROWING = (3, 6, 10)  # tokens of a text that its direction is taken from, step by step


@dataclass(frozen=True, eq=False)
class Places:
    """Of tokens (t,): how much of each stands at each position, `shares` (t, n).

    `directions` (t, h, k) are those of the value's gradient in each head, of length one.
    """

    tokens: Tensor
    shares: Tensor
    directions: Tensor

    def beside(self, number: int) -> Tensor:
        """How much each token (t,) resembles those that stand in one text with token `number`.

        The mean cosine over heads with the token's own direction, then with the common one of the
        few that resemble it most, then of more of them: at most one of those at each position, and
        only such as stand at one position alone.
        """
        most, at = self.shares.max(1)
        once = most > _WHOLE
        common = self.directions[number]
        for count in _GROWING:
            alike = torch.einsum("thk,hk->th", self.directions, common).mean(-1)
            ranked = alike.masked_fill(~once, -1.0).argsort(descending=True).tolist()
            nearest = dict[int, int]()  # the token most like it at each position
            for token in ranked[: int(once.sum())]:
                nearest.setdefault(int(at[token]), token)
            members = [number, *list(nearest.values())[:count]]
            common = torch.nn.functional.normalize(self.directions[members].mean(0), dim=-1)
        return torch.einsum("thk,hk->th", self.directions, common).mean(-1)


def places_of(
    rows: Tensor, values: Tensor, heads: int, inputs: FirstInputs, tokens: Tensor, count: int
) -> Places:
    """What the gradient's rows (m, d) say of tokens at the first `count` positions.

    `values` (d, d) are the rows of the value map among them.
    """
    if inputs.places is None:
        raise ValueError("expected a model with embeddings of positions")
    table = torch.cat([inputs.words[tokens], inputs.places[:count], inputs.offset[None]])
    inverse = torch.linalg.pinv(table.mT, rtol=_RANK)
    sums = inverse @ rows.mT
    own, at = sums[: len(tokens)], sums[len(tokens) : len(tokens) + count]
    shares = torch.linalg.pinv(own.mT, rtol=_RANK) @ at.mT
    each = (inverse @ values.mT)[: len(tokens)].unflatten(-1, (heads, -1))
    unit = torch.nn.functional.normalize(each, dim=-1)
    return Places(tokens, shares, unit)
