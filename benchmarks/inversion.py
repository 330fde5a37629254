"""Inversion without a prior: how many problems are solved exactly, and is it the input put in?

X and V standard Gaussian, W with entries of variance 0.3²/d, or 0.3·MMᵀ. `Auto`, at most 60 s a
problem on two cores; several problems run side by side where there are more cores. "Solved" is the
judge's word: the residual at rounding level. The equations often have several exact solutions;
whether the planted input is among those found, and whether it is the one of least norm, which is
named first, only this benchmark can tell, because it planted it. `--problems` of each size, half as
many where all solutions are sought (15 s each); `--parts several` takes those alone. All of it
takes hours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from statistics import median

import torch

import show
from keyhole.invert import Auto, plant
from show import Row

SECONDS = 60.0
REQUIRED = ((4, 8), (8, 4), (8, 8))
ASYMMETRIC = (*REQUIRED, (16, 8), (16, 16))
SYMMETRIC = ((8, 8), (16, 16), (32, 16), (32, 32))


@dataclass(frozen=True)
class Case:
    n: int
    d: int
    symmetric: bool
    seed: int
    solutions: int = 1
    seconds: float = SECONDS


@dataclass(frozen=True)
class Outcome:
    solved: bool
    seconds: float
    same: list[bool]  # for each solution, by norm: is it the planted input?


def run(
    quick: bool,
    problems: int = 40,
    parts: list[str] = ["solved", "several"],  # noqa: B006 - read, never changed
) -> Iterator[Row]:
    seeds = range(2 if quick else problems)
    plan: list[tuple[str, bool, list[Case]]] = []
    solved, several = (part in parts for part in ("solved", "several"))
    for n, d in (REQUIRED[:2] if quick else ASYMMETRIC) * solved:
        cases = [Case(n, d, False, seed) for seed in seeds]
        plan.append((f"asymmetric W, (n, d) = ({n}, {d})", (n, d) in REQUIRED, cases))
    for n, d in (SYMMETRIC[:1] if quick else SYMMETRIC) * solved:
        cases = [Case(n, d, True, seed) for seed in seeds]
        plan.append((f"symmetric positive W, ({n}, {d})", True, cases))
    # How many different inputs have the same output? All that some seconds find.
    for n, d in (REQUIRED[:1] if quick else REQUIRED) * several:
        limit = 1.0 if quick else 15.0
        cases = [Case(n, d, False, seed, 10**6, limit) for seed in seeds[: len(seeds) // 2]]
        plan.append((f"all solutions that {limit:.0f} s find, ({n}, {d})", False, cases))
    if quick:
        for what, required, cases in plan:
            yield row(what, map(attempt, cases), required)
        return
    workers = max(1, (os.cpu_count() or 2) // 2)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for what, required, cases in plan:
            yield row(what, pool.map(attempt, cases), required)


def attempt(case: Case) -> Outcome:
    torch.set_num_threads(2)
    problem, X = plant(case.n, case.d, symmetric=case.symmetric, seed=case.seed)
    result = Auto(starts=4096, solutions=case.solutions, seconds=case.seconds)(problem)
    same = [float((solution - X).abs().max()) < 1e-5 for solution in result.solutions]
    return Outcome(result.solved, result.seconds, same)


def row(what: str, attempts: Iterable[Outcome], required: bool) -> Row:
    outcomes = list(attempts)
    share = sum(outcome.solved for outcome in outcomes) / len(outcomes)
    times = [outcome.seconds for outcome in outcomes]
    counts = [len(outcome.same) for outcome in outcomes]
    found = Row(
        what,
        f"{share:.0%} of {len(outcomes)} solved exactly",
        "≥ 95%" if required else "printed",
        share >= 0.95 if required else None,
        f"{median(times):.1f} s in the median, {max(times):.1f} at most; {median(counts):.0f} "
        f"solutions ({min(counts)}–{max(counts)}), the planted input among them "
        f"{sum(any(outcome.same) for outcome in outcomes)}, "
        f"first {sum(outcome.same[:1] == [True] for outcome in outcomes)}",
    )
    return show.itemised(found, [asdict(outcome) for outcome in outcomes])


if __name__ == "__main__":
    show.main(run)
