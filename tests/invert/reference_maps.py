"""Attention maps in naive NumPy loops, the reference for the scores of candidates."""

from __future__ import annotations

import numpy as np


def scores(states, query, query_bias, key, key_bias, heads):
    """q_h(x_i)·k_h(x_j) / √k for every head and pair, entry by entry."""
    n, width = states.shape
    size = width // heads
    out = np.zeros((heads, n, n))
    for h in range(heads):
        rows = slice(h * size, (h + 1) * size)
        for i in range(n):
            q = query[rows] @ states[i] + query_bias[rows]
            for j in range(n):
                k = key[rows] @ states[j] + key_bias[rows]
                out[h, i, j] = float(q @ k) / np.sqrt(size)
    return out


def softmax_rows(scores):
    out = np.empty_like(scores)
    for h, i in np.ndindex(scores.shape[:2]):
        row = np.exp(scores[h, i] - scores[h, i].max())
        out[h, i] = row / row.sum()
    return out


def centred_difference(given, leaked):
    """The mean square difference of log-probabilities, where each row is centred."""
    total = 0.0
    for h, i in np.ndindex(given.shape[:2]):
        a = np.log(given[h, i])
        b = np.log(leaked[h, i])
        total += float((((a - a.mean()) - (b - b.mean())) ** 2).sum())
    return total / given.size
