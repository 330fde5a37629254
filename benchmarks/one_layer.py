"""One-layer Transformers and ReLU networks from queries: precision and cost.

Errors are the worst on 100 fresh sequences of each length, relative to the largest answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from statistics import mean

import torch
from torch import Tensor

import show
from keyhole.extract import (
    Extraction,
    LowRank,
    MultiHead,
    OneLayerTransformer,
    ReluNetwork,
    Status,
)
from keyhole.oracle import OneLayer, Oracle, ReluFfn, plant
from show import Row

TARGET = 1e-8


def normal(stream: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=stream, dtype=torch.float64)


def fresh_error(target: Oracle, model: Oracle | None, lengths: tuple[int, ...]) -> float:
    """The worst error on 100 fresh sequences of each length, relative to the largest answer."""
    if model is None:
        return float("inf")
    stream = torch.Generator().manual_seed(987_654_321)
    worst = 0.0
    for length in lengths:
        sequences = normal(stream, 100, length, target.dim)
        answers = target(sequences)
        scale = float(answers.abs().max()) or 1.0
        worst = max(worst, float((model(sequences) - answers).abs().max()) / scale)
    return worst


def one_layer(width: int, seed: int) -> OneLayer:
    target = plant("one-layer", dim=16, width=width, seed=seed)
    assert isinstance(target, OneLayer)
    return target


def mirrored(width: int, seed: int) -> OneLayer:
    """Aᵀw = 0: every neuron has its mirror image, so half as many hyperplanes as neurons."""
    half = one_layer(width // 2, seed)
    return OneLayer(half.W, torch.cat([half.A, -half.A]), torch.cat([half.w, half.w]))


def low_rank(width: int, seed: int) -> OneLayer:
    target = plant("one-layer", dim=16, width=width, rank=2, seed=seed)
    assert isinstance(target, OneLayer)
    return target


def transformer_row(
    what: str,
    make: Callable[[int, int], OneLayer],
    width: int,
    seeds: int,
    method: type | None = None,
) -> Row:
    runs: list[tuple[Extraction, float]] = []
    for seed in range(seeds):
        target = make(width, seed)
        attack = OneLayerTransformer(seed=seed)
        if method is not None:
            attack = OneLayerTransformer(attention=method(), seed=seed)
        result = attack(target)
        runs.append((result, fresh_error(target, result.model, (1, 2, 4, 16))))
    queries = [result.queries for result, _ in runs]
    worst = max(error for _, error in runs)
    recovered = sum(result.status is Status.RECOVERED for result, _ in runs)
    return Row(
        f"{what}, d=16, width {width}",
        f"{worst:.1e}",
        f"<= {TARGET:.0e}",
        worst <= TARGET and recovered == seeds,
        f"{recovered}/{seeds} recovered, {mean(queries):,.0f} queries "
        f"(m·d = {width * 16}, d² = 256)",
    )


def heads_row(heads: int, d: int, width: int, seeds: int) -> Row:
    errors: list[float] = []
    queries: list[int] = []
    recovered = 0
    for seed in range(seeds):
        target = plant("one-layer", dim=d, heads=heads, width=width, seed=seed)
        result = OneLayerTransformer(attention=MultiHead(seed=seed), seed=seed)(target)
        errors.append(fresh_error(target, result.model, (1, 2, 4, 16)))
        queries.append(result.queries)
        recovered += result.status is Status.RECOVERED
    return Row(
        f"one-layer Transformer, {heads} heads, d={d}, width {width}",
        f"{max(errors):.1e}",
        f"<= {TARGET:.0e}",
        max(errors) <= TARGET and recovered == seeds,
        f"{recovered}/{seeds} recovered, {mean(queries):,.0f} queries "
        f"(m·H·d = {width * heads * d}, 2H·d² = {2 * heads * d * d})",
    )


def network_row(d: int, m: int, seeds: int) -> Row:
    errors: list[float] = []
    ratios: list[float] = []
    kinks: set[int] = set()
    for seed in range(seeds):
        target = plant("relu", dim=d, width=m, seed=seed)
        result = ReluNetwork(seed=seed)(target)
        errors.append(fresh_error(target, result.model, (1, 1, 1)))
        ratios.append(result.queries / (m * d))
        kinks.add(hyperplanes(result))
    return Row(
        f"ReLU network, d={d}, m={m}",
        f"{max(errors):.1e}",
        f"<= {TARGET:.0e}",
        max(errors) <= TARGET,
        f"{seeds} seeds, hyperplanes {sorted(kinks)}, queries/(m·d) = {mean(ratios):.2f}, "
        f"at most {max(ratios):.2f}",
    )


def hyperplanes(result: Extraction) -> int:
    """Neurons of the model, but for the two opposite ones that carry a linear remainder."""
    if not isinstance(result.model, ReluFfn):
        return -1
    A = result.model.A
    extra = len(A) > 2 and torch.equal(A[-1], -A[-2])
    return len(A) - (2 if extra else 0)


def odd_networks(seed: int) -> Iterator[tuple[str, ReluFfn]]:
    d, stream = 12, torch.Generator().manual_seed(seed)
    A, w, more = normal(stream, 16, d), normal(stream, 16), normal(stream, 8)
    yield "parallel neurons", ReluFfn(torch.cat([A, 2 * A[:8]]), torch.cat([w, more]))
    yield "antiparallel neurons", ReluFfn(torch.cat([A, -1.5 * A[:8]]), torch.cat([w, more]))
    yield "even (Aᵀw = 0)", ReluFfn(torch.cat([A, -A]), torch.cat([w, w]))
    yield "ambiguous orientations (m = 4d)", ReluFfn(normal(stream, 48, d), normal(stream, 48))
    nearly = A[:4] + 1e-5 * normal(stream, 4, d)
    yield "nearly parallel (1e-5)", ReluFfn(torch.cat([A, nearly]), torch.cat([w, more[:4]]))
    yield "invisible neurons", ReluFfn(torch.cat([A, A + 1, 0 * A]), torch.cat([w, 0 * w, w]))
    yield "linear", ReluFfn(torch.cat([A, -A]), torch.cat([w, -w]))


def odd_rows(seeds: int) -> list[Row]:
    errors: dict[str, list[float]] = {}
    recovered: Counter[str] = Counter()
    for seed in range(seeds):
        for name, target in odd_networks(seed):
            result = ReluNetwork(seed=seed)(target)
            errors.setdefault(name, []).append(fresh_error(target, result.model, (1, 1, 1)))
            recovered[name] += result.status is Status.RECOVERED
    return [
        Row(
            f"ReLU network, {name}",
            f"{max(found):.1e}",
            f"<= {TARGET:.0e}",
            max(found) <= TARGET and recovered[name] == seeds,
            f"{recovered[name]}/{seeds} recovered",
        )
        for name, found in errors.items()
    ]


def run(quick: bool) -> list[Row]:
    seeds = 3 if quick else 10
    rows: list[Row] = []
    for width in (32, 64):
        rows.append(transformer_row("one-layer Transformer", one_layer, width, seeds))
    rows.append(transformer_row("the same with Aᵀw = 0", mirrored, 32, seeds))
    rows.append(transformer_row("the same with Aᵀw = 0", mirrored, 64, seeds))
    rows.append(transformer_row("attention of rank 2, LowRank", low_rank, 32, seeds, LowRank))
    shapes = [(2, 12, 16), (3, 12, 16)]
    if not quick:
        shapes = [(H, d, m) for d in (12, 16) for H in (2, 3) for m in (16, 32)]
        shapes += [(4, 16, 32), (4, 64, 64)]
    rows += [heads_row(heads, d, width, seeds) for heads, d, width in shapes]
    sizes = (
        [(8, 16), (16, 64)] if quick else [(d, m) for d in (8, 16, 32) for m in (16, 32, 64, 128)]
    )
    rows += [network_row(d, m, seeds) for d, m in sizes]
    return rows + odd_rows(5 if quick else 20)


if __name__ == "__main__":
    show.main(run, __doc__)
