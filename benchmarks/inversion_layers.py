"""Stacks of layers, inverted layer by layer: what is found, how exactly, at what cost.

W is asymmetric with entries of variance 0.09/d; X is Gaussian. V has variance 1/(dL),
the usual initialisation that keeps the size of a residual stream. 6 tokens of 4
numbers. It takes minutes on one core, most of them for bare attention, which often
fails and stops at a time limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch

import planted
import show
from keyhole import invert
from keyhole.lab import stacks
from show import Row, relative

# an input this close (relative) is the planted one, others are 0.1 away and more
SAME = 1e-2


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
    return [*layers[:-1], replace(layers[-1], B=stacks.inputs_of(layers, X)[-1])], X


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
        result = stacks.Peel(layer, branches=4)(stack)
        errors = [relative(solution, X) for solution in result.solutions]
        items.append(
            {
                "solutions": len(errors),
                "nearest": min(errors, default=torch.inf),
                "least norm": errors != [] and relative(result.X, X) <= SAME,
                "condition": result.condition,
                "seconds": result.seconds,
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
