"""Naive witnesses for layers that answer with vectors and for heads in subspaces; NumPy only."""

import math

import numpy as np


def attention(X, W, V, causal):
    """Every token's output of several heads, by loops: W (H,d,d), V (H,d,m), query on the left."""
    n = len(X)
    out = np.zeros((n, V.shape[2]))
    for W_h, V_h in zip(W, V, strict=True):
        for i in range(n):
            seen = range(i + 1) if causal else range(n)
            scores = [float(X[i] @ W_h @ X[j]) for j in seen]
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            for j, weight in zip(seen, weights, strict=True):
                out[i] += weight / sum(weights) * (X[j] @ V_h)
    return out


def weights_of_keys(x, keys, W, references):
    """`a_j = e^{z_j} / (c + Σ e^{z_j})` with `z_j = xᵀWδ_j`."""
    z = [float(x @ W @ key) for key in keys]
    total = references + sum(math.exp(s) for s in z)
    return [math.exp(s) / total for s in z]


def response(delta, x, Ws, vs):
    """`φ_x(δ) = Σ_h σ(δᵀW_hx)·v_hᵀδ`: the answer to [x+δ ; x] less vᵀx, key on the left."""
    total = 0.0
    for W, v in zip(Ws, vs, strict=True):
        total += float(v @ delta) / (1 + math.exp(-float(delta @ W @ x)))
    return total


def hessian(x, Ws, vs):
    """`¼ Σ_h (g_h v_hᵀ + v_h g_hᵀ)`, entry by entry."""
    d = len(x)
    H = np.zeros((d, d))
    for W, v in zip(Ws, vs, strict=True):
        g = W @ x
        for i in range(d):
            for j in range(d):
                H[i, j] += (g[i] * v[j] + v[i] * g[j]) / 4
    return H


def numerical_hessian(f, d, step):
    """Central differences of f at zero."""
    H = np.zeros((d, d))
    eye = step * np.eye(d)
    for i in range(d):
        for j in range(d):
            H[i, j] = (
                f(eye[i] + eye[j])
                - f(eye[i] - eye[j])
                - f(eye[j] - eye[i])
                + f(-eye[i] - eye[j])
            ) / (4 * step * step)
    return H
