"""The inversion loss in naive NumPy loops, and its derivatives by small steps. No keyhole here."""

from __future__ import annotations

import numpy as np


def attention(X, W, V, key_bias=None, causal=False):
    """One head, row by row; takes complex X as well, for derivatives."""
    n = len(X)
    out = np.zeros((n, V.shape[1]), dtype=X.dtype)
    for i in range(n):
        seen = i + 1 if causal else n
        scores = np.array([X[i] @ W @ X[j] for j in range(seen)])
        if key_bias is not None:
            scores = scores + np.array([key_bias @ X[j] for j in range(seen)])
        weights = np.exp(scores - scores.real.max())
        weights = weights / weights.sum()
        for j in range(seen):
            out[i] += weights[j] * (X[j] @ V)
    return out


def residual(X, Ws, Vs, B, biases=None, output_bias=None, causal=False, residual=False):
    out = -B.astype(X.dtype)
    for h, (W, V) in enumerate(zip(Ws, Vs, strict=True)):
        out = out + attention(X, W, V, None if biases is None else biases[h], causal)
    if output_bias is not None:
        out = out + output_bias
    return out + X if residual else out


def loss(X, *layer, gamma=0.0, **more):
    return (residual(X, *layer, **more) ** 2).sum() + gamma * (X**2).sum()


def gradient(X, free, *layer, step=1e-30, **more):
    """By complex steps, exact to rounding: Im L(X + ih)/h. Entries that are not free stay."""
    out = np.zeros_like(X)
    for place in zip(*np.nonzero(free), strict=True):
        moved = X.astype(complex)
        moved[place] += 1j * step
        out[place] = loss(moved, *layer, **more).imag / step
    return out


def jacobian(X, free, *layer, step=1e-30, **more):
    n, d = X.shape
    columns = []
    for place in np.ndindex(n, d):
        moved = X.astype(complex)
        moved[place] += 1j * step * free[place]
        columns.append(residual(moved, *layer, **more).imag.ravel() / step)
    return np.stack(columns, axis=1)


def hessian(X, free, *layer, step=1e-4, **more):
    """By central differences of the gradient, to about step²."""
    n, d = X.shape
    columns = np.zeros((n * d, n * d))
    for number, place in enumerate(np.ndindex(n, d)):
        if not free[place]:
            continue
        moved = np.zeros_like(X)
        moved[place] = step
        ahead = gradient(X + moved, free, *layer, **more)
        behind = gradient(X - moved, free, *layer, **more)
        columns[:, number] = ((ahead - behind) / (2 * step)).ravel()
    return columns
