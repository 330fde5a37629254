"""A block of a real model in naive loops, with heads, biases, mask, residual; no keyhole."""

from __future__ import annotations

import numpy as np

import reference


def block(X, W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O, causal, residual):
    """Multi-head attention with separate projections: (n,d) to (n,d)."""
    n = len(X)
    out = np.zeros((n, W_O.shape[-1]))
    for h in range(len(W_Q)):
        queries = X @ W_Q[h] + b_Q[h]
        keys = X @ W_K[h] + b_K[h]
        values = X @ W_V[h] + b_V[h]
        for i in range(n):
            seen = i + 1 if causal else n
            weights = reference.softmax(
                np.array([queries[i] @ keys[j] for j in range(seen)])
            )
            for j in range(seen):
                out[i] += weights[j] * (values[j] @ W_O[h])
    return out + b_O + (X if residual else 0)
