"""One head, full rank and low: queries, precision, and the attack's overhead over the oracle.

The full run takes minutes: most of them are the oracle's own, for d = 768 and d = 2048.
"""

from __future__ import annotations

import resource
import time

import show
from keyhole import extract, oracle
from show import Row, Stopwatch, relative


def run(quick: bool) -> list[Row]:
    seeds = range(2 if quick else 10)
    # The large ones first: peak memory is the process's.
    large = [
        overhead(96 if quick else 768, None, quick),
        overhead(128 if quick else 2048, 8 if quick else 64, quick),
    ]
    return [
        *counts(16 if quick else 64, seeds),
        *precision(16 if quick else 64, seeds),
        *[row for rows in large for row in rows],
        *against_the_convex_program(
            8 if quick else 32, 1 if quick else 2, range(1 if quick else 3)
        ),
    ]


def counts(d: int, seeds: range) -> list[Row]:
    full = {extract.SingleHead(seed=s)(oracle.plant(dim=d, seed=s)).queries for s in seeds}
    rows = [Row(f"queries, d={d}, full rank", str(full), f"{d * d + d}", full == {d * d + d})]
    for r in (1, d // 8):
        targets = [oracle.plant(dim=d, rank=r, seed=s) for s in seeds]
        floor = d + 2 * r * d - r * r
        given = {extract.LowRank(rank=r, seed=s)(targets[s]).queries for s in seeds}
        found = {extract.LowRank(seed=s)(targets[s]).queries for s in seeds}
        rows += [
            Row(f"queries, d={d}, rank {r} known", str(given), f"{floor}", given == {floor}),
            Row(
                f"queries, d={d}, rank {r} unknown",
                f"{min(found)} to {max(found)}",
                f"<= {floor + 2 * d}",
                max(found) <= floor + 2 * d,
            ),
        ]
    return rows


def precision(d: int, seeds: range) -> list[Row]:
    rows: list[Row] = []
    for scale, bound in ((1.0, 1e-11), (30.0, 1e-8)):
        errors, extra = [], []
        for seed in seeds:
            target = oracle.plant(dim=d, scale=scale, seed=seed)
            result = extract.SingleHead(seed=seed)(target)
            errors += [relative(result.model.W, target.W), relative(result.model.v, target.v)]
            extra.append(result.queries / (d * d + d) - 1)
        what = f"error of W and v, d={d}, W x {scale:.0f}"
        rows.append(Row(what, f"{max(errors):.1e}", f"<= {bound:.0e}", max(errors) <= bound))
    rows.append(Row("extra queries there", f"{max(extra):.2%}", "<= 2%", max(extra) <= 0.02))
    return rows


def overhead(d: int, rank: int | None, quick: bool) -> list[Row]:
    target = oracle.plant(dim=d, rank=rank, seed=1)
    method = extract.SingleHead() if rank is None else extract.LowRank(rank=rank)
    watch = Stopwatch(target)
    started = time.perf_counter()
    result = method(watch)
    seconds = time.perf_counter() - started
    ratio = seconds / watch.seconds
    error = relative(result.model.W, target.W)
    size = f"d={d}" if rank is None else f"d={d}, r={rank}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [
        Row(f"error, {size}, {result.queries:,} queries", f"{error:.1e}", "<= 1e-9", error <= 1e-9),
        Row(
            f"attack / oracle alone, {size}",
            f"{seconds:.1f} s / {watch.seconds:.1f} s = {ratio:.2f}",
            "" if quick else "<= 1.3",  # small batches cost the attack more than the oracle
            None if quick else ratio <= 1.3,
            promise=False,
        ),
        Row(f"peak memory, {size}", f"{peak:.2f} GiB", "< 2 GiB", peak < 2),
    ]


def against_the_convex_program(d: int, r: int, seeds: range) -> list[Row]:
    methods = {
        "LowRank": extract.LowRank(rank=r),
        "NuclearNorm, 3rd measurements": extract.NuclearNorm(rank=r, oversampling=3),
        "NuclearNorm, 6rd measurements": extract.NuclearNorm(rank=r, oversampling=6),
    }
    rows: list[Row] = []
    for name, method in methods.items():
        results = [(method(t), t) for t in (oracle.plant(dim=d, rank=r, seed=s) for s in seeds)]
        errors = [relative(result.model.W, target.W) for result, target in results]
        seconds = max(result.seconds for result, _ in results)
        measured = f"{results[0][0].queries} queries, error {max(errors):.1e}, {seconds:.2f} s"
        rows.append(Row(f"{name}, d={d}, r={r}", measured))
    return rows


if __name__ == "__main__":
    show.main(run, __doc__)
