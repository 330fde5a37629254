"""Layers that return vectors: queries, precision and success of FullOutput.

The lower bound is the number of unknowns over the numbers per answer; where every token answers, a
long enough sequence would bring it down to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import show
from keyhole.extract import FullOutput, Status
from keyhole.oracle import plant
from keyhole.oracle.planted import Attention
from planted import normals, worst_error
from show import Row

KINDS = {
    "every token": {"every_token": True},
    "every token, causal": {"every_token": True, "causal": True},
    "last token": {},
}
TOLERANCE = 1e-9


def run(quick: bool) -> Iterator[Row]:
    d, seeds = (12, range(3)) if quick else (64, range(5))
    for m in (d, d // 4):
        blocks = math.ceil(d / m)
        most = (d + blocks, 1 + blocks, d + d * blocks + 2)
        for queries, (name, kind) in zip(most, KINDS.items(), strict=True):
            layers = [plant("attention", dim=d, outputs=m, seed=seed, **kind) for seed in seeds]
            yield measure(f"one head, {name}, d={d}, m={m}", layers, queries)
    shapes = [(8, 2, 8), (12, 4, 12)]
    if not quick:
        shapes = [(32, 2, 32), (32, 4, 32), (32, 4, 8), (64, 8, 64)]
    for d, heads, m in shapes:
        for name, kind in KINDS.items():
            # Another x, or a second key, is tried where the first has two heads too close.
            scores = heads * (d * d + d * m) // m
            queries = 2 * scores + 96 if "last" in name else 3 * d + 64
            options = {"dim": d, "heads": heads, "outputs": m, **kind}
            layers = [plant("attention", seed=seed, **options) for seed in seeds]
            what = f"{heads} heads, {name}, d={d}, m={m}"
            yield measure(what, layers, queries)
            if m == d:
                low = [transformer_heads(d, heads, seed, **kind) for seed in seeds]
                yield measure(f"{what}, rank {d // heads}", low, queries)


def transformer_heads(d: int, heads: int, seed: int, **kind: bool) -> Attention:
    """W and V of rank d/H, each head writing into its own dimensions of a mixed output."""
    normal, k = normals(seed), d // heads
    W = 2 / d * normal(heads, d, k) @ normal(heads, k, d)
    return Attention(W, normal(heads, d, k) @ normal(heads, k, d) / math.sqrt(k), **kind)


def measure(what: str, targets: list[Attention], most: int) -> Row:
    """The same extraction over several seeds, each with at most so many queries."""
    queries, errors, right = [], [], 0
    for seed, truth in enumerate(targets):
        result = FullOutput(seed=seed)(truth)
        queries.append(result.queries)
        errors.append(worst_error(result.model, truth))
        right += result.status is Status.RECOVERED and errors[-1] <= TOLERANCE
    first = targets[0]
    bound = 1 if first.every_token else math.ceil(first.unknowns / first.V.shape[2])
    return Row(
        what,
        f"{max(queries)} queries, error {max(errors):.1e}, {right}/{len(targets)}",
        f"<= {most} queries, error <= {TOLERANCE:.0e}, all",
        right == len(targets) and max(queries) <= most,
        f"lower bound {bound}",
    )


if __name__ == "__main__":
    show.main(run)
