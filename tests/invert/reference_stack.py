"""Attention in naive NumPy loops, the reference for leaks, causal layers and stacks."""

from __future__ import annotations

import numpy as np


def maps(X, W, causal=False, key_bias=None):
    """Return maps (H,n,n) for W (H,d,d)."""
    n = len(X)
    A = np.zeros((len(W), n, n))
    for h, weights in enumerate(W):
        for i in range(n):
            seen = range(i + 1 if causal else n)
            scores = [X[i] @ weights @ X[j] for j in seen]
            if key_bias is not None:
                scores = [
                    s + key_bias[h] @ X[j] for s, j in zip(scores, seen, strict=True)
                ]
            powers = np.exp(np.array(scores) - max(scores))
            A[h, i, : len(powers)] = powers / powers.sum()
    return A


def output(X, W, V, causal=False, residual=False, key_bias=None, output_bias=None):
    A = maps(X, W, causal, key_bias)
    n = len(X)
    m = V.shape[-1]
    out = np.zeros((n, m))
    for h in range(len(W)):
        for i in range(n):
            for j in range(n):
                out[i] += A[h, i, j] * (X[j] @ V[h])
    if output_bias is not None:
        out = out + output_bias
    return out + X if residual else out
