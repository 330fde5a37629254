"""Stacks of layers, causal layers and leaked maps: what is found, how exactly, and what it costs.

W has entries of variance 0.09/d, not symmetric; X is Gaussian. Stacks have V of variance 1/(dL),
as residual streams are initialised: the stream keeps its size. The full run takes an hour on one
core, most of it for the failures: bare attention, and the general solver on causal layers.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from torch import Tensor

import show
from keyhole import invert
from keyhole.lab import stacks
from show import Row, relative

SAME = 1e-2  # an input this close (relative) is the planted one, others are 0.1 away and more
SPREAD = 0.3


def run(quick: bool) -> list[Row]:
    torch.set_num_threads(1)  # small matrices: a second thread only waits
    seeds = range(1 if quick else 10)
    rows = closed_form(seeds, 4 if quick else 16) + rounded_maps(seeds, 4 if quick else 8)
    sizes = [(3, 3, 1)] if quick else [(8, 8, 40), (16, 8, 40), (16, 16, 40), (32, 16, 10)]
    for n, d, problems in sizes:
        rows += causal(n, d, range(problems))
    for residual in (True, False):
        for n, d in [(3, 3)] if quick else [(8, 8), (16, 8)]:
            for depth in (1, 2) if quick else range(1, 7):
                rows += stack_rows(n, d, depth, residual, seeds, 0.1 if quick else 5.0)
    return rows


def gaussians(seed: int):
    stream = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=stream, dtype=torch.float64)


def planted(n: int, d: int, seed: int, heads: int = 1, **options) -> tuple[invert.Problem, Tensor]:
    draw = gaussians(seed)
    X = draw(n, d)
    shape = (d, d) if heads == 1 else (heads, d, d)
    W, V = SPREAD * draw(*shape) / d**0.5, draw(*shape)
    B = invert.Problem(W, V, torch.zeros(n, d), **options).output(X)
    return invert.Problem(W, V, B, **options), X


def planted_stack(n: int, d: int, depth: int, residual: bool, seed: int):
    draw = gaussians(seed)
    X = draw(n, d)
    layers = []
    for _ in range(depth):
        W = SPREAD * draw(d, d) / d**0.5
        layers.append(stacks.Layer(W, draw(d, d) / (d * depth) ** 0.5, residual=residual))
    B = stacks.Stack(tuple(layers), torch.zeros(n, d)).output(X)
    return stacks.Stack(tuple(layers), B), X


def closed_form(seeds: range, d: int) -> list[Row]:
    everything = {"heads": 4, "causal": True, "residual": True}
    kinds = {
        f"n < d: {d // 2}x{d}": (d // 2, {}),
        f"n = d: {d}x{d}": (d, {}),
        f"n > d: {2 * d}x{d}": (2 * d, {}),
        f"4 heads, {d}x{d}": (d, {"heads": 4}),
        f"4 heads, causal, residual, {d}x{d}": (d, everything),
    }
    rows = []
    for name, (n, options) in kinds.items():
        errors, times = [], []
        for seed in seeds:
            problem, X = planted(n, d, seed, **options)
            result = invert.ClosedForm(problem.maps_of(X))(problem)
            errors.append(relative(result.X, X) if result.solved else torch.inf)
            times.append(result.seconds)
        measured = f"{max(errors):.1e}, {1e3 * statistics.median(times):.0f} ms"
        rows.append(Row(f"leaked maps, {name}", measured, "<= 1e-9", max(errors) <= 1e-9))
    return rows


def rounded_maps(seeds: range, d: int) -> list[Row]:
    rounded = {
        "fp16": lambda A: A.half(),
        "3 decimals": lambda A: (1000 * A).round() / 1000,
    }
    rows = []
    for n in (d, 2 * d):
        for name, change in rounded.items():
            exact = 0
            for seed in seeds:
                problem, X = planted(n, d, seed)
                result = invert.ClosedForm(change(problem.maps_of(X)))(problem)
                exact += result.solved and relative(result.X, X) <= SAME
            rows.append(Row(f"leaked maps, {name}, {n}x{d}", f"{exact} of {len(seeds)} exact"))
    return rows


def causal(n: int, d: int, seeds: range) -> list[Row]:
    """Token by token, and the solver for all tokens at once in as many seconds."""
    tallies = {"token by token": Tally(), "all at once, as long": Tally()}
    for seed in seeds:
        problem, X = planted(n, d, seed, causal=True)
        sweep = invert.TokenByToken()(problem)
        tallies["token by token"].add(sweep, X)
        general = invert.LevenbergMarquardt(starts=10_000, solutions=4, seconds=sweep.seconds)
        tallies["all at once, as long"].add(general(problem), X)
    return [Row(f"causal {n}x{d}, {name}", str(tally)) for name, tally in tallies.items()]


def stack_rows(
    n: int, d: int, depth: int, residual: bool, seeds: range, seconds: float
) -> list[Row]:
    # Failures dominate: without a residual connection they are ended by the clock.
    limit = None if residual else seconds
    starts = 16 if residual else 128
    layer = invert.LevenbergMarquardt(starts=starts, steps=200, solutions=4, seconds=limit)
    methods = {
        "peel": stacks.Peel(layer, branches=4),
        "end to end": stacks.EndToEnd(replace(layer, seconds=limit and depth * limit)),
    }
    kind = "residual" if residual else "bare"
    rows = []
    for name, method in methods.items():
        tally = Tally()
        for seed in seeds:
            stack, X = planted_stack(n, d, depth, residual, seed)
            tally.add(method(stack), X)
        what = f"{depth} {kind} layer{'s' * (depth > 1)} {n}x{d}, {name}"
        rows.append(Row(what, str(tally), details=tally.growth()))
    return rows


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
        text = f"{solved} of {len(self.results)} solved, planted among them {len(hits)}"
        text += f", least norm {self.first}"
        text += f", error {max(hits):.0e}" if hits else ""
        seconds = statistics.mean(result.seconds for result in self.results)
        return f"{text}, {seconds:.1f} s"

    def growth(self) -> str:
        """Medians over what was found: condition and measured growth a layer, and through all."""
        solved = [r for r in self.results if isinstance(r, stacks.StackInversion) and r.layers]
        if not solved:
            return ""
        conditions = [a.condition for r in solved for a in r.layers if a.condition]
        grown = [a.measured for r in solved for a in r.layers if a.measured]
        through = [r.amplification for r in solved if r.amplification]
        parts = [f"a layer: condition {statistics.median(conditions):.0e}"] if conditions else []
        parts += [f"measured {statistics.median(grown):.1f}"] if grown else []
        parts += [f"all: measured {statistics.median(through):.0f}"] if through else []
        bounds = [r.bound for r in solved if r.bound]
        parts += [f"bound {statistics.median(bounds):.0e}"] if bounds else []
        return ", ".join(parts)


if __name__ == "__main__":
    show.main(run, __doc__)
