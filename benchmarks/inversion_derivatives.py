"""Derivatives of the inversion loss: the Hessian against autodiff, and the paper's theorem.

`torch.func.hessian` is given the loss as a person would write it for one head. Both sides of a
ratio are timed in turn, the least of several runs each.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

import show
from keyhole import attention, invert
from keyhole.invert.derivatives.bounds import radius
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.hessian import gauss_newton_of
from planted import normals
from show import Row, least_seconds, relative

SLACK = 0.1


def run(quick: bool) -> Iterator[Row]:
    for size, target in ((4, None), (6, None)) if quick else ((16, 4), (32, 5)):
        yield from against_autodiff(size, target)
    yield blocks(4 if quick else 16)
    yield gauss_newton(6 if quick else 32, judged=not quick)
    yield products(6 if quick else 64, judged=not quick)
    seeds = range(1 if quick else 5)
    yield from the_theorem(4, seeds)
    yield repaired(4, seeds)
    for size in (4,) if quick else (4, 8):
        yield from the_bounds(size)
    yield from the_assumption(8 if quick else 120)


def plant(size: int, seed: int = 0) -> tuple[invert.Problem, Tensor]:
    """A problem (n = d) with its input; small scores, as the paper's R asks for."""
    draw = normals(seed)
    W, V, X = draw(size, size), draw(size, size), draw(size, size)
    W = 0.3 * W / math.sqrt(size)
    return invert.Problem(W=W, V=V, B=attention.output(X, W, V)), X


def near(size: int) -> tuple[invert.Problem, Tensor]:
    """A problem, and a point that is close to its input."""
    problem, X = plant(size)
    return problem, X + 0.1 * plant(size, seed=1)[1]


def autodiff(problem: invert.Problem) -> Callable[[Tensor], Tensor]:
    W, V, B = problem.W, problem.V, problem.B
    differentiated = torch.func.hessian(lambda X: (attention.output(X, W, V) - B).square().sum())

    def matrix(X: Tensor) -> Tensor:
        with warnings.catch_warnings():  # its first use compiles something that is deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            return differentiated(X).reshape(X.numel(), X.numel())

    return matrix


def against_autodiff(size: int, target: int | None) -> Iterator[Row]:
    problem, X = near(size)
    expected = autodiff(problem)
    error = relative(invert.hessian(problem, X), expected(X))
    slow, fast = least_seconds(lambda: expected(X), lambda: invert.hessian(problem, X), runs=10)
    what = f"hessian, n = d = {size}"
    yield show.at_most(f"{what}: error against torch.func.hessian", error, 1e-10)
    yield show.ratio(
        f"{what}: torch.func.hessian / hessian",
        f"{1e3 * slow:.1f} ms / {1e3 * fast:.1f} ms = {slow / fast:.1f}",
        f">= {target}",
        slow / fast >= target if target else None,
    )


def blocks(size: int) -> Row:
    problem, X = near(size)
    found = invert.hessian_blocks(problem, X)
    others = (autodiff(problem)(X), invert.hessian(problem, X))
    errors = [relative(found, other) for other in others]
    what = f"hessian_blocks, n = d = {size}: error against both"
    return Row(what, f"{errors[0]:.1e}, {errors[1]:.1e}", "<= 1e-10", max(errors) <= 1e-10)


def gauss_newton(size: int, judged: bool) -> Row:
    problem, X = plant(size)
    equations, start = Equations.of(problem), X.unsqueeze(0)
    J = equations.jacobian(start)[0]
    error = relative(gauss_newton_of(equations, start)[0], J.mT @ J)
    slow, fast = least_seconds(lambda: J.mT @ J, lambda: gauss_newton_of(equations, start), runs=10)
    return show.ratio(
        f"JᵀJ, n = d = {size}: product of a given J / structured",
        f"{1e3 * slow:.1f} ms / {1e3 * fast:.1f} ms = {slow / fast:.1f}, error {error:.0e}",
        "> 1",
        slow > fast if judged else None,
    )


def products(size: int, judged: bool) -> Row:
    problem, X = plant(size)
    P, step = plant(size, seed=2)[1], 1e-5
    slope, product = least_seconds(
        lambda: invert.gradient(problem, X),
        lambda: invert.hessian_product(problem, X, P),
        runs=10,
    )
    ahead, behind = (invert.gradient(problem, X + s * P) for s in (step, -step))
    error = relative(invert.hessian_product(problem, X, P), (ahead - behind) / (2 * step))
    return show.ratio(
        f"hessian_product, n = d = {size}: in gradients",
        f"{product / slope:.1f}, {error:.0e} from differences of gradients",
        "<= 6",
        product <= 6 * slope if judged else None,
    )


def the_theorem(size: int, seeds: range) -> Iterator[Row]:
    """Theorem 1.3: the error's ratio per step, and iterations against log(1/ε)."""
    ratios, slopes, residuals = [], [], []
    exponents = torch.arange(2, 13)
    logs = math.log(10) * exponents.double()
    design = torch.stack([logs, torch.ones_like(logs)], 1)
    for seed in seeds:
        problem, X = plant(size, seed)
        method = invert.RegularizedNewton(slack=SLACK)
        distances = distances_to_the_optimum(method, problem, X, 10)
        ratios += [b / a for a, b in itertools.pairwise(distances[1:])]
        results = [replace(method, accuracy=10.0**-e)(problem, start=X) for e in exponents.tolist()]
        residuals += [result.residual or 0.0 for result in results]
        counts = torch.tensor([result.iterations for result in results]).double().unsqueeze(-1)
        slopes.append(float(torch.linalg.lstsq(design, counts).solution[0]))
    rate = SLACK / (1 + SLACK)
    expected = 1 / math.log(1 / rate)
    exact = distances_to_the_optimum(invert.RegularizedNewton(slack=0.0), *plant(size), 4)
    yield Row(
        f'RegularizedNewton(gamma="paper", slack={SLACK}): error left by a step',
        f"{min(ratios):.4f} to {max(ratios):.4f}",
        f"linear: {rate:.4f}",
        max(ratios) <= 1.05 * rate,
    )
    yield Row(
        "  iterations against ln(1/ε), ε = 1e-2 … 1e-12: slope",
        f"{min(slopes):.3f} to {max(slopes):.3f}",
        f"{expected:.3f} +- 10%",
        all(abs(slope / expected - 1) <= 0.1 for slope in slopes),
    )
    yield Row("  error after 0, 1, … exact steps (slack=0)", ", ".join(f"{e:.0e}" for e in exact))
    yield Row("  relative residual there: the optimum is not the input", f"{min(residuals):.2f}")


def distances_to_the_optimum(
    method: invert.RegularizedNewton, problem: invert.Problem, X: Tensor, steps: int
) -> list[float]:
    method = replace(method, radius=radius(problem, X))
    equations = Equations.of(method.regularized(problem))
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


def repaired(size: int, seeds: range) -> Row:
    """Modified Newton from near the input: how often it comes back, in how many steps."""
    solved, steps = 0, []
    for seed in seeds:
        problem, X = plant(size, seed)
        start = X + 0.01 * plant(size, seed + 100)[1]
        result = invert.ModifiedNewton()(problem, start=start)
        solved += result.solved and result.X is not None and relative(result.X, X) <= 1e-8
        steps.append(result.iterations)
    what = f"ModifiedNewton, n = d = {size}, from 0.01 away: the input found"
    value = f"{solved} of {len(seeds)}, {min(steps)} to {max(steps)} steps"
    return Row(what, value, "all", solved == len(seeds))


def the_bounds(size: int) -> Iterator[Row]:
    """What the lemmas promise over what is measured, at one input."""
    bounds = invert.bounds(*near(size))
    what = f"n = {size}, d = {size}, R = {bounds.R:.1f}"

    def loose(bound: float, value: float) -> str:
        return f"loose by {math.log10(abs(bound / value)):.1f} orders of magnitude"

    yield Row(
        f"least eigenvalue of ∇²L, {what}",
        f"{bounds.lowest:.2g}",
        f">= -ndR^8 = {bounds.lowest_bound:.1e}",
        bounds.lowest >= bounds.lowest_bound,
        f"greatest {bounds.highest:.2g}; {loose(bounds.lowest_bound, bounds.lowest)}"
        f"; with the R of Theorem 1.3, {bounds.lowest_bound_without_input:.1e}",
    )
    yield Row(
        f"Lipschitz constant of ∇²L seen, {what}",
        f"{bounds.lipschitz:.2g}",
        f"<= n^3 d^3 R^10 = {bounds.lipschitz_bound:.1e}",
        bounds.lipschitz <= bounds.lipschitz_bound,
        loose(bounds.lipschitz_bound, bounds.lipschitz),
    )


def the_assumption(draws: int) -> Iterator[Row]:
    """Lemma 4.5 with a constant of 1, X left out of R (Theorem 1.3 as stated) and taken in."""
    stated = "with ‖X‖ left out, ‖W‖_F and ‖V‖_F as in Theorem 1.3"
    proved = "with ‖X‖ <= R and the proved constant"
    violated = dict.fromkeys([stated, "with ‖X‖ left out", "with ‖X‖ <= R", proved], 0)
    for seed in range(draws):
        problem, X = plant(4, seed)
        W, V = (each / torch.linalg.matrix_norm(each, 2) for each in (problem.W, problem.V))
        X = (1 + seed % 4) * X
        problem = replace(problem, W=W, V=V, B=problem.B / 4)
        bounds = invert.bounds(problem, X, neighbours=1)
        limits = (
            bounds.lowest_bound_without_input, -X.numel() * radius(problem) ** 8,
            bounds.lowest_bound, bounds.lowest_proved,
        )  # fmt: skip
        for case, limit in zip(violated, limits, strict=True):
            violated[case] += bounds.lowest < limit
    for case, count in violated.items():
        promised = case == proved
        yield Row(
            f"Lemma 4.5, n = d = 4, ‖W‖ = ‖V‖ = 1: violated {case}",
            f"{count} of {draws} draws",
            "0" if promised else "",
            count == 0 if promised else None,
        )


if __name__ == "__main__":
    show.main(run)
