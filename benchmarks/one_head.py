"""One head, full rank and low: queries, precision, and the attack's overhead over the oracle.

The full run takes minutes: most of them are the oracle's own, for d = 768 and d = 2048.
"""

from __future__ import annotations

from collections.abc import Iterator

import show
from keyhole import extract, oracle
from show import Row, Stopwatch, relative


def run(quick: bool) -> Iterator[Row]:
    seeds, d = range(2 if quick else 10), 16 if quick else 64
    # The large ones first: peak memory is the process's.
    large = [*overhead(96 if quick else 768, None, quick),
             *overhead(128 if quick else 2048, 8 if quick else 64, quick)]  # fmt: skip
    yield from counts(d, seeds)
    yield from precision(d, seeds)
    yield from large
    d, r, seeds = (8, 1, range(1)) if quick else (32, 2, range(3))
    yield from against_the_convex_program(d, r, seeds)


def counts(d: int, seeds: range) -> Iterator[Row]:
    full = {extract.SingleHead(seed=s)(oracle.plant(dim=d, seed=s)).queries for s in seeds}
    yield Row(f"queries, d={d}, full rank", str(full), f"{d * d + d}", full == {d * d + d})
    for r in (1, d // 8):
        targets = [oracle.plant(dim=d, rank=r, seed=s) for s in seeds]
        unknowns = d + 2 * r * d - r * r
        given = {extract.LowRank(rank=r, seed=s)(targets[s]).queries for s in seeds}
        found = {extract.LowRank(seed=s)(targets[s]).queries for s in seeds}
        what = f"queries, d={d}, rank {r}"
        yield Row(f"{what} known", str(given), f"{unknowns}", given == {unknowns})
        most = unknowns + 2 * d
        measured = f"{min(found)} to {max(found)}"
        yield Row(f"{what} unknown", measured, f"<= {most}", max(found) <= most)


def precision(d: int, seeds: range) -> Iterator[Row]:
    for scale, bound in ((1.0, 1e-11), (30.0, 1e-8)):
        errors, extra = [], []
        for seed in seeds:
            target = oracle.plant(dim=d, scale=scale, seed=seed)
            result = extract.SingleHead(seed=seed)(target)
            errors += [relative(result.model.W, target.W), relative(result.model.v, target.v)]
            extra.append(result.queries / (d * d + d) - 1)
        yield show.at_most(f"error of W and v, d={d}, W x {scale:.0f}", max(errors), bound)
    yield Row("extra queries there", f"{max(extra):.2%}", "<= 2%", max(extra) <= 0.02)


def overhead(d: int, rank: int | None, quick: bool) -> Iterator[Row]:
    target = oracle.plant(dim=d, rank=rank, seed=1)
    method = extract.SingleHead() if rank is None else extract.LowRank(rank=rank)
    watch = Stopwatch(target)
    result, seconds = show.timed(lambda: method(watch))
    ratio, peak = seconds / watch.seconds, show.peak_memory()
    size = f"d={d}" if rank is None else f"d={d}, r={rank}"
    error = relative(result.model.W, target.W)
    what = f"error, {size}, {result.queries:,} queries"
    yield Row(what, f"{error:.1e}", "<= 1e-9", error <= 1e-9)
    yield show.ratio(
        f"attack / oracle alone, {size}",
        f"{seconds:.1f} s / {watch.seconds:.1f} s = {ratio:.2f}",
        "<= 1.3",
        None if quick else ratio <= 1.3,  # small batches cost the attack more than the oracle
    )
    yield Row(f"peak memory, {size}", f"{peak:.2f} GiB", "< 2 GiB", peak < 2)


def against_the_convex_program(d: int, r: int, seeds: range) -> Iterator[Row]:
    methods = {
        "LowRank": extract.LowRank(rank=r),
        "NuclearNorm, 3rd measurements": extract.NuclearNorm(rank=r, oversampling=3),
        "NuclearNorm, 6rd measurements": extract.NuclearNorm(rank=r, oversampling=6),
    }
    targets = [oracle.plant(dim=d, rank=r, seed=seed) for seed in seeds]
    for name, method in methods.items():
        results = [method(target) for target in targets]
        error = max(relative(a.model.W, b.W) for a, b in zip(results, targets, strict=True))
        seconds = max(result.seconds for result in results)
        measured = f"{results[0].queries} queries, error {error:.1e}, {seconds:.2f} s"
        yield Row(f"{name}, d={d}, r={r}", measured)


if __name__ == "__main__":
    show.main(run)
