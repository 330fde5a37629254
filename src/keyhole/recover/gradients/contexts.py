"""What an encoder's first attention gives for a text, and for all texts one token away from it.

At position i head h gives c_i = Σ_j e_ij v_j / Σ_j e_ij with e_ij = exp(q_i·k_j/√k), and the heads
side by side are the input of the attention's output map. Whether a text is in the batch shows in
whether its c_i lie in the span of that map's gradient, so only their products with directions R of
the span's complement matter: v_j R takes the place of v_j. A token that changes at one position
takes one term out of both sums and puts another in, at all other positions, which is some thousand
times cheaper than running the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.models.anatomy import Anatomy
from keyhole.recover.gradients.inputs import FirstInputs


@dataclass(frozen=True, eq=False)
class Contexts:
    """Queries and keys (t, n, h, k) of tokens at positions, and products (t, n, h, r) of their
    values with directions; a text is the numbers (n,) of its tokens."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    def misfit(self, text: Tensor) -> Tensor:
        """The mean squared distance of a text's rows from the span."""
        places = torch.arange(len(text), device=text.device)
        scores = torch.einsum("ihk,jhk->hij", self.queries[text, places], self.keys[text, places])
        rows = torch.einsum("hij,jhr->ir", scores.softmax(-1), self.values[text, places])
        return rows.square().sum(-1).mean()

    def changed(self, text: Tensor, place: int, tokens: Tensor) -> Tensor:
        """The same (c,) of the text with each of some tokens in turn at one position."""
        places = torch.arange(len(text), device=text.device)
        queries, keys = self.queries[text, places], self.keys[text, places]
        values = self.values[text, places]
        others = places != place
        scores = torch.einsum("ihk,jhk->hij", queries, keys)
        highest = scores.amax(-1, keepdim=True)
        weights = (scores - highest).exp() * others
        total = weights.sum(-1, keepdim=True)  # (h, i, 1), without the position that changes
        rows = torch.einsum("hij,jhr->hir", weights, values)
        own = torch.einsum("ihk,thk->hit", queries, self.keys[tokens, place])
        new_values = self.values[tokens, place]
        own = (own - highest).exp()
        # rows: (h, i, t, r) summed over heads, without ever holding all heads at once.
        given = torch.zeros(len(text), len(tokens), values.shape[-1]).to(values)
        for head in range(values.shape[1]):
            new = rows[head][:, None] + own[head][..., None] * new_values[:, head]
            given += new / (total[head] + own[head])[..., None]
        far = (given.square().sum(-1) * others[:, None]).sum(0)
        return (far + self._own_rows(tokens, place, keys, values, others)) / len(text)

    def _own_rows(
        self, tokens: Tensor, place: int, keys: Tensor, values: Tensor, others: Tensor
    ) -> Tensor:
        """Squared distances (c,) of the row at the position that changes itself."""
        queries = self.queries[tokens, place]
        scores = torch.einsum("thk,jhk->htj", queries, keys)
        own = torch.einsum("thk,thk->ht", queries, self.keys[tokens, place])
        scores = scores.masked_fill(~others, -torch.inf)
        weights = torch.cat([scores, own[..., None]], -1).softmax(-1)
        rows = torch.einsum("htj,jhr->tr", weights[..., :-1], values)
        rows = rows + torch.einsum("ht,thr->tr", weights[..., -1], self.values[tokens, place])
        return rows.square().sum(-1)


def contexts_of(
    parts: Anatomy, inputs: FirstInputs, tokens: Tensor, count: int, directions: Tensor
) -> Contexts:
    """The tables of tokens (t,) at the first `count` positions, along directions (d, r)."""
    attention = parts.attentions[0]
    rows = torch.stack([inputs.at(tokens, place) for place in range(count)], 1)

    def mapped(module: Any) -> Tensor:
        weight = module.weight.detach().double()
        given = rows @ weight.mT + module.bias.detach().double()
        return given.unflatten(-1, (parts.heads, parts.head_dim))

    values = mapped(cast("Any", attention.value))
    along = directions.double().unflatten(0, (parts.heads, parts.head_dim))
    scale = values.square().sum((-1, -2)).mean().sqrt()  # so that distances are relative ones
    values = torch.einsum("tnhk,hkr->tnhr", values, along) / scale
    queries = mapped(cast("Any", attention.query)) / parts.head_dim**0.5
    return Contexts(queries.float(), mapped(cast("Any", attention.key)).float(), values.float())
