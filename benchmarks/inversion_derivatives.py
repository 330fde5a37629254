"""Theorem 1.3 of *Unmasking Transformers* and its lemmas on the Hessian, measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

import show
from keyhole import attention, invert
from keyhole.invert.derivatives.bounds import radius
from keyhole.invert.derivatives.equations import Equations
from planted import normals
from show import Row

SLACK = 0.1


def run(quick: bool) -> Iterator[Row]:
    seeds = range(1 if quick else 5)
    yield from the_theorem(4, seeds)
    yield from the_assumption(8 if quick else 120)
    yield from the_worst(240 if quick else 10_000, steps=5 if quick else 300)


def plant(size: int, seed: int = 0) -> tuple[invert.Problem, Tensor]:
    """Return a problem (n = d) and its input; scores are small, as the paper's R requires."""
    draw = normals(seed)
    W = draw(size, size)
    V = draw(size, size)
    X = draw(size, size)
    W = 0.3 * W / math.sqrt(size)
    return invert.Problem(W=W, V=V, B=attention.output(X, W, V)), X


def the_theorem(size: int, seeds: range) -> Iterator[Row]:
    """Measure Theorem 1.3: the error's ratio per step, and iterations against log(1/ε)."""
    ratios = []
    slopes = []
    residuals = []
    exponents = torch.arange(2, 13)
    logs = math.log(10) * exponents.double()
    design = torch.stack([logs, torch.ones_like(logs)], 1)
    for seed in seeds:
        problem, X = plant(size, seed)
        method = invert.RegularizedNewton(slack=SLACK)
        distances = distances_to_the_optimum(method, problem, X, 10)
        ratios += [b / a for a, b in itertools.pairwise(distances[1:])]
        results = [
            replace(method, accuracy=10.0**-e)(problem, start=X)
            for e in exponents.tolist()
        ]
        residuals += [result.residual or 0.0 for result in results]
        counts = (
            torch.tensor([result.iterations for result in results])
            .double()
            .unsqueeze(-1)
        )
        slopes.append(float(torch.linalg.lstsq(design, counts).solution[0]))
    rate = SLACK / (1 + SLACK)
    expected = 1 / math.log(1 / rate)
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
    yield Row(
        "  relative residual there: the optimum is not the input",
        f"{min(residuals):.2f}",
    )


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


def the_assumption(draws: int) -> Iterator[Row]:
    """Count violations of Lemma 4.5: X left out of R (Theorem 1.3 as stated) and included."""
    stated = "with ‖X‖ left out, ‖W‖_F and ‖V‖_F as in Theorem 1.3"
    proved = "with ‖X‖ <= R and the proved constant"
    violated = dict.fromkeys([stated, "with ‖X‖ left out", "with ‖X‖ <= R", proved], 0)
    for seed in range(draws):
        problem, X = plant(4, seed)
        W, V = (
            each / torch.linalg.matrix_norm(each, 2) for each in (problem.W, problem.V)
        )
        X = (1 + seed % 4) * X
        problem = replace(problem, W=W, V=V, B=problem.B / 4)
        bounds = invert.bounds(problem, X, neighbours=1)
        limits = (
            bounds.lowest_bound_without_input,
            -X.numel() * radius(problem) ** 8,
            bounds.lowest_bound,
            bounds.lowest_proved,
        )
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


SHAPES = tuple(
    itertools.product((2, 3, 4), (1, 2, 3))
)  # n, d; with n = 1 the Hessian is constant
RADII = (1.0, 1.5, 2.0, 3.0)


def the_worst(draws: int, steps: int) -> Iterator[Row]:
    """Test Lemma 4.4 at its boundary: ‖W‖ = ‖V‖ = ‖X‖ = R, |b_ij| ≤ R, in equal shares by shape.

    From each draw, gradient ascent maximises |d³L(X + tE)/dt³|, whose maximum over E is
    the Lipschitz constant there: over E alone in half of the draws, over W, V, X and B
    too in the rest.
    """
    shares = {"1": list[float](), "proved": list[float]()}
    cases = []
    errors = []
    for number, (n, d) in enumerate(SHAPES):
        R = (
            torch.tensor(RADII)
            .double()
            .repeat(draws)[: len(range(number, draws, len(SHAPES)))]
        )
        climb = Climb(n, d, R, normals(number))
        seen = torch.stack([climb.step() for _ in range(steps)]).amax(0)
        problem, X, E = climb.last
        bounds = invert.bounds(problem, X, R=max(RADII), neighbours=1)
        powers = (R / max(RADII)) ** 10
        shares["1"] += (seen / bounds.lipschitz_bound / powers).tolist()
        shares["proved"] += (seen / bounds.lipschitz_proved / powers).tolist()
        ahead, behind = (
            invert.hessian(problem, X + step * E) for step in (1e-5, -1e-5)
        )
        slope = abs(float(E.flatten() @ (ahead - behind) @ E.flatten())) / 2e-5
        errors.append(abs(slope / float(climb.values[-1]) - 1))
        values = " ".join(f"{value:.3g}" for value in seen.tolist())
        radii = " ".join(f"{radius:g}" for radius in R.tolist())
        cases.append({"n": n, "d": d, "seed": number, "R": radii, "lipschitz": values})
    for constant, found in shares.items():
        exceeded = sum(not share <= 1 for share in found)
        proved = constant == "proved"
        yield Row(
            "Lemma 4.4, n = 2 … 4, d = 1 … 3, R = 1 … 3: exceeded with "
            f"{'the proved constant' if proved else 'the constant 1'}",
            f"{exceeded:,} of {len(found):,} draws",
            "0" if proved else "",
            exceeded == 0 if proved else None,
            f"at most {max(found):.2g} of it",
            run={"cases": cases} if proved else None,
        )
    yield show.at_most(
        "  its third derivatives against differences of Hessians", max(errors), 1e-5
    )


class Climb:
    """Gradient ascent on |d³L(X + tE)/dt³| of many problems at once, at the boundary of each R."""

    def __init__(self, n: int, d: int, R: Tensor, draw: Callable[..., Tensor]) -> None:
        shapes = ((d, d), (d, d), (n, d), (n, d), (n, d))
        self.free = [draw(len(R), *shape).requires_grad_() for shape in shapes]
        self.R = R[:, None, None]
        self.moves = (torch.arange(len(R)) // len(RADII) % 2).double()[:, None, None]
        self.ascent = torch.optim.Adam(self.free, lr=0.05, maximize=True)

    def step(self) -> Tensor:
        matrices = [
            A / torch.linalg.matrix_norm(A, 2, keepdim=True) for A in self.free[:3]
        ]
        W, V, X, B = (self.R * A for A in (*matrices, torch.sin(3 * self.free[3])))
        E = self.free[4] / torch.linalg.matrix_norm(self.free[4], keepdim=True)
        values = third(W, V, X, B, E).abs()
        self.ascent.zero_grad()
        (values + 1e-300).log().sum().backward()
        for each in self.free:
            if each.grad is not None:
                each.grad.nan_to_num_().mul_(
                    1.0 if each is self.free[4] else self.moves
                )
        self.ascent.step()
        self.values = values.detach()
        W, V, X, B, E = (each[-1].detach() for each in (W, V, X, B, E))
        self.last = invert.Problem(W=W, V=V, B=B), X, E
        return self.values


def third(W: Tensor, V: Tensor, X: Tensor, B: Tensor, E: Tensor) -> Tensor:
    """Return d³/dt³ of ‖softmax(YWYᵀ)YV − B‖² at Y = X + tE, t = 0, by power series in t."""
    s = [X @ W @ X.mT, E @ W @ X.mT + X @ W @ E.mT, E @ W @ E.mT]
    scale = (s[0] - s[0].amax(-1, keepdim=True)).exp()
    rises = [1.0, s[1], s[2] + s[1] ** 2 / 2, s[1] * s[2] + s[1] ** 3 / 6]
    top = [scale * rise for rise in rises]
    sums = [each.sum(-1, keepdim=True) for each in top]
    P = list[Tensor]()
    for k in range(4):
        P.append((top[k] - sum(P[i] * sums[k - i] for i in range(k))) / sums[0])
    f = [P[0] @ X @ V - B] + [P[k] @ X @ V + P[k - 1] @ E @ V for k in (1, 2, 3)]
    return 12 * (f[0] * f[3] + f[1] * f[2]).sum((1, 2))


if __name__ == "__main__":
    show.main(run)
