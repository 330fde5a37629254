"""Certificates of inversion: radius, seconds, false solutions refused.

Every claim is checked against the planted input (n = d). A false X is the planted one, moved; it
may only get a radius that reaches back to the planted input.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median_high
from typing import Any

import torch
from torch import Tensor

import planted
import show
from keyhole.invert.krawczyk import Certificate, certify
from keyhole.invert.problem import Problem
from show import Row

BOUND = 1e-10
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


def run(quick: bool) -> Iterator[Row]:
    size = 6 if quick else 16
    yield from proofs(size, range(2 if quick else 20))
    for name, options in VARIANTS.items():
        made = [certify(*plant(size, s, **options)) for s in range(1 if quick else 3)]
        yield _radius(f"worst radius, {made[0].unknowns} unknowns, {name}", made)
    yield causal(8, range(2 if quick else 20))
    yield causal(size, range(1 if quick else 5))
    yield causal(size, range(1 if quick else 5), residual=True)
    for n, count in ((4, 10),) if quick else ((8, 100), (16, 20)):
        yield false_solutions(n, count)


def plant(n: int, seed: int, **options: Any) -> tuple[Problem, Tensor]:
    return planted.problem(n, n, seed, **options)


def proofs(n: int, seeds: range) -> Iterator[Row]:
    problems = [plant(n, seed) for seed in seeds]
    started = time.process_time()
    certificates = [certify(problem, X) for problem, X in problems]
    busy = (time.process_time() - started) / len(seeds)
    radii = [c.radius or torch.inf for c in certificates]
    seconds = max(c.seconds for c in certificates)
    conditions = [c.condition or 0 for c in certificates]
    what = f"{n * n} unknowns, {len(seeds)} problems"
    yield Row(
        f"radius, {what}",
        f"{median_high(radii):.1e}, worst {max(radii):.1e}",
        f"<= {BOUND:.0e}",
        max(radii) <= BOUND,
        f"condition {min(conditions):.0e} to {max(conditions):.0e}",
    )
    details = f"{busy:.2f} s of processor time on average"
    yield show.ratio(f"slowest, {what}", f"{seconds:.2f} s", "<= 3 s", seconds <= 3, details)


def causal(n: int, seeds: range, *, residual: bool = False) -> Row:
    """With a V this large the condition grows with every token, whatever the method.

    The planted input is then itself far from the solution for the rounded B: no small radius is
    true. So the target is about the problems up to condition 1e6.
    """
    certificates = [certify(*plant(n, seed, causal=True, residual=residual)) for seed in seeds]
    conditions = [c.condition or torch.inf for c in certificates]
    fair = [c for c in certificates if (c.condition or torch.inf) <= 1e6]
    name = "causal, residual" if residual else "causal"
    what = f"worst radius, {n * n} unknowns, {name}, condition <= 1e6"
    details = (
        f"{len(fair)} of {len(certificates)} problems; "
        f"{sum(c.proved for c in certificates)} proved at any condition, "
        f"{min(conditions):.0e} to {max(conditions):.0e}"
    )
    if not fair:
        return Row(what, "no such problem", details=details)
    return replace(_radius(what, fair), details=details)


def _radius(what: str, certificates: list[Certificate]) -> Row:
    worst = max(c.radius or torch.inf for c in certificates)
    condition = max(c.condition or 0 for c in certificates)
    seconds = max(c.seconds for c in certificates)
    return show.at_most(what, worst, BOUND, f"{seconds:.2f} s, condition up to {condition:.0e}")


def false_solutions(n: int, count: int) -> Row:
    """Moves of size 1e-3 to 1 in the largest entry; a radius below that would be a false proof."""
    refused = reaching = 0
    for seed in range(count):
        problem, X = plant(n, seed)
        size = 10 ** (-3 + 3 * seed / (count - 1))
        move = torch.randn(n, n, generator=torch.Generator().manual_seed(seed)).double()
        certificate = certify(problem, X + size * move / move.abs().max())
        refused += certificate.radius is None
        reaching += certificate.radius is not None and certificate.radius >= size * (1 - 1e-9)
    return Row(
        f"false solutions refused, {n * n} unknowns, moved by 1e-3 to 1",
        f"{refused} of {count}",
        f"{count}",
        refused + reaching == count,
        f"{reaching} proved with the planted input inside the radius",
    )


if __name__ == "__main__":
    show.main(run)
