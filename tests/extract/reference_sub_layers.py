"""A naive witness for attention sub-layers: one token, head and plane at a time; NumPy only."""

import math

import numpy as np


def sub_layer(X, Q, q, K, V, O, b, frequencies, epsilon, residual, causal):  # noqa: E741
    """Every token's output; heads share K and V in order, k/2 planes of coordinates f, f + k/2."""
    n = len(X)
    heads = len(Q)
    k = Q.shape[2]
    each = heads // len(K)
    tokens = [
        x if epsilon is None else x / math.sqrt(float(x @ x) / len(x) + epsilon)
        for x in X
    ]
    out = np.zeros((n, O.shape[2]))
    for i in range(n):
        out[i] += b
        if residual:
            out[i] += X[i]
        for h in range(heads):
            g = h // each
            query = tokens[i] @ Q[h] + q[h]
            seen = range(i + 1) if causal else range(n)
            scores = []
            for j in seen:
                key = tokens[j] @ K[g]
                turned = key.copy()
                for f, speed in enumerate(frequencies[g]):
                    angle = (j - i) * speed
                    x = key[f]
                    y = key[f + k // 2]
                    turned[f] = x * math.cos(angle) - y * math.sin(angle)
                    turned[f + k // 2] = x * math.sin(angle) + y * math.cos(angle)
                scores.append(float(query @ turned))
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            for j, weight in zip(seen, weights, strict=True):
                out[i] += weight / sum(weights) * (tokens[j] @ V[g] @ O[h])
    return out
