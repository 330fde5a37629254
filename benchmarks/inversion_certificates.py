"""Certificates of inversion: radius, seconds, false solutions refused, outputs known to ±τ.

Every claim is checked against the planted input. A false X is the planted one, moved; it may only
get a radius that reaches back to the planted input.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import show
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.krawczyk import Certificate, certify, unknown
from keyhole.invert.problem import Problem
from show import Row

VARIANTS: dict[str, dict[str, Any]] = {
    "4 heads": {"heads": 4},
    "causal, residual, V / √d": {"causal": True, "residual": True, "small": True},
    "residual": {"residual": True},
    "biases": {"biases": True},
    "one token known, m = d − 1": {"known": True},
    "4 heads, causal, residual, biases, V / √(4d)": {
        "heads": 4, "causal": True, "residual": True, "biases": True, "small": True,
    },
}  # fmt: skip


def run(quick: bool) -> list[Row]:
    size = 6 if quick else 16
    return [
        *proofs(size, range(2 if quick else 20)),
        *ill_conditioned(size, 1e5, range(4 if quick else 40)),
        *[variant(size, name, range(1 if quick else 3)) for name in VARIANTS],
        causal(8, range(2 if quick else 20)),
        causal(size, range(1 if quick else 5)),
        causal(size, range(1 if quick else 5), residual=True),
        *false_solutions(((4, 10),) if quick else ((8, 100), (16, 20))),
        *perturbed_outputs(((4, (1e-12,)),) if quick else SIZES_AND_TOLERANCES, quick),
    ]


SIZES_AND_TOLERANCES = (
    (8, (1e-14, 1e-12, 1e-11, 1e-10, 1e-9)),
    (16, (1e-15, 1e-14, 1e-13, 1e-12, 1e-11)),
)


def plant(
    n: int,
    seed: int,
    *,
    heads: int = 0,
    biases: bool = False,
    known: bool = False,
    small: bool = False,
    **flags: bool,
) -> tuple[Problem, Tensor]:
    """n = d; Gaussian X and V, W (and the key bias) of variance 0.3²/d.

    `small`: V of variance 1/(dH), so that attention is no larger than what a residual adds to it.
    """
    stream = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    several, m = (heads,) if heads else (), n - 1 if known else n
    X = draw(n, n)
    problem = Problem(
        W=0.3 / n**0.5 * draw(*several, n, n),
        V=draw(*several, n, m) / ((n * max(heads, 1)) ** 0.5 if small else 1),
        B=torch.zeros(n, m),
        key_bias=0.3 / n**0.5 * draw(*several, n) if biases else None,
        output_bias=draw(m) if biases else None,
        known=torch.cat([X[:1], torch.full_like(X[1:], torch.nan)]) if known else None,
        **flags,
    )
    return replace(problem, B=problem.output(X)), X


def proofs(n: int, seeds: range) -> list[Row]:
    problems = [plant(n, seed) for seed in seeds]
    started = time.process_time()
    certificates = [certify(problem, X) for problem, X in problems]
    busy = (time.process_time() - started) / len(seeds)
    radii = sorted(c.radius or torch.inf for c in certificates)
    seconds = max(c.seconds for c in certificates)
    conditions = [c.condition or 0 for c in certificates]
    what = f"{n * n} unknowns, {len(seeds)} problems"
    return [
        Row(
            f"radius, {what}",
            f"{radii[len(radii) // 2]:.1e}, worst {radii[-1]:.1e}",
            "<= 1e-10",
            radii[-1] <= 1e-10,
            f"condition {min(conditions):.0e} to {max(conditions):.0e}",
        ),
        Row(
            f"slowest, {what}",
            f"{seconds:.2f} s",
            "<= 3 s",
            seconds <= 3,
            f"{busy:.2f} s of processor time on average",
            promise=False,
        ),
    ]


def ill_conditioned(n: int, wanted: float, seeds: range) -> list[Row]:
    """The problem whose condition is nearest to the wanted one."""

    def distance(seed: int) -> float:
        problem, X = plant(n, seed)
        J = Equations.of([problem]).linearised(X[None]).jacobian()[0]
        return abs(float(torch.linalg.cond(J).log() - torch.tensor(wanted).log()))

    certificate = certify(*plant(n, min(seeds, key=distance)))
    what = f"radius, {n * n} unknowns, condition {certificate.condition:.1e}"
    return [_radius(what, [certificate], 1e-10)]


def variant(n: int, name: str, seeds: range) -> Row:
    certificates = [certify(*plant(n, seed, **VARIANTS[name])) for seed in seeds]
    return _radius(
        f"worst radius, {certificates[0].unknowns} unknowns, {name}", certificates, 1e-10
    )


def causal(n: int, seeds: range, *, residual: bool = False) -> Row:
    """With a V this large the condition grows with every token, whatever the method.

    The planted input is then itself far from the solution for the rounded B: no small radius is
    true. So the target is about the problems up to condition 1e6.
    """
    certificates = [certify(*plant(n, seed, causal=True, residual=residual)) for seed in seeds]
    fair = [c for c in certificates if (c.condition or torch.inf) <= 1e6]
    conditions = [c.condition or torch.inf for c in certificates]
    name = "causal, residual" if residual else "causal"
    what = f"worst radius, {n * n} unknowns, {name}, condition <= 1e6"
    details = (
        f"{len(fair)} of {len(certificates)} problems; "
        f"{sum(c.proved for c in certificates)} proved at any condition, "
        f"{min(conditions):.0e} to {max(conditions):.0e}"
    )
    if not fair:
        return Row(what, "no such problem", details=details)
    return replace(_radius(what, fair, 1e-10), details=details)


def _radius(what: str, certificates: list[Certificate], bound: float) -> Row:
    worst = max(c.radius or torch.inf for c in certificates)
    worst_condition = max(c.condition or 0 for c in certificates)
    seconds = max(c.seconds for c in certificates)
    details = f"{seconds:.2f} s, condition up to {worst_condition:.0e}"
    return Row(what, f"{worst:.1e}", f"<= {bound:.0e}", worst <= bound, details)


def false_solutions(cases: tuple[tuple[int, int], ...]) -> list[Row]:
    """Moves of size 1e-3 to 1 in the largest entry; a radius below that would be a false proof."""
    rows: list[Row] = []
    for n, count in cases:
        refused = reaching = 0
        for seed in range(count):
            problem, X = plant(n, seed)
            size = 10 ** (-3 + 3 * seed / (count - 1))
            move = torch.randn(n, n, generator=torch.Generator().manual_seed(seed)).double()
            certificate = certify(problem, X + size * move / move.abs().max())
            refused += certificate.radius is None
            reaching += certificate.radius is not None and certificate.radius >= size * (1 - 1e-9)
        what = f"false solutions refused, {n * n} unknowns, moved by 1e-3 to 1"
        details = f"{reaching} proved with the planted input inside the radius"
        met = refused + reaching == count
        rows.append(Row(what, f"{refused} of {count}", f"{count}", met, details))
    return rows


def perturbed_outputs(
    cases: tuple[tuple[int, tuple[float, ...]], ...], quick: bool, draws: int = 200
) -> list[Row]:
    """Inputs planted so that their outputs differ from B by no more than τ, with random signs."""
    rows: list[Row] = []
    for n, tolerances in cases:
        problems = [plant(n, seed) for seed in range(2 if quick else 5)]
        for tau in tolerances:
            inside = total = 0
            radii: list[float] = []
            nearest = 0.0
            for problem, X in problems:
                within = certify(problem, X, tolerance=tau).radius_within
                if within is None:
                    continue
                distances = _moved(problem, X, tau, draws)
                radii.append(within)
                nearest = max(nearest, float(distances.max()) / within)
                inside += int((distances <= within).sum())
                total += len(distances)
            what = f"B ± {tau:.0e}, {n * n} unknowns: planted inputs inside"
            proved = f"proved for {len(radii)} of {len(problems)} problems"
            if not total:
                rows.append(Row(what, "not proved", details=proved))
                continue
            details = (
                f"{proved}, radius up to {max(radii):.0e}, the farthest at {nearest:.0%} of it"
            )
            rows.append(Row(what, f"{inside} of {total}", f"{total}", inside == total, details))
    return rows


def _moved(problem: Problem, X: Tensor, tau: float, draws: int) -> Tensor:
    """How far inputs lie from X whose outputs lie within ±τ of B, the worst direction included."""
    free = unknown(problem)
    J = Equations.of([problem]).linearised(X[None]).jacobian()[0][:, free.flatten()]
    inverse = torch.linalg.inv(J)
    stream = torch.Generator().manual_seed(0)
    errors = torch.randn(draws, len(J), generator=stream, dtype=torch.float64).sign()
    errors = torch.cat([errors, inverse[inverse.abs().sum(1).argmax()].sign()[None]])
    moved = X.repeat(draws + 1, 1, 1)
    moved[:, free] += tau * errors @ inverse.T
    changes = (problem.output(moved) - problem.B).abs().amax((1, 2))
    # float64 blurs changes of its own size: shrink what went over, as if B were exact
    shrink = (tau / changes).clamp(max=1)[:, None, None]
    return (shrink * (moved - X)).abs().amax((1, 2))


if __name__ == "__main__":
    show.main(run, __doc__)
