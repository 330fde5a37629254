"""Stacks of layers, inverted layer by layer: what is found, how exactly, at what cost.

Of `X_{ℓ+1} = attention_ℓ(X_ℓ)` only the last output is known. *Unmasking Transformers*
(arXiv 2310.12462) has this formula in its Section 1, and its Theorem 1.3 speaks of
several layers; but the loss that it minimises, by Newton's method with a regulariser,
is that of one layer. `peel` (ours) inverts one layer after the other, from the top: the
input of a layer is the output of the one below. A layer may have several inputs with
one output, so up to `branches` of them are kept, those of least norm first; a wrong one
shows when the layer below cannot have produced it. Errors multiply: a relative error ε
in the output may become κ_L ⋯ κ_1 ε in X, where κ_ℓ is the condition number of layer ℓ
at its input.

W is asymmetric with entries of variance 0.09/d; X is Gaussian. V has variance 1/(dL),
the usual initialisation that keeps the size of a residual stream. 6 tokens of 4
numbers. It takes minutes on one core, most of them for bare attention, which often
fails and stops at a time limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

import planted
import show
from keyhole import invert
from keyhole.invert.judge import ROUNDING, distinct, judge, residual_of
from show import Row, relative

# an input this close (relative) is the planted one, others are 0.1 away and more
SAME = 1e-2
Stack = Sequence[invert.Problem]  # the first layer first; B of the last one is known


def flow(stack: Stack, X: Tensor) -> list[Tensor]:
    """Return the input of each layer if the first receives X, and the last output."""
    return list(
        accumulate(stack, lambda inputs, layer: layer.output(inputs), initial=X)
    )


def peel(stack: Stack, method: Any, branches: int = 8) -> list[Tensor]:
    """Return inputs of the first layer that have the last output, of least norm first."""
    outputs = [stack[-1].B]
    for layer in reversed(stack):
        found = [method(replace(layer, B=B)) for B in outputs]
        inputs = [X for inversion in found for X in inversion.solutions]
        outputs = distinct(inputs)[:branches]
    exact = [X for X in (polished(stack, X) for X in outputs) if solves(stack, X)]
    return distinct(exact)


def polished(stack: Stack, X: Tensor) -> Tensor:
    """Improve the last digits of X by Newton steps through all layers."""
    for _ in range(4):
        J = jacobian(lambda X: flow(stack, X)[-1], X).reshape(-1, X.numel())
        residual = flow(stack, X)[-1] - stack[-1].B
        step = torch.linalg.pinv(J, rtol=1e-12) @ residual.flatten()
        X = X - step.reshape(X.shape)
    return X


def solves(stack: Stack, X: Tensor) -> bool:
    return residual_of(stack[-1], flow(stack, X)[-2]) <= ROUNDING


def condition(stack: Stack, X: Tensor) -> float | None:
    """Return the product of the layers' condition numbers, None if X is one of a family."""
    states = flow(stack, X)
    known = [
        judge(replace(layer, B=output), inputs).condition
        for layer, inputs, output in zip(stack, states, states[1:], strict=False)
    ]
    return None if None in known else math.prod(known)


def run(quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)  # small matrices: a second thread only waits
    if quick:
        yield stack_row(3, 3, 2, True, range(1), 0.1)
        return
    for depth, residual in ((2, True), (3, True), (2, False)):
        yield stack_row(6, 4, depth, residual, range(10), 5.0)


def planted_stack(n: int, d: int, depth: int, residual: bool, seed: int):
    draw = planted.normals(seed)
    X = draw(n, d)
    layers = []
    for _ in range(depth):
        W = 0.3 * draw(d, d) / d**0.5
        V = draw(d, d) / (d * depth) ** 0.5
        layers.append(invert.Problem(W, V, torch.zeros(n, d), residual=residual))
    return [*layers[:-1], replace(layers[-1], B=flow(layers, X)[-1])], X


def stack_row(
    n: int, d: int, depth: int, residual: bool, seeds: range, seconds: float
) -> Row:
    # Without a residual connection most runs fail, and end at the time limit.
    limit = None if residual else seconds
    starts = 16 if residual else 128
    layer = invert.LevenbergMarquardt(
        starts=starts, steps=200, solutions=4, seconds=limit
    )
    items: list[dict[str, Any]] = []
    for seed in seeds:
        stack, X = planted_stack(n, d, depth, residual, seed)
        solutions, taken = show.timed(partial(peel, stack, layer, 4))
        errors = [relative(solution, X) for solution in solutions]
        items.append(
            {
                "solutions": len(errors),
                "nearest": min(errors, default=torch.inf),
                "least norm": errors != [] and errors[0] <= SAME,
                "condition": condition(stack, solutions[0]) if solutions else None,
                "seconds": taken,
            }
        )
    solved, first = (
        sum(bool(item[name]) for item in items) for name in ("solutions", "least norm")
    )
    hits = [item["nearest"] for item in items if item["nearest"] <= SAME]
    known = [item["condition"] for item in items if item["condition"] is not None]
    return Row(
        f"{depth} {'residual' if residual else 'bare'} layers {n}x{d}, peel",
        f"{solved} of {len(items)} solved, planted among them {len(hits)}, least norm {first}, "
        f"error {max(hits, default=0.0):.0e}, {mean(item['seconds'] for item in items):.1f} s",
        details=f"condition {median(known or [torch.inf]):.0e}",
        items=items,
    )


if __name__ == "__main__":
    show.main(run)
