"""Softmax attention as pure functions: the only implementation of its formula.

Tokens are rows. With queries `Q` (m×d) and tokens `X` (n×d),

    S = Q W Xᵀ            S_ij = q_iᵀ W x_j: query i, key j
    A = softmax_rows(S)
    O = Σ_h A_h X V_h     summed over heads

Several heads are one more leading axis on `W` (H×d×d) and `V` (H×d×m); an output
projection is part of `V_h`. The query paper writes its scores with the key on the left,
`x_iᵀ W x_N`; that is this formula with `Wᵀ`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scores(
    queries: Tensor,
    tokens: Tensor,
    W: Tensor,
    *,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Return `S = Q W Xᵀ`: (…, m, n) for one head, (…, H, m, n) when `W` is (H, d, d).

    With `W` (…, H, d, d) every sequence has weights of its own. `key_bias` u (d, or …,
    H, d) adds `uᵀx_j` to the score of key j.
    """
    if key_bias is not None:
        keys = tokens if W.ndim == 2 else tokens.unsqueeze(-3)
        biased = (keys @ key_bias.unsqueeze(-1)).mT
        return scores(queries, tokens, W) + biased
    if W.ndim > 3:
        return queries.unsqueeze(-3) @ W @ tokens.unsqueeze(-3).mT
    if W.ndim == 2:
        # One query per sequence is the hot path of every extraction. A product and a
        # sum read each token once, which is faster than a batched matrix product of 1×d
        # by d×n.
        projected = queries @ W
        if projected.shape[-2] == 1:
            return (tokens * projected).sum(-1).unsqueeze(-2)
        return projected @ tokens.mT
    heads, d, e = W.shape
    stacked = W.transpose(0, 1).reshape(d, heads * e)
    if queries.shape[-2] == 1:
        # The hot path for several heads: a batch of 1×d matrices would take three times
        # as long.
        projected = (queries.squeeze(-2) @ stacked).unflatten(-1, (heads, e))
        return (projected @ tokens.mT).unsqueeze(-2)
    projected = (queries @ stacked).unflatten(-1, (heads, e))
    return torch.einsum("...mhe,...ne->...hmn", projected, tokens)


def probabilities(scores: Tensor, *, causal: bool = False) -> Tensor:
    """Return the row-wise softmax; with `causal`, query i attends to keys j ≤ i.

    Queries and keys are aligned at the last token.
    """
    if causal:
        m, n = scores.shape[-2:]
        hidden = torch.ones(m, n, dtype=torch.bool, device=scores.device).triu(
            n - m + 1
        )
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1)


def normed(
    tokens: Tensor,
    epsilon: float | Tensor,
    *,
    centred: bool,
) -> Tensor:
    """Apply a LayerNorm (`centred`) or an RMSNorm without weights."""
    if centred:
        tokens = tokens - tokens.mean(-1, keepdim=True)
    return tokens / (tokens.square().mean(-1, keepdim=True) + epsilon).sqrt()


def output(
    tokens: Tensor,
    W: Tensor,
    V: Tensor,
    *,
    causal: bool = False,
    last: bool = False,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Return `Σ_h A_h X V_h`: (…, n, m) for every token, (…, m) for the `last` one alone."""
    queries = tokens[..., -1:, :] if last else tokens
    # The last token attends to every key, causal or not.
    S = scores(queries, tokens, W, key_bias=key_bias)
    A = probabilities(S, causal=causal and not last)
    result = A @ (tokens @ V) if W.ndim == 2 else (A @ _values(tokens, V)).sum(-3)
    return result.squeeze(-2) if last else result


def _values(tokens: Tensor, V: Tensor) -> Tensor:
    """Return `X V_h` (…, H, n, m) for all heads, by one matrix product."""
    heads, d, m = V.shape
    stacked = V.transpose(0, 1).reshape(d, heads * m)
    return (tokens @ stacked).unflatten(-1, (heads, m)).transpose(-3, -2)
