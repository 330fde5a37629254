"""One head from signs: queries against the lower bound of one bit each, and what is guaranteed.

Errors are measured against the planted W and v/‖v‖.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import show
from keyhole import extract, oracle
from keyhole.core import Status
from show import Row


def run(quick: bool) -> Iterator[Row]:
    yield from bisection(8, 1e-6, range(3 if quick else 10))
    if not quick:
        yield from bisection(8, 1e-11, range(3))
        yield from bisection(32, 1e-6, range(3))


def bisection(d: int, accuracy: float, seeds: range) -> Iterator[Row]:
    targets = [oracle.plant(dim=d, seed=seed) for seed in seeds]
    method = extract.SignOnly(accuracy=accuracy)
    results = [method(oracle.SignOnly(target)) for target in targets]
    error = max(
        float((found - truth).abs().max())
        for result, target in zip(results, targets, strict=True)
        for found, truth in (
            (result.model.W, target.W),
            (result.model.v, target.v / target.v.norm()),
        )
    )
    bits = (d * d + d) * math.log2(1 / accuracy)
    queries = [result.queries for result in results]
    case = f"d={d}, accuracy {accuracy:.0e}"
    yield Row(
        f"queries, {case}, {len(seeds)} seeds",
        f"{min(queries):,} to {max(queries):,} = {max(queries) / bits:.2f} x floor",
        f"<= 1.5 x {bits:,.0f}",
        max(queries) <= 1.5 * bits,
    )
    yield show.at_most(f"error of W and v, {case}", error, accuracy)
    guarantee = max(result.guarantee or math.inf for result in results)
    yield show.at_most(f"guaranteed error of W, {case}", guarantee, accuracy)
    recovered = sum(result.status is Status.RECOVERED for result in results)
    yield show.every(f"recovered, {case}", recovered, len(seeds))


if __name__ == "__main__":
    show.main(run)
