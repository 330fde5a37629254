"""The inversion loss in naive NumPy loops, and its numeric derivatives, without keyhole."""

from __future__ import annotations

import numpy as np


def attention(X, W, V, key_bias=None, causal=False):
    """Compute one head, row by row, also for complex X."""
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
    """Return Im L(X + ih)/h, which is exact to rounding; entries that are not free have 0."""
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
    """Return central differences of the gradient, with an error of about step²."""
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
