"""One-layer Transformers and ReLU networks from queries: precision and cost.

Errors are the worst on 100 fresh sequences of each length, relative to the largest answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean

import torch

import show
from keyhole.extract import (
    Extraction,
    LowRank,
    Method,
    MultiHead,
    OneLayerTransformer,
    ReluNetwork,
    Status,
)
from keyhole.oracle import OneLayer, Planted, ReluFfn, plant
from planted import fresh_error, normals
from show import Row

TARGET = 1e-8
ODD = (
    "parallel neurons", "antiparallel neurons", "even (Aᵀw = 0)", "ambiguous orientations (m = 4d)",
    "nearly parallel (1e-5)", "invisible neurons", "linear",
)  # fmt: skip


def run(quick: bool) -> Iterator[Row]:
    seeds = range(3 if quick else 10)
    for what, make, attention, widths in (
        ("one-layer Transformer", lambda m, s: one_layer(s, 16, m), None, (32, 64)),
        ("the same with Aᵀw = 0", mirrored, None, (32, 64)),
        ("attention of rank 2, LowRank", lambda m, s: one_layer(s, 16, m, rank=2), LowRank, (32,)),
    ):
        for m in widths:
            runs = [transformer(make(m, seed), seed, attention) for seed in seeds]
            cost = f"(m·d = {m * 16}, d² = 256)"
            yield transformer_row(f"{what}, d=16, width {m}", runs, cost)
    shapes = [(2, 12, 16), (3, 12, 16)]
    if not quick:
        shapes = [(H, d, m) for d in (12, 16) for H in (2, 3) for m in (16, 32)]
        shapes += [(4, 16, 32), (4, 64, 64)]
    for heads, d, m in shapes:
        runs = [transformer(one_layer(s, d, m, heads=heads), s, MultiHead) for s in seeds]
        cost = f"(m·H·d = {m * heads * d}, 2H·d² = {2 * heads * d * d})"
        what = f"one-layer Transformer, {heads} heads, d={d}, width {m}"
        yield transformer_row(what, runs, cost)
    every = [(d, m) for d in (8, 16, 32) for m in (16, 32, 64, 128)]
    for d, m in [(8, 16), (16, 64)] if quick else every:
        yield network_row(d, m, seeds)
    for name in ODD:
        yield odd_row(name, range(5 if quick else 20))


def one_layer(seed: int, d: int, width: int, **options: int) -> OneLayer:
    return plant("one-layer", dim=d, width=width, seed=seed, **options)


def mirrored(width: int, seed: int) -> OneLayer:
    """Aᵀw = 0: every neuron has its mirror image, so half as many hyperplanes as neurons."""
    half = one_layer(seed, 16, width // 2)
    return OneLayer(half.W, torch.cat([half.A, -half.A]), torch.cat([half.w, half.w]))


def transformer(
    target: Planted, seed: int, attention: Callable[..., Method] | None
) -> tuple[Extraction, float]:
    """An extraction, and its error on fresh sequences."""
    options = {} if attention is None else {"attention": attention(seed=seed)}
    result = OneLayerTransformer(seed=seed, **options)(target)
    return result, fresh_error(target, result.model, (1, 2, 4, 16))


def transformer_row(what: str, runs: list[tuple[Extraction, float]], cost: str) -> Row:
    worst = max(error for _, error in runs)
    recovered = sum(result.status is Status.RECOVERED for result, _ in runs)
    return Row(
        what,
        f"{worst:.1e}",
        f"<= {TARGET:.0e}",
        worst <= TARGET and recovered == len(runs),
        f"{recovered}/{len(runs)} recovered, "
        f"{mean(result.queries for result, _ in runs):,.0f} queries {cost}",
    )


def network(target: ReluFfn, seed: int) -> tuple[Extraction, float]:
    result = ReluNetwork(seed=seed)(target)
    return result, fresh_error(target, result.model, (1, 1, 1))


def network_row(d: int, m: int, seeds: range) -> Row:
    runs = [network(plant("relu", dim=d, width=m, seed=seed), seed) for seed in seeds]
    ratios = [result.queries / (m * d) for result, _ in runs]
    kinks = sorted({hyperplanes(result) for result, _ in runs})
    return show.at_most(
        f"ReLU network, d={d}, m={m}",
        max(error for _, error in runs),
        TARGET,
        f"{len(seeds)} seeds, hyperplanes {kinks}, queries/(m·d) = {mean(ratios):.2f}, "
        f"at most {max(ratios):.2f}",
    )


def hyperplanes(result: Extraction) -> int:
    """Neurons of the model, but for the two opposite ones that carry a linear remainder."""
    if not isinstance(result.model, ReluFfn):
        return -1
    A = result.model.A
    extra = len(A) > 2 and torch.equal(A[-1], -A[-2])
    return len(A) - (2 if extra else 0)


def odd_network(name: str, seed: int) -> ReluFfn:
    d, draw, cat = 12, normals(seed), torch.cat
    A, w, more = draw(16, d), draw(16), draw(8)
    ambiguous, noise = ReluFfn(draw(48, d), draw(48)), 1e-5 * draw(4, d)
    made = (
        ReluFfn(cat([A, 2 * A[:8]]), cat([w, more])),
        ReluFfn(cat([A, -1.5 * A[:8]]), cat([w, more])),
        ReluFfn(cat([A, -A]), cat([w, w])),
        ambiguous,
        ReluFfn(cat([A, A[:4] + noise]), cat([w, more[:4]])),
        ReluFfn(cat([A, A + 1, 0 * A]), cat([w, 0 * w, w])),
        ReluFfn(cat([A, -A]), cat([w, -w])),
    )
    return made[ODD.index(name)]


def odd_row(name: str, seeds: range) -> Row:
    runs = [network(odd_network(name, seed), seed) for seed in seeds]
    recovered = sum(result.status is Status.RECOVERED for result, _ in runs)
    worst = max(error for _, error in runs)
    met = worst <= TARGET and recovered == len(runs)
    details = f"{recovered}/{len(runs)} recovered"
    return Row(f"ReLU network, {name}", f"{worst:.1e}", f"<= {TARGET:.0e}", met, details)


if __name__ == "__main__":
    show.main(run)
