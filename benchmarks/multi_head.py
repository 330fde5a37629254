"""Many heads: queries, precision, related heads, and the attack's overhead over the oracle.

Queries are given beside H(d² + d), or H(2rd − r² + d) for heads of rank r: the number of unknowns.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.extract import Status, canonical
from show import Row, Stopwatch, relative

KINDS = (
    "plain", "equal", "opposite", "proportional", "zero", "invisible", "anti-proportional",
    "opposite with equal v", "mixed",
)  # fmt: skip


def run(quick: bool) -> list[Row]:
    seeds = range(2 if quick else 5)
    small, large = (12, 16) if quick else (32, 64)
    heads = 2 if quick else 8
    return [
        *(row for d in (4, 8, 16)[: 1 if quick else 3] for row in few(d, seeds)),
        *counts(small, 2 if quick else 4, small // 4, seeds, 1e-10, 2.0, full=True),
        *counts(large, heads, None, seeds, 1e-9, 1.6, full=True),
        *counts(large, heads, large // 8, seeds, 1e-9, 1.6, full=False),
        *related(range(9 if quick else 50)),
        *overhead(quick),
    ]


def few(d: int, seeds: range) -> list[Row]:
    """In few dimensions, finding the heads costs more than reading them."""
    return counts(d, 2, None, seeds, 1e-9, 8.0, full=True)


def counts(
    d: int, heads: int, rank: int | None, seeds: range, bound: float, share: float, full: bool
) -> list[Row]:
    """`full`: queries beside the unknowns of full-rank heads, whatever the rank."""
    errors, queries = [], []
    for seed in seeds:
        target = plant(d, heads, rank, seed)
        result = extract.MultiHead(seed=seed)(target)
        errors.append(worst(result.model, target))
        queries.append(result.queries)
    r = d if full or rank is None else rank
    floor = heads * (2 * r * d - r * r + d)
    what = f"d={d}, H={heads}, " + ("full rank" if rank is None else f"rank {rank}")
    formula = "H(d²+d)" if r == d else "H(2rd-r²+d)"
    published = 4 * heads * d * d - 2 * heads + 1
    return [
        Row(f"error, {what}", f"{max(errors):.1e}", f"<= {bound:.0e}", max(errors) <= bound),
        Row(
            f"queries, {what}",
            f"{min(queries)} to {max(queries)} = {max(queries) / floor:.2f} {formula}",
            f"<= {share} x {floor} (published: {published})",
            max(queries) <= share * floor if d >= 32 else None,  # below, fixed costs weigh most
        ),
    ]


def related(seeds: range) -> list[Row]:
    """Equal, opposite, proportional, zero and invisible heads: is the canonical form right?"""
    right, errors, statuses = 0, [], []
    for seed in seeds:
        target = related_heads(seed)
        result = extract.MultiHead(seed=seed)(target)
        errors.append(worst(result.model, canonical(target)))
        statuses.append(result.status)
        right += result.status is Status.RECOVERED and errors[-1] <= 1e-6
    what = f"canonical form right, {len(KINDS)} kinds, up to 16 heads"
    recovered = statuses.count(Status.RECOVERED)
    return [
        Row(what, f"{right} of {len(seeds)}", f"{len(seeds)}", right == len(seeds)),
        Row("recovered there; worst error of W or v", f"{recovered}; {max(errors):.1e}"),
    ]


def overhead(quick: bool) -> list[Row]:
    sizes = (
        ((16, 2, None),)
        if quick
        else ((64, 8, None), (64, 8, 8), (64, 16, None), (128, 8, None), (128, 8, 16))
    )
    rows: list[Row] = []
    for d, heads, rank in sizes:
        ratios: list[float] = []
        for seed in range(1 if quick else 3):
            watch = Stopwatch(plant(d, heads, rank, seed))
            started = time.perf_counter()
            extract.MultiHead(seed=seed)(watch)
            seconds = time.perf_counter() - started
            ratios.append(seconds / watch.seconds)
        what = f"attack / oracle alone, d={d}, H={heads}, rank {rank or d}"
        measured = (
            f"{seconds:.2f} s / {watch.seconds:.2f} s; {min(ratios):.2f} to {max(ratios):.2f}"
        )
        met = None if quick else max(ratios) <= 1.5
        rows.append(Row(what, measured, "" if quick else "<= 1.5", met, promise=False))
    return rows


def plant(d: int, heads: int, rank: int | None, seed: int) -> oracle.MultiHead:
    target = oracle.plant("multi-head", dim=d, heads=heads, rank=rank, seed=seed)
    assert isinstance(target, oracle.MultiHead)
    return target


def worst(found: object, truth: oracle.MultiHead) -> float:
    """The largest relative error of any W or v, heads matched by W; inf if the numbers differ."""
    if not isinstance(found, oracle.MultiHead) or len(found.W) != len(truth.W):
        return float("inf")
    W, V = torch.stack(list(found.W)), torch.stack(list(found.v))
    truths = torch.stack(list(truth.W))
    partner = torch.cdist(truths.flatten(1), W.flatten(1)).argmin(1)
    if len(partner.unique()) < len(W):
        return float("inf")
    largest = truths.abs().max()
    pairs = [(W[p], t) for p, t in zip(partner, truth.W, strict=True)]
    errors = [relative(w, t) if t.any() else float(w.abs().max() / largest) for w, t in pairs]
    return max(*errors, *(relative(V[p], t) for p, t in zip(partner, truth.v, strict=True)))


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
    match kind:
        case "equal":
            return W, other
        case "opposite":
            return -W, other
        case "proportional":
            return factor * W, other
        case "anti-proportional":
            return -factor * W, other
        case "zero":
            return 0 * W, other
        case "invisible":
            return W.mT.contiguous(), 0 * v
        case _:
            return -W, v


if __name__ == "__main__":
    show.main(run, __doc__)
