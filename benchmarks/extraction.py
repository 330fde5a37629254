"""Weights from answers: multi-head attention, one-layer Transformers and output matrices.

Targets are planted. Errors are relative to the largest entry or, on 100 fresh sequences
of each length, to the largest answer. `--parts` selects:

    published    arXiv 2608.03294 as its abstract describes it, and ours, on the same targets
    bound        queries of 1,000 targets, d = 2 … 8 with 1 to 4 heads of any rank, compared with
                 the bound that docs/mathematics.md proves
    unknowns     queries for d = 8 … 768, compared with the number of unknowns; `make pictures`
                 draws docs/queries-against-unknowns.png from its record
    one-layer    Transformers of one layer
    last-layer   output matrices of 2,048 tokens behind an RMSNorm: from all log-probabilities, the
                 best 20 and 5 and the sampled token with a bias, and up to a rotation

The full run takes minutes, most of them for the targets' answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.extract import Extraction, Status
from keyhole.extract.output_layer import distance
from keyhole.oracle import OneLayer
from planted import fresh_error, normals, worst_error
from show import Row


def published(quick: bool) -> Iterator[Row]:
    """Compare arXiv 2608.03294, as its abstract describes it, with ours on the same targets."""
    shapes = ((4, 1), (4, 2), (8, 2), (8, 3), (16, 4), (32, 4), (64, 8))
    for d, heads in shapes[:3] if quick else shapes:
        items: list[dict[str, Any]] = []
        for seed in range(2 if quick else 5):
            target = oracle.plant("multi-head", dim=d, heads=heads, seed=seed)
            for method in (
                extract.MultiHeadAsPublished(heads=heads, seed=seed),
                extract.MultiHead(seed=seed),
            ):
                result = method(target)
                items.append(
                    {
                        "method": type(method).__name__,
                        "d": d,
                        "heads": heads,
                        "seed": seed,
                        "status": str(result.status),
                        "queries": result.queries,
                        "error": finite(worst_error(result.model, target)),
                        "seconds": result.seconds,
                    }
                )
        theirs, ours = (
            [item for item in items if item["method"] == name]
            for name in ("MultiHeadAsPublished", "MultiHead")
        )
        what = f"2608.03294 and ours, d={d}, H={heads}, {len(ours)} seeds"
        yield Row(
            what,
            f"as published {_summary(theirs)}",
            details=f"ours {_summary(ours)}",
            items=items,
        )


def _summary(items: list[dict[str, Any]]) -> str:
    queries, seconds = (
        max(item[name] for item in items) for name in ("queries", "seconds")
    )
    right = sum(item["status"] == Status.RECOVERED for item in items)
    known = [item["error"] for item in items if item["error"] is not None]
    error = f"error {max(known):.1e}" if len(known) == len(items) else "no such heads"
    return f"{queries:,} queries, {error}, {seconds:.1f} s, {right} recovered"


def finite(error: float) -> float | None:
    """Return None for infinity, which JSON lacks: the number of heads was wrong."""
    return error if math.isfinite(error) else None


def bound(quick: bool) -> Iterator[Row]:
    """Compare the queries of many targets with the proved bound, in all and per attempt."""
    items: list[dict[str, Any]] = []
    for seed in range(14 if quick else 1000):
        d = 2 + seed % 7
        heads = 1 + seed // 7 % 4
        rank = None if seed % 3 else 1 + seed // 3 % d
        target = oracle.plant("multi-head", dim=d, heads=heads, rank=rank, seed=seed)
        result = extract.MultiHead(seed=seed)(target)
        method = extract.MultiHead(heads=heads)
        items.append(
            {
                "d": d,
                "heads": heads,
                "rank": rank,
                "seed": seed,
                "status": str(result.status),
                "queries": result.queries,
                "attempt": method.most_queries(d, 1),
                "bound": method.most_queries(d),
                "error": finite(worst_error(result.model, target)),
            }
        )
    above = sum(item["queries"] > item["bound"] for item in items)
    more = sum(item["queries"] > item["attempt"] for item in items)
    right = sum(item["status"] == Status.RECOVERED for item in items)
    share = max(item["queries"] / item["attempt"] for item in items)
    what = f"draws above the bound, of {len(items)}"
    yield show.exactly(what, above, 0, f"{right} recovered", items=items)
    yield Row(
        "the same, above that of one attempt",
        str(more),
        details=f"at most {share:.2f} x",
    )


def unknowns(quick: bool) -> Iterator[Row]:
    """Compare queries with unknowns, at full rank and rank d/H; at large d those expected."""
    for d in (8, 16) if quick else (8, 16, 32, 64, 128, 256, 384, 768):
        heads = max(1, min(12, d // 8))
        for rank in (None, max(1, min(64, d // heads))):
            plan = extract.MultiHead(heads=heads)
            count = heads * (
                d + (d * d if rank is None else 2 * rank * d - rank * rank)
            )
            counted = plan.expected_queries(d) if rank is None else None
            item: dict[str, Any] = {
                "d": d,
                "heads": heads,
                "rank": rank,
                "unknowns": count,
                "expected": counted,
                "bound": plan.most_queries(d, 1),
                "published": 4 * heads * d * d - 2 * heads + 1,
            }
            if d <= (16 if quick else 64 if rank is None else 384):
                target = oracle.plant(
                    "multi-head", dim=d, heads=heads, rank=rank, seed=d
                )
                result = extract.MultiHead(seed=d)(target)
                item |= {"queries": result.queries}
                item |= {"error": finite(worst_error(result.model, target))}
            asked = item.get("queries") or counted
            what = f"d={d}, H={heads}, " + (
                "full rank" if rank is None else f"rank {rank}"
            )
            if asked is None:
                measured = "–"
            else:
                measured = f"{asked:,} = {asked / count:.2f} x unknowns"
            how = "asked" if "queries" in item else "expected"
            details = (
                f"{how}; {count:,} unknowns, one attempt at most {item['bound']:,}, "
            )
            details += f"published {item['published']:,}"
            yield Row(what, measured, details=details, items=[item])


def one_layer(quick: bool) -> Iterator[Row]:
    """Extract any network, and networks with Aᵀw = 0, where every neuron is mirrored."""
    seeds = range(3 if quick else 10)
    for what, mirrored in (
        ("one-layer Transformer", False),
        ("the same with Aᵀw = 0", True),
    ):
        for m in (32, 64):
            runs: list[tuple[Extraction, OneLayer]] = []
            for seed in seeds:
                target = oracle.plant(
                    "one-layer", dim=16, width=m // (1 + mirrored), seed=seed
                )
                if mirrored:
                    A = torch.cat([target.A, -target.A])
                    w = torch.cat([target.w, target.w])
                    target = OneLayer(target.W, A, w)
                runs.append((extract.OneLayerTransformer(seed=seed)(target), target))
            worst = max(
                fresh_error(each, result.model, (1, 2, 4, 16)) for result, each in runs
            )
            right = sum(result.status is Status.RECOVERED for result, _ in runs)
            queries = mean(result.queries for result, _ in runs)
            cost = f"{queries:,.0f} queries (m·d = {m * 16}, d² = 256)"
            yield Row(
                f"{what}, d=16, width {m}",
                f"{worst:.1e}",
                "<= 1e-08",
                worst <= 1e-8 and right == len(runs),
                f"{right}/{len(runs)} recovered, {cost}",
            )


ANSWERS: dict[str, dict[str, Any]] = {
    "all log-probabilities": {},
    "the best 20 with a bias": {"top": 20},
    "the best 5 with a bias": {"top": 5},
    "the sampled token with a bias": {"top": 0},
    "all, up to a rotation": {"rotation": True},
}


def last_layer(quick: bool) -> Iterator[Row]:
    for d in (8,) if quick else (16, 64):
        for name, options in ANSWERS.items():
            items = [copied(d, seed, options) for seed in range(1 if quick else 5)]
            right = sum(item["width"] == d for item in items)
            queries, worst = (
                max(item[each] for item in items) for each in ("queries", "error")
            )
            yield Row(
                f"last layer, d={d}, {name}",
                f"width of {right} of {len(items)}",
                "all",
                right == len(items),
                f"{queries:,} queries, error {worst:.1e}",
                items=items,
            )


def copied(d: int, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Extract a planted output matrix.

    The error is relative, after the best linear map; with `rotation` it is that of
    inner products.
    """
    draw = normals(seed)
    tokens = 2048
    W = 2 * draw(tokens, d) / math.sqrt(d)
    table = draw(tokens, 2 * d)
    mix = draw(8 * d, d) / math.sqrt(8 * d)
    gain = (0.5 * draw(d)).exp()

    def logits(ids: Tensor) -> Tensor:
        x = torch.tanh(table[ids].flatten(1) @ mix)
        return (x / x.square().mean(1, keepdim=True).sqrt() * gain @ W.mT).log_softmax(
            1
        )

    result = extract.OutputLayer(seed=seed, **options)(logits)
    model = result.model
    layer = result.layer
    error = math.inf
    if isinstance(model, oracle.planted.OutputMatrix) and layer is not None:
        _, error = distance(model, W, centred=True)
        if model.rotated:
            truth = (W - W.mean(0)) * gain
            inner = truth @ truth.mT
            error = float(
                (model.W @ model.W.mT - inner).abs().max() / inner.abs().max()
            )
    return {
        "d": d,
        "seed": seed,
        **options,
        "status": str(result.status),
        "width": result.width,
        "queries": result.queries,
        "error": error,
    }


PARTS = {
    "published": published,
    "bound": bound,
    "unknowns": unknowns,
    "one-layer": one_layer,
    "last-layer": last_layer,
}


def run(quick: bool, parts: list[str] = list(PARTS)) -> Iterator[Row]:  # noqa: B006
    for part in parts:
        yield from PARTS[part](quick)


if __name__ == "__main__":
    show.main(run)
