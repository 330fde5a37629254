"""Layers that return vectors: queries, precision and success of FullOutput.

`floor` is the number of unknowns over the numbers per answer; where every token answers, a long
enough sequence would bring it down to 1.
"""

from __future__ import annotations

import math

import torch

import show
from keyhole.extract import FullOutput, Status
from keyhole.oracle.planted import Attention
from keyhole.oracle.storage import plant
from show import Row, relative

KINDS = {
    "every token": {"every_token": True},
    "every token, causal": {"every_token": True, "causal": True},
    "last token": {},
}
TOLERANCE = 1e-9


def errors(found: object, truth: Attention) -> tuple[float, float]:
    """Worst error of W and of V relative to the head's largest entry, heads in any order."""
    if not isinstance(found, Attention) or found.W.shape != truth.W.shape:
        return math.inf, math.inf

    best = [
        min((relative(f_W, W), relative(f_V, V)) for f_W, f_V in zip(found.W, found.V, strict=True))
        for W, V in zip(truth.W, truth.V, strict=True)
    ]
    return max(W for W, _ in best), max(V for _, V in best)


def transformer_heads(d: int, heads: int, seed: int, **kind: bool) -> Attention:
    """W and V of rank d/H, each head writing into its own dimensions of a mixed output."""
    stream = torch.Generator().manual_seed(seed)
    k = d // heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    W = 2 / d * normal(heads, d, k) @ normal(heads, k, d)
    return Attention(W, normal(heads, d, k) @ normal(heads, k, d) / math.sqrt(k), **kind)


def measure(what: str, targets: list[Attention], most: int) -> Row:
    """The same extraction over several seeds; `most` is the number of queries to meet."""
    first = targets[0]
    unknowns, m = first.unknowns, first.V.shape[2]
    queries, worst, right = [], [], 0
    for seed, truth in enumerate(targets):
        result = FullOutput(seed=seed)(truth)
        queries.append(result.queries)
        worst.append(max(errors(result.model, truth)))
        right += result.status is Status.RECOVERED and worst[-1] <= TOLERANCE
    floor = 1 if first.every_token else math.ceil(unknowns / m)
    return Row(
        what,
        f"{max(queries)} queries, error {max(worst):.1e}, {right}/{len(targets)}",
        f"<= {most} queries, error <= {TOLERANCE:.0e}, all",
        right == len(targets) and max(queries) <= most,
        f"floor {floor}",
    )


def run(quick: bool) -> list[Row]:
    d, seeds = (12, 3) if quick else (64, 5)
    rows: list[Row] = []

    def planted(dim: int, heads: int, m: int, kind: dict[str, bool]) -> list[Attention]:
        made = [
            plant("attention", dim=dim, heads=heads, outputs=m, seed=seed, **kind)
            for seed in range(seeds)
        ]
        return [layer for layer in made if isinstance(layer, Attention)]

    for m in (d, d // 4):
        blocks = math.ceil(d / m)
        most = {
            "every token": d + blocks,
            "every token, causal": 1 + blocks,
            "last token": d + d * blocks + 2,
        }
        for name, kind in KINDS.items():
            what = f"one head, {name}, d={d}, m={m}"
            rows.append(measure(what, planted(d, 1, m, kind), most[name]))
    shapes = [(8, 2, 8), (12, 4, 12)]
    if not quick:
        shapes = [(32, 2, 32), (32, 4, 32), (32, 4, 8), (64, 8, 64)]
    for dim, heads, m in shapes:
        for name, kind in KINDS.items():
            # Another x, or a second key, is tried where the first has two heads too close.
            scores = heads * (dim * dim + dim * m) // m
            most = 2 * scores + 96 if "last" in name else 3 * dim + 64
            what = f"{heads} heads, {name}, d={dim}, m={m}"
            rows.append(measure(what, planted(dim, heads, m, kind), most))
            if m == dim:
                low = [transformer_heads(dim, heads, seed, **kind) for seed in range(seeds)]
                rows.append(measure(f"{what}, rank {dim // heads}", low, most))
    return rows


if __name__ == "__main__":
    show.main(run, __doc__)
