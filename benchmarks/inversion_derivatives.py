"""Derivatives of the inversion loss: the Hessian against autodiff, and the paper's theorem.

`torch.func.hessian` is given the loss as a person would write it for one head. Both sides of a
ratio are timed in turn, the least of several runs each.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import show
from keyhole import attention, invert
from keyhole.invert.derivatives.bounds import radius
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.hessian import gauss_newton_of
from show import Row, relative

SLACK = 0.1


def run(quick: bool) -> list[Row]:
    sizes = ((4, None), (6, None)) if quick else ((16, 4.0), (32, 5.0))
    return [
        *[row for size, target in sizes for row in against_autodiff(size, target)],
        *blocks(4 if quick else 16),
        *gauss_newton(6 if quick else 32, judged=not quick),
        *products(6 if quick else 64, judged=not quick),
        *the_theorem(4, range(1 if quick else 5)),
        *repaired(4, range(1 if quick else 5)),
        *the_bounds(4, 4),
        *([] if quick else the_bounds(8, 8)),
        *the_assumption(8 if quick else 120),
    ]


def plant(n: int, d: int, seed: int = 0) -> tuple[invert.Problem, Tensor]:
    """A problem with its input; small scores, as the paper's R asks for."""
    stream = torch.Generator().manual_seed(seed)
    W, V, X = (
        torch.randn(shape, generator=stream, dtype=torch.float64)
        for shape in ((d, d), (d, d), (n, d))
    )
    W = 0.3 * W / math.sqrt(d)
    return invert.Problem(W=W, V=V, B=attention.output(X, W, V)), X


def autodiff(problem: invert.Problem) -> Callable[[Tensor], Tensor]:
    W, V, B = problem.W, problem.V, problem.B
    differentiated = torch.func.hessian(lambda X: (attention.output(X, W, V) - B).square().sum())

    def matrix(X: Tensor) -> Tensor:
        with warnings.catch_warnings():  # its first use compiles something that is deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            return differentiated(X).reshape(X.numel(), X.numel())

    return matrix


def in_turn(*functions: Callable[[], object], runs: int = 10) -> list[float]:
    """The least seconds of each, measured alternately; the first round warms up."""
    least = [math.inf] * len(functions)
    for number in range(runs + 1):
        for place, function in enumerate(functions):
            started = time.perf_counter()
            function()
            if number:
                least[place] = min(least[place], time.perf_counter() - started)
    return least


def against_autodiff(size: int, target: float | None) -> list[Row]:
    problem, truth = plant(size, size)
    X = truth + 0.1 * plant(size, size, seed=1)[1]
    expected = autodiff(problem)
    error = relative(invert.hessian(problem, X), expected(X))
    slow, fast = in_turn(lambda: expected(X), lambda: invert.hessian(problem, X))
    what = f"hessian, n = d = {size}"
    return [
        Row(
            f"{what}: error against torch.func.hessian", f"{error:.1e}", "<= 1e-10", error <= 1e-10
        ),
        Row(
            f"{what}: torch.func.hessian / hessian",
            f"{1e3 * slow:.1f} ms / {1e3 * fast:.1f} ms = {slow / fast:.1f}",
            f">= {target:.0f}" if target else "",
            slow / fast >= target if target else None,
            promise=False,
        ),
    ]


def blocks(size: int) -> list[Row]:
    problem, truth = plant(size, size)
    X = truth + 0.1 * plant(size, size, seed=1)[1]
    blocks = invert.hessian_blocks(problem, X)
    others = (autodiff(problem)(X), invert.hessian(problem, X))
    errors = [relative(blocks, other) for other in others]
    what = f"hessian_blocks, n = d = {size}: error against both"
    return [Row(what, f"{errors[0]:.1e}, {errors[1]:.1e}", "<= 1e-10", max(errors) <= 1e-10)]


def gauss_newton(size: int, judged: bool) -> list[Row]:
    problem, X = plant(size, size)
    equations = Equations.of([problem])
    J = equations.linearised(X.unsqueeze(0)).jacobian()[0]
    error = relative(gauss_newton_of(equations, X.unsqueeze(0))[0], J.mT @ J)
    slow, fast = in_turn(lambda: J.mT @ J, lambda: gauss_newton_of(equations, X.unsqueeze(0)))
    return [
        Row(
            f"JᵀJ, n = d = {size}: product of a given J / structured",
            f"{1e3 * slow:.1f} ms / {1e3 * fast:.1f} ms = {slow / fast:.1f}, error {error:.0e}",
            "> 1" if judged else "",
            slow > fast if judged else None,
            promise=False,
        )
    ]


def products(size: int, judged: bool) -> list[Row]:
    problem, X = plant(size, size)
    P = plant(size, size, seed=2)[1]
    slope, product = in_turn(
        lambda: invert.gradient(problem, X), lambda: invert.hessian_product(problem, X, P)
    )
    step = 1e-5
    ahead, behind = (invert.gradient(problem, X + s * P) for s in (step, -step))
    error = relative(invert.hessian_product(problem, X, P), (ahead - behind) / (2 * step))
    return [
        Row(
            f"hessian_product, n = d = {size}: in gradients",
            f"{product / slope:.1f}, {error:.0e} from differences of gradients",
            "<= 6" if judged else "",
            product <= 6 * slope if judged else None,
            promise=False,
        )
    ]


def the_theorem(size: int, seeds: range) -> list[Row]:
    """Theorem 1.3: the error's ratio per step, and iterations against log(1/ε)."""
    ratios, slopes, off = [], [], []
    exponents = torch.arange(2, 13)
    for seed in seeds:
        problem, X = plant(size, size, seed)
        method = invert.RegularizedNewton(slack=SLACK)
        distances = distances_to_the_optimum(method, problem, X, 10)
        ratios += [b / a for a, b in itertools.pairwise(distances[1:])]
        counts = []
        for e in exponents.tolist():
            result = replace(method, accuracy=10.0**-e)(problem, start=X)
            counts.append(result.iterations)
            off.append(result.residual or 0.0)
        logs = math.log(10) * exponents.double()
        design = torch.stack([logs, torch.ones_like(logs)], 1)
        counted = torch.tensor(counts, dtype=torch.float64).unsqueeze(-1)
        slopes.append(float(torch.linalg.lstsq(design, counted).solution[0]))
    rate = SLACK / (1 + SLACK)
    expected = 1 / math.log(1 / rate)
    newton = invert.RegularizedNewton(slack=0.0)
    problem, X = plant(size, size)
    exact = distances_to_the_optimum(newton, problem, X, 4)
    return [
        Row(
            f'RegularizedNewton(gamma="paper", slack={SLACK}): error left by a step',
            f"{min(ratios):.4f} to {max(ratios):.4f}",
            f"linear: {rate:.4f}",
            max(ratios) <= 1.05 * rate,
        ),
        Row(
            "  iterations against ln(1/ε), ε = 1e-2 … 1e-12: slope",
            f"{min(slopes):.3f} to {max(slopes):.3f}",
            f"{expected:.3f} +- 10%",
            all(abs(slope / expected - 1) <= 0.1 for slope in slopes),
        ),
        Row("  error after 0, 1, … exact steps (slack=0)", ", ".join(f"{e:.0e}" for e in exact)),
        Row("  relative residual there: the optimum is not the input", f"{min(off):.2f}"),
    ]


def distances_to_the_optimum(
    method: invert.RegularizedNewton, problem: invert.Problem, X: Tensor, steps: int
) -> list[float]:
    method = replace(method, radius=radius(problem, X))
    equations = Equations.of([method.regularized(problem)])
    exact = replace(method, slack=0.0)
    best = exact.begin(equations, X.unsqueeze(0))
    for _ in range(20):
        best = exact.step(equations, best)
    state = method.begin(equations, X.unsqueeze(0))
    distances = [float((state.X - best.X).norm())]
    for _ in range(steps):
        state = method.step(equations, state)
        distances.append(float((state.X - best.X).norm()))
    return distances


def repaired(size: int, seeds: range) -> list[Row]:
    """Modified Newton from near the input: how often it comes back, in how many steps."""
    solved, steps = 0, []
    for seed in seeds:
        problem, X = plant(size, size, seed)
        near = X + 0.01 * plant(size, size, seed + 100)[1]
        result = invert.ModifiedNewton()(problem, start=near)
        error = math.inf if result.X is None else relative(result.X, X)
        solved += result.solved and error <= 1e-8
        steps.append(result.iterations)
    what = f"ModifiedNewton, n = d = {size}, from 0.01 away: the input found"
    value = f"{solved} of {len(seeds)}, {min(steps)} to {max(steps)} steps"
    return [Row(what, value, "all", solved == len(seeds))]


def the_bounds(n: int, d: int) -> list[Row]:
    """What the lemmas promise over what is measured, at one input."""
    problem, truth = plant(n, d)
    X = truth + 0.1 * plant(n, d, seed=1)[1]
    bounds = invert.bounds(problem, X)
    what = f"n = {n}, d = {d}, R = {bounds.R:.1f}"
    return [
        Row(
            f"least eigenvalue of ∇²L, {what}",
            f"{bounds.lowest:.2g}",
            f">= -ndR^8 = {bounds.lowest_bound:.1e}",
            bounds.lowest >= bounds.lowest_bound,
            f"greatest {bounds.highest:.2g}; loose by {_orders(bounds.lowest_bound, bounds.lowest)}"
            f"; with the R of Theorem 1.3, {bounds.lowest_bound_without_input:.1e}",
        ),
        Row(
            f"Lipschitz constant of ∇²L seen, {what}",
            f"{bounds.lipschitz:.2g}",
            f"<= n^3 d^3 R^10 = {bounds.lipschitz_bound:.1e}",
            bounds.lipschitz <= bounds.lipschitz_bound,
            f"loose by {_orders(bounds.lipschitz_bound, bounds.lipschitz)}",
        ),
    ]


def _orders(bound: float, value: float) -> str:
    return f"{math.log10(abs(bound / value)):.1f} orders of magnitude"


def the_assumption(draws: int) -> list[Row]:
    """Lemma 4.5 with a constant of 1, X left out of R (Theorem 1.3 as stated) and taken in."""
    broken = {"stated": 0, "without": 0, "with": 0, "proved": 0}
    for seed in range(draws):
        problem, X = plant(4, 4, seed)
        norms = [torch.linalg.matrix_norm(weights, 2) for weights in (problem.W, problem.V)]
        W, V = problem.W / norms[0], problem.V / norms[1]
        X = (1 + seed % 4) * X
        problem = replace(problem, W=W, V=V, B=problem.B / 4)
        bounds = invert.bounds(problem, X, neighbours=1)
        broken["stated"] += bounds.lowest < bounds.lowest_bound_without_input
        broken["without"] += bounds.lowest < -X.numel() * radius(problem) ** 8
        broken["with"] += bounds.lowest < bounds.lowest_bound
        broken["proved"] += bounds.lowest < bounds.lowest_proved
    what = "Lemma 4.5, n = d = 4, ‖W‖ = ‖V‖ = 1: violated"
    return [
        Row(
            f"{what} with ‖X‖ left out, ‖W‖_F and ‖V‖_F as in Theorem 1.3",
            f"{broken['stated']} of {draws} draws",
        ),
        Row(f"{what} with ‖X‖ left out", f"{broken['without']} of {draws} draws"),
        Row(f"{what} with ‖X‖ <= R", f"{broken['with']} of {draws} draws"),
        Row(
            f"{what} with ‖X‖ <= R and the proved constant",
            f"{broken['proved']} of {draws} draws",
            "0",
            not broken["proved"],
        ),
    ]


if __name__ == "__main__":
    show.main(run, __doc__)
