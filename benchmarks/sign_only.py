"""One head from signs: queries against the floor of one bit each, and what is guaranteed.

Errors are measured against the planted W and v/‖v‖.
"""

from __future__ import annotations

import math

import show
from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.extract.extraction import Extraction
from show import Row


def run(quick: bool) -> list[Row]:
    seeds = range(3 if quick else 10)
    rows = bisection(8, 1e-6, seeds)
    if not quick:
        rows += bisection(8, 1e-11, range(3)) + bisection(32, 1e-6, range(3))
    return rows


def bisection(d: int, accuracy: float, seeds: range) -> list[Row]:
    results, errors = _extract(extract.SignOnly(accuracy=accuracy), d, seeds)
    floor = (d * d + d) * math.log2(1 / accuracy)
    queries = [result.queries for result in results]
    guarantees = [result.guarantee or math.inf for result in results]
    recovered = sum(result.status is Status.RECOVERED for result in results)
    case = f"d={d}, accuracy {accuracy:.0e}"
    return [
        Row(
            f"queries, {case}, {len(seeds)} seeds",
            f"{min(queries):,} to {max(queries):,} = {max(queries) / floor:.2f} x floor",
            f"<= 1.5 x {floor:,.0f}",
            max(queries) <= 1.5 * floor,
        ),
        Row(
            f"error of W and v, {case}",
            f"{max(errors):.1e}",
            f"<= {accuracy:.0e}",
            max(errors) <= accuracy,
        ),
        Row(
            f"guaranteed error of W, {case}",
            f"{max(guarantees):.1e}",
            f"<= {accuracy:.0e}",
            max(guarantees) <= accuracy,
        ),
        Row(
            f"recovered, {case}",
            f"{recovered} of {len(seeds)}",
            "all",
            recovered == len(seeds),
        ),
    ]


def _extract(
    method: extract.SignOnly, d: int, seeds: range
) -> tuple[list[Extraction], list[float]]:
    results: list[Extraction] = []
    errors: list[float] = []
    for seed in seeds:
        target = oracle.plant(dim=d, seed=seed)
        result = method(oracle.SignOnly(target))
        unit_v = target.v / target.v.norm()
        errors.append(float((result.model.W - target.W).abs().max()))
        errors.append(float((result.model.v - unit_v).abs().max()))
        results.append(result)
    return results, errors


if __name__ == "__main__":
    show.main(run, __doc__)
