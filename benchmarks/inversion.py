"""Inversion without a prior: how many problems are solved exactly, and is it the input put in?

X and V standard Gaussian, W with entries of variance 0.3²/d, or 0.3·MMᵀ. `Auto`, at most 60 s a
problem on two cores; several problems run side by side where there are more cores. "Solved" is the
judge's word: the residual at rounding level. The equations often have several exact solutions;
whether the planted input is among those found, and whether it is the one of least norm, which is
named first, only this benchmark can tell, because it planted it.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

import torch

import show
from keyhole.invert import Auto, plant

SECONDS = 60.0
ASYMMETRIC = ((4, 8), (8, 4), (8, 8), (16, 8), (16, 16))
REQUIRED = ASYMMETRIC[:3]
SYMMETRIC = ((8, 8), (16, 16), (32, 16), (32, 32))


@dataclass(frozen=True)
class Case:
    n: int
    d: int
    symmetric: bool
    solutions: int
    seed: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    solved: bool
    seconds: float
    solutions: int
    among: bool
    first: bool


def attempt(case: Case) -> Outcome:
    torch.set_num_threads(2)
    problem, X = plant(case.n, case.d, symmetric=case.symmetric, seed=case.seed)
    method = Auto(starts=4096, solutions=case.solutions, seconds=case.seconds)
    result = method(problem)
    same = [float((solution - X).abs().max()) < 1e-5 for solution in result.solutions]
    return Outcome(result.solved, result.seconds, len(same), any(same), same[:1] == [True])


def row(what: str, outcomes: list[Outcome], required: bool) -> show.Row:
    share = sum(outcome.solved for outcome in outcomes) / len(outcomes)
    times = sorted(outcome.seconds for outcome in outcomes)
    among, first = (
        sum(getattr(outcome, name) for outcome in outcomes) for name in ("among", "first")
    )
    counts = sorted(outcome.solutions for outcome in outcomes)
    return show.Row(
        what,
        f"{share:.0%} of {len(outcomes)} solved exactly",
        "≥ 95%" if required else "printed",
        share >= 0.95 if required else None,
        f"{median(times):.1f} s in the median, {times[-1]:.1f} at most; {median(counts):.0f} "
        f"solutions ({counts[0]}–{counts[-1]}), the planted input among them {among}, "
        f"first {first}",
    )


def run(quick: bool) -> list[show.Row]:
    count = 2 if quick else 40
    plan: list[tuple[str, bool, list[Case]]] = []
    for n, d in REQUIRED[:2] if quick else ASYMMETRIC:
        cases = [Case(n, d, False, 1, seed, SECONDS) for seed in range(count)]
        plan.append((f"asymmetric W, (n, d) = ({n}, {d})", (n, d) in REQUIRED, cases))
    for n, d in SYMMETRIC[:1] if quick else SYMMETRIC:
        cases = [Case(n, d, True, 1, seed, SECONDS) for seed in range(count)]
        plan.append((f"symmetric positive W, ({n}, {d})", True, cases))
    # How many different inputs have the same output? All that some seconds find.
    for n, d in REQUIRED[:1] if quick else REQUIRED:
        limit = 1.0 if quick else 15.0
        cases = [Case(n, d, False, 10**6, seed, limit) for seed in range(count // 2)]
        plan.append((f"all solutions that {limit:.0f} s find, ({n}, {d})", False, cases))
    workers = max(1, (os.cpu_count() or 2) // 2)
    if quick:
        return [row(what, [attempt(case) for case in cases], must) for what, must, cases in plan]
    rows = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for what, must, cases in plan:
            rows.append(row(what, list(pool.map(attempt, cases)), must))
            print(*rows[-1:], file=sys.stderr, flush=True)  # an hour on two cores: not in silence
    return rows


if __name__ == "__main__":
    show.main(run, __doc__)
