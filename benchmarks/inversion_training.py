"""What inversion has to do with training: the loss in X against the loss in the weights.

Training moves W and V to make `‖attention(X) − Y‖²` small for its own X and label Y; inversion
moves X with the weights held. If what is given is the layer's output, the training input is an
exact minimum however well the layer was trained. If it is the label (Section 3.2 of *Unmasking
Transformers* takes B = Y), the residual r at the training input is the training error, and the
minimum nearby is off by `−J⁺r`: its distance goes with the square root of the training loss.

One layer is trained on one sequence until the loss is at each level; then Levenberg–Marquardt
starts from the training input, so that the distance is that of the nearest minimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

import show
from keyhole import attention, invert
from planted import normals
from show import Row

LEVELS = (1e-4, 1e-6, 1e-8, 1e-10)


class Trained(NamedTuple):
    """A layer as it stood when its training loss came down to a level."""

    W: Tensor
    V: Tensor
    loss: float


def run(quick: bool) -> Iterator[Row]:
    size, seeds, levels = (3, range(1), LEVELS[:2]) if quick else (4, range(10), LEVELS)
    distances: dict[float, list[float]] = {level: [] for level in levels}
    outputs: list[float] = []
    predicted: list[float] = []
    for seed in seeds:
        X, Y, layers = trained(size, seed, levels)
        for level, layer in zip(levels, layers, strict=True):
            problem = invert.Problem(W=layer.W, V=layer.V, B=Y)
            away = nearest(problem, X) - X
            shift = first_order(problem, X)
            distances[level].append(float(away.norm()) / math.sqrt(layer.loss))
            predicted.append(float((away - shift).norm() / shift.norm()))
            own = invert.Problem(W=layer.W, V=layer.V, B=attention.output(X, layer.W, layer.V))
            outputs.append(float((nearest(own, X) - X).norm()))
    medians = {level: median(values) for level, values in distances.items()}
    spread = max(medians.values()) / min(medians.values())
    what = f"n = d = {size}, {len(seeds)} trained layers"
    yield Row(
        f"B the label, {what}: distance to the training input / sqrt(training loss)",
        ", ".join(f"{value:.1f} at {level:.0e}" for level, value in medians.items()),
        "the same at every loss, within a factor of 2",
        spread <= 2 if not quick else None,
        "medians",
    )
    off = max(predicted[len(levels) - 1 :: len(levels)])
    yield Row(
        f"  off from -J⁺r, relatively, at a training loss of {levels[-1]:.0e}",
        f"{off:.1e} at most",
        "<= 0.1" if not quick else "",
        off <= 0.1 if not quick else None,
    )
    yield Row(
        f"B the output, {what}: distance to the training input",
        f"{max(outputs):.1e} at most",
        "<= 1e-10",
        max(outputs) <= 1e-10,
    )


def trained(
    size: int, seed: int, levels: tuple[float, ...]
) -> tuple[Tensor, Tensor, list[Trained]]:
    """A sequence, its labels, and the layer at each level of the training loss, by Adam."""
    X, V, W_noise, V_noise = normals(seed)(4, size, size)
    # Symmetric and positive: tokens attend to themselves, and the layer is well conditioned.
    W = torch.eye(size, dtype=torch.float64)
    Y = attention.output(X, W, V)
    weights = [(W + 0.1 * W_noise).requires_grad_(), (V + 0.1 * V_noise).requires_grad_()]
    optimizer = torch.optim.Adam(weights, lr=1e-3)
    layers: list[Trained] = []
    for level in levels:
        loss = math.inf
        while loss > level:
            optimizer.zero_grad()
            error = (attention.output(X, *weights) - Y).square().sum()
            loss = float(error.detach())
            if loss > level:
                error.backward()
                optimizer.step()
        layers.append(Trained(*(matrix.detach().clone() for matrix in weights), loss))
    return X, Y, layers


def nearest(problem: invert.Problem, X: Tensor) -> Tensor:
    result = invert.LevenbergMarquardt(steps=200)(problem, start=X)
    if result.X is None:
        raise AssertionError(result.reason)
    return result.X


def first_order(problem: invert.Problem, X: Tensor) -> Tensor:
    """`−J⁺r`, where the minimum would be if attention were linear."""
    r = (problem.output(X) - problem.B).flatten()
    J = invert.jacobian(problem, X)
    return -torch.linalg.lstsq(J, r.unsqueeze(-1)).solution.reshape(X.shape)


if __name__ == "__main__":
    show.main(run)
