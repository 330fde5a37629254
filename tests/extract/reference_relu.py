"""ReLU networks and one-layer Transformers as naive NumPy loops; never imports keyhole."""

from __future__ import annotations

import math

import numpy as np


def relu_network(A: np.ndarray, w: np.ndarray, x: np.ndarray) -> float:
    """`wᵀ ReLU(A x)`, one neuron at a time."""
    total = 0.0
    for k in range(len(w)):
        height = 0.0
        for j in range(len(x)):
            height += float(A[k, j]) * float(x[j])
        if height > 0:
            total += float(w[k]) * height
    return total


def one_layer(W: np.ndarray, A: np.ndarray, w: np.ndarray, X: np.ndarray) -> float:
    """`wᵀ ReLU(A · Σ_i softmax_i(x_iᵀ W x_N) x_i)`."""
    scores = [float(x @ W @ X[-1]) for x in X]
    weights = [math.exp(score - max(scores)) for score in scores]
    mixed = np.zeros(X.shape[1])
    for weight, x in zip(weights, X, strict=True):
        mixed += weight / sum(weights) * x
    return relu_network(A, w, mixed)


def kinks(A: np.ndarray, w: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[float]:
    """Angles in [0, π) where `a cos θ + b sin θ` crosses a visible neuron's hyperplane."""
    angles: set[float] = set()
    for k in range(len(w)):
        if w[k] != 0 and np.any(A[k] != 0):
            angles.add(math.atan2(-float(A[k] @ a), float(A[k] @ b)) % math.pi)
    return sorted(angles)
