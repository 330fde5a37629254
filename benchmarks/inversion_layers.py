"""Stacks of layers, inverted layer by layer: what is found, how exactly, at what cost.

W has entries of variance 0.09/d, not symmetric; X is Gaussian. V has variance 1/(dL), as residual
streams are initialised: the stream keeps its size. 6 tokens of 4 numbers; minutes on one core, most
of them for the failures of bare attention, which a clock ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, median

import torch
from torch import Tensor

import planted
import show
from keyhole import invert
from keyhole.lab import stacks
from show import Row, relative

SAME = 1e-2  # an input this close (relative) is the planted one, others are 0.1 away and more


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


def stack_row(n: int, d: int, depth: int, residual: bool, seeds: range, seconds: float) -> Row:
    # Failures dominate: without a residual connection they are ended by the clock.
    limit = None if residual else seconds
    starts = 16 if residual else 128
    layer = invert.LevenbergMarquardt(starts=starts, steps=200, solutions=4, seconds=limit)
    kind, tally = "residual" if residual else "bare", Tally()
    for seed in seeds:
        stack, X = planted_stack(n, d, depth, residual, seed)
        tally.add(stacks.Peel(layer, branches=4)(stack), X)
    what = f"{depth} {kind} layer{'s' * (depth > 1)} {n}x{d}, peel"
    return show.itemised(Row(what, str(tally), details=tally.growth()), tally.items)


class Tally:
    """How often something was found, and how often that was what had been planted."""

    def __init__(self) -> None:
        self.results: list[invert.Inversion] = []
        self.errors: list[float] = []  # of the nearest solution
        self.first = 0

    def add(self, result: invert.Inversion, X: Tensor) -> None:
        self.results.append(result)
        errors = [relative(solution, X) for solution in result.solutions]
        self.errors.append(min(errors, default=torch.inf))
        self.first += bool(errors) and relative(result.X, X) <= SAME

    def __str__(self) -> str:
        solved = sum(len(result.solutions) > 0 for result in self.results)
        hits = [error for error in self.errors if error <= SAME]
        worst = f", error {max(hits):.0e}" if hits else ""
        return (
            f"{solved} of {len(self.results)} solved, planted among them {len(hits)}, "
            f"least norm {self.first}{worst}, {mean(r.seconds for r in self.results):.1f} s"
        )

    @property
    def items(self) -> list[dict[str, float]]:
        return [
            {"solutions": len(result.solutions), "nearest": error, "seconds": result.seconds}
            for result, error in zip(self.results, self.errors, strict=True)
        ]

    def growth(self) -> str:
        """The median of what was found: what errors in the output grow by, at most."""
        known = [result.condition for result in self.results if result.condition is not None]
        return f"condition {median(known):.0e}" if known else ""


if __name__ == "__main__":
    show.main(run)
