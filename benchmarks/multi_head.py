"""Many heads: queries, precision, related heads, and the attack's overhead over the oracle.

Queries are given next to H(d² + d), or H(2rd − r² + d) for heads of rank r: the number of unknowns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.extract import Status, canonical
from planted import worst_error
from show import Row, Stopwatch

KINDS = (
    "plain", "equal", "opposite", "proportional", "zero", "invisible", "anti-proportional",
    "opposite with equal v", "mixed",
)  # fmt: skip


def run(quick: bool) -> Iterator[Row]:
    seeds = range(2 if quick else 5)
    small, large, heads = (12, 16, 2) if quick else (32, 64, 8)
    for d in (4,) if quick else (4, 8, 16):  # finding the heads costs more than reading them
        yield from counts(d, 2, None, seeds, 1e-9, 8.0)
    yield from counts(small, 2 if quick else 4, small // 4, seeds, 1e-10, 2.0)
    yield from counts(large, heads, None, seeds, 1e-9, 1.6)
    yield from counts(large, heads, large // 8, seeds, 1e-9, 1.6, by_rank=True)
    yield from related(range(9 if quick else 50))
    full = ((64, 8, None), (64, 8, 8), (64, 16, None), (128, 8, None), (128, 8, 16))
    for d, heads, rank in ((16, 2, None),) if quick else full:
        yield overhead(d, heads, rank, quick)


def counts(
    d: int,
    heads: int,
    rank: int | None,
    seeds: range,
    bound: float,
    share: float,
    by_rank: bool = False,
) -> Iterator[Row]:
    """`by_rank`: queries next to the unknowns of heads of that rank, not of full rank."""
    errors, queries = [], []
    for seed in seeds:
        target = plant(d, heads, rank, seed)
        result = extract.MultiHead(seed=seed)(target)
        errors.append(worst_error(result.model, target))
        queries.append(result.queries)
    r = rank if by_rank and rank else d
    unknowns = heads * (2 * r * d - r * r + d)
    what = f"d={d}, H={heads}, " + ("full rank" if rank is None else f"rank {rank}")
    formula = "H(d²+d)" if r == d else "H(2rd-r²+d)"
    yield show.at_most(f"error, {what}", max(errors), bound)
    yield Row(
        f"queries, {what}",
        f"{min(queries)} to {max(queries)} = {max(queries) / unknowns:.2f} {formula}",
        f"<= {share} x {unknowns} (published: {4 * heads * d * d - 2 * heads + 1})",
        max(queries) <= share * unknowns if d >= 32 else None,  # below, fixed costs weigh most
    )


def related(seeds: range) -> Iterator[Row]:
    """Equal, opposite, proportional, zero and invisible heads: is the canonical form right?"""
    right, recovered, errors = 0, 0, []
    for seed in seeds:
        target = related_heads(seed)
        result = extract.MultiHead(seed=seed)(target)
        errors.append(worst_error(result.model, canonical(target)))
        recovered += result.status is Status.RECOVERED
        right += result.status is Status.RECOVERED and errors[-1] <= 1e-6
    what = f"canonical form right, {len(KINDS)} kinds, up to 16 heads"
    yield Row(what, f"{right} of {len(seeds)}", f"{len(seeds)}", right == len(seeds))
    yield Row("recovered there; worst error of W or v", f"{recovered}; {max(errors):.1e}")


def overhead(d: int, heads: int, rank: int | None, quick: bool) -> Row:
    ratios: list[float] = []
    for seed in range(1 if quick else 3):
        watch = Stopwatch(plant(d, heads, rank, seed))
        _, seconds = show.timed(lambda: extract.MultiHead(seed=seed)(watch))  # noqa: B023
        ratios.append(seconds / watch.seconds)
    return show.ratio(
        f"attack / oracle alone, d={d}, H={heads}, rank {rank or d}",
        f"{seconds:.2f} s / {watch.seconds:.2f} s; {min(ratios):.2f} to {max(ratios):.2f}",
        "<= 1.5",
        None if quick else max(ratios) <= 1.5,
    )


def plant(d: int, heads: int, rank: int | None, seed: int) -> oracle.MultiHead:
    return oracle.plant("multi-head", dim=d, heads=heads, rank=rank, seed=seed)


def related_heads(seed: int) -> oracle.MultiHead:
    """Up to 16 heads with d from 8 to 16, among them the kind that the seed says."""
    stream = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=stream))

    d, heads = pick(8, 16), pick(1, 12)
    target = plant(d, heads, (None, None, pick(1, 4))[pick(0, 2)], seed)
    W, v = list(target.W), list(target.v)
    kind = KINDS[seed % len(KINDS)]
    todo = {"mixed": ["equal", "opposite", "proportional", "zero"], "plain": []}.get(kind, [kind])
    for what in todo:
        i = pick(0, heads - 1)
        other = torch.randn(d, generator=stream, dtype=torch.float64)
        factor = float(torch.exp(0.6 * torch.randn((), generator=stream) + 0.5))
        new_W, new_v = relative_of(what, W[i], v[i], other, factor)
        W.append(new_W)
        v.append(new_v)
    return oracle.MultiHead(W, v)


def relative_of(
    kind: str, W: Tensor, v: Tensor, other: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """A head that stands to (W, v) as `kind` says, with value `other` where that is free."""
    if kind == "invisible":
        return W.mT.contiguous(), 0 * v
    if kind == "opposite with equal v":
        return -W, v
    factors = {"equal": 1, "opposite": -1, "zero": 0, "proportional": factor,
               "anti-proportional": -factor}  # fmt: skip
    return factors[kind] * W, other


if __name__ == "__main__":
    show.main(run)
