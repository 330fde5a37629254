"""Naive NumPy witnesses for answers that are blurred or thresholded. Never imports keyhole."""

from __future__ import annotations

import math

import numpy as np


def score(X, W, v):
    """One head by loops: Σ_i softmax_i(x_iᵀ W x_N) · vᵀx_i."""
    last = X[-1]
    s = [float(x @ W @ last) for x in X]
    top = max(s)
    weights = [math.exp(each - top) for each in s]
    return sum(w * float(v @ x) for w, x in zip(weights, X, strict=True)) / sum(weights)


def corner_forms(answer, tau, v_x, signal, signal_error, g, xi):
    """Extremes of logit((a ± τ − ξ·vᵀx) / (g·(D ± e))) / (gξ) over the four corners."""
    found = []
    for a in (answer - tau, answer + tau):
        for d in (signal - signal_error, signal + signal_error):
            alpha = min(max((a - xi * v_x) / (g * d), 0.0), 1.0)
            if alpha in (0.0, 1.0):
                found.append(math.inf if alpha else -math.inf)
            else:
                found.append(math.log(alpha / (1 - alpha)) / (g * xi))
    return min(found), max(found)


def dense_gauss_newton(v, W, sequences, answers, steps=10):
    """Least squares on all answers with a dense Jacobian by central differences."""
    d = len(v)
    theta = np.concatenate([v, W.ravel()])

    def model(theta):
        return np.array(
            [score(X, theta[d:].reshape(d, d), theta[:d]) for X in sequences]
        )

    for _ in range(steps):
        J = np.empty((len(answers), len(theta)))
        for k in range(len(theta)):
            h = np.zeros_like(theta)
            h[k] = 1e-6
            J[:, k] = (model(theta + h) - model(theta - h)) / 2e-6
        theta = theta - np.linalg.lstsq(J, model(theta) - answers, rcond=None)[0]
    return theta[:d], theta[d:].reshape(d, d)
