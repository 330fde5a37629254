"""Stacks of layers, causal layers and leaked maps: what is found, how exactly, and what it costs.

W has entries of variance 0.09/d, not symmetric; X is Gaussian. Stacks have V of variance 1/(dL),
as residual streams are initialised: the stream keeps its size. The full run takes an hour on one
core, most of it for the failures: bare attention, and the general solver on causal layers;
`--parts small` is stacks of 6 tokens of 4 numbers alone, in minutes.

A residual stream of 4,096 unknowns is solved without ever holding a matrix of 4,096 × 4,096; its
peak memory is that of a process of its own. V there has entries of 0.5/√d, so that attention adds
about a quarter of the stream's norm; other strengths are printed next to it.
"""

from __future__ import annotations

import math
import subprocess
import sys
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


def run(
    quick: bool,
    parts: list[str] = ["small", "large"],  # noqa: B006 - read, never changed
) -> Iterator[Row]:
    torch.set_num_threads(1)  # small matrices: a second thread only waits
    seeds = range(1 if quick else 10)
    small = ((2, True), (3, True), (2, False)) if "small" in parts and not quick else ()
    for depth, residual in small:
        yield from stack_rows(6, 4, depth, residual, seeds, 5.0)
    if "large" not in parts:
        return
    yield from closed_form(seeds, 4 if quick else 16)
    yield from rounded_maps(seeds, 4 if quick else 8)
    sizes = [(3, 3, 1)] if quick else [(8, 8, 40), (16, 8, 40), (16, 16, 40), (32, 16, 10)]
    for n, d, problems in sizes:
        yield from causal(n, d, range(problems))
    for residual in (True, False):
        for n, d in [(3, 3)] if quick else [(8, 8), (16, 8)]:
            for depth in (1, 2) if quick else range(1, 7):
                yield from stack_rows(n, d, depth, residual, seeds, 0.1 if quick else 5.0)
    for strength in (0.5,) if quick else (0.5, 0.25, 1.0):
        yield residual_streams(strength, quick)


def closed_form(seeds: range, d: int) -> Iterator[Row]:
    everything = {"heads": 4, "causal": True, "residual": True}
    kinds = {
        f"n < d: {d // 2}x{d}": (d // 2, {}),
        f"n = d: {d}x{d}": (d, {}),
        f"n > d: {2 * d}x{d}": (2 * d, {}),
        f"4 heads, {d}x{d}": (d, {"heads": 4}),
        f"4 heads, causal, residual, {d}x{d}": (d, everything),
    }
    for name, (n, options) in kinds.items():
        errors, times = [], []
        for seed in seeds:
            problem, X = planted.problem(n, d, seed, **options)
            result = invert.ClosedForm(problem.maps_of(X))(problem)
            errors.append(relative(result.X, X) if result.solved else torch.inf)
            times.append(result.seconds)
        measured = f"{max(errors):.1e}, {1e3 * median(times):.0f} ms"
        yield Row(f"leaked maps, {name}", measured, "<= 1e-9", max(errors) <= 1e-9)


def rounded_maps(seeds: range, d: int) -> Iterator[Row]:
    rounded = {
        "fp16": lambda A: A.half(),
        "3 decimals": lambda A: (1000 * A).round() / 1000,
    }
    for n in (d, 2 * d):
        for name, change in rounded.items():
            exact = 0
            for seed in seeds:
                problem, X = planted.problem(n, d, seed)
                result = invert.ClosedForm(change(problem.maps_of(X)))(problem)
                exact += result.solved and relative(result.X, X) <= SAME
            yield Row(f"leaked maps, {name}, {n}x{d}", f"{exact} of {len(seeds)} exact")


def causal(n: int, d: int, seeds: range) -> Iterator[Row]:
    """Token by token, and the solver for all tokens at once in as many seconds."""
    tallies = {"token by token": Tally(), "all at once, as long": Tally()}
    for seed in seeds:
        problem, X = planted.problem(n, d, seed, causal=True)
        by_token = invert.TokenByToken()(problem)
        tallies["token by token"].add(by_token, X)
        general = invert.LevenbergMarquardt(starts=10_000, solutions=4, seconds=by_token.seconds)
        tallies["all at once, as long"].add(general(problem), X)
    for name, tally in tallies.items():
        yield Row(f"causal {n}x{d}, {name}", str(tally))


def planted_stack(n: int, d: int, depth: int, residual: bool, seed: int):
    draw = planted.normals(seed)
    X = draw(n, d)
    layers = []
    for _ in range(depth):
        W = 0.3 * draw(d, d) / d**0.5
        layers.append(stacks.Layer(W, draw(d, d) / (d * depth) ** 0.5, residual=residual))
    stack = stacks.Stack(tuple(layers), torch.zeros(n, d))
    return replace(stack, B=stack.output(X)), X


def stack_rows(
    n: int, d: int, depth: int, residual: bool, seeds: range, seconds: float
) -> Iterator[Row]:
    # Failures dominate: without a residual connection they are ended by the clock.
    limit = None if residual else seconds
    starts = 16 if residual else 128
    layer = invert.LevenbergMarquardt(starts=starts, steps=200, solutions=4, seconds=limit)
    methods = {
        "peel": stacks.Peel(layer, branches=4),
        "end to end": stacks.EndToEnd(replace(layer, seconds=limit and depth * limit)),
    }
    kind = "residual" if residual else "bare"
    for name, method in methods.items():
        tally = Tally()
        for seed in seeds:
            stack, X = planted_stack(n, d, depth, residual, seed)
            tally.add(method(stack), X)
        what = f"{depth} {kind} layer{'s' * (depth > 1)} {n}x{d}, {name}"
        yield show.itemised(Row(what, str(tally), details=tally.growth()), tally.items)


def stream(n: int, strength: float, problems: int) -> tuple[int, int, float, float]:
    """Solved, of which the planted input, seconds a problem, and GiB at the peak."""
    solved = same = 0
    seconds = 0.0
    for seed in range(problems):
        problem, X = invert.plant(
            n, n, residual=True, value_scale=strength / math.sqrt(n), seed=seed
        )
        result = invert.ResidualStream(steps=20)(problem)
        solved += result.solved
        same += result.solved and float((result.X - X).abs().max()) < 1e-6
        seconds += result.seconds
    return solved, same, seconds / problems, show.peak_memory()


def residual_streams(strength: float, quick: bool) -> Row:
    n, problems = (12, 2) if quick else (64, 20)
    count = problems if strength < 1 else problems // 4
    call = f"import inversion_layers as s; print(*s.stream({n}, {strength}, {count}))"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    solved, same, seconds, gibibytes = map(float, done.stdout.split())
    required = strength == 0.5
    return Row(
        f"residual connection, n = d = {n}, V of {strength:g}/√d",
        f"{solved:.0f} of {count} solved exactly, {gibibytes:.2f} GiB",
        "≥ 95%, < 4 GiB" if required else "printed",
        solved >= 0.95 * count and gibibytes < 4 if required else None,
        f"the planted input in {same:.0f}; {seconds:.1f} s a problem",
    )


class Tally:
    """How often something was found, and how often that was what had been planted."""

    def __init__(self) -> None:
        self.results: list[invert.Inversion | stacks.StackInversion] = []
        self.errors: list[float] = []  # of the nearest solution
        self.first = 0

    def add(self, result: invert.Inversion | stacks.StackInversion, X: Tensor) -> None:
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
        """Medians over what was found: condition and measured growth a layer, and through all."""
        solved = [r for r in self.results if isinstance(r, stacks.StackInversion) and r.layers]
        figures = (
            ("a layer: condition {:.0e}", [a.condition for r in solved for a in r.layers]),
            ("measured {:.1f}", [a.measured for r in solved for a in r.layers]),
            ("all: measured {:.0f}", [r.amplification for r in solved]),
            ("bound {:.0e}", [r.bound for r in solved]),
        )
        known = ((text, [value for value in values if value]) for text, values in figures)
        return ", ".join(text.format(median(values)) for text, values in known if values)


if __name__ == "__main__":
    show.main(run)
