"""Errors of extracted models against planted targets, and their rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import show
from keyhole.extract import Extraction, Status, judge
from keyhole.oracle import Oracle
from keyhole.oracle.planted import Attention, Head, MultiHead
from show import Row, relative

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from planted_truth import plant_block as plant_block  # for other benchmarks


def normals(seed: int) -> Callable[..., Tensor]:
    """Return a function that draws standard Gaussian tensors of a shape from one stream."""
    stream = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=stream, dtype=torch.float64)


def worst_error(found: object, truth: Head | MultiHead | Attention) -> float:
    """Return the largest error of any W or v, relative to its largest entry.

    Heads may be in any order and are matched by W. If their number is wrong, the error
    is infinite.
    """
    if not isinstance(found, type(truth)) or len(found.W) != len(truth.W):
        return math.inf
    if isinstance(truth, Head):
        return max(relative(found.W, truth.W), relative(found.v, truth.v))
    W, truths = (torch.stack(list(heads.W)) for heads in (found, truth))
    v, values = (
        torch.stack(list(heads.v if isinstance(heads, MultiHead) else heads.V))
        for heads in (found, truth)
    )
    partner = torch.cdist(truths.flatten(1), W.flatten(1)).argmin(1)
    if len(partner.unique()) < len(W):
        return math.inf
    largest = truths.abs().max()
    errors = [
        relative(W[p], t) if t.any() else float(W[p].abs().max() / largest)
        for p, t in zip(partner, truths, strict=True)
    ]
    return max(
        *errors, *(relative(v[p], t) for p, t in zip(partner, values, strict=True))
    )


def compared(
    target: Any, result: Extraction, seed: int, numbers: int
) -> dict[str, Any]:
    """Compare an extraction with its target, whose answers have `numbers` numbers each."""
    if result.model is None:
        error = None
    else:
        error = judge(target, result.model, seed + 100).worst
    return {
        "seed": seed,
        "status": result.status,
        "reason": result.reason,
        "error": error,
        "queries": result.queries,
        "seconds": result.seconds,
        "bound": -(-target.unknowns // numbers),
    }


def by_kind(
    measured: Callable[[tuple[str, int]], dict[str, Any]],
    known: Collection[str],
    kinds: str,
    seeds: int,
    workers: int,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each kind with the results of its seeds.

    `kinds` are names or parts of names, separated by semicolons.
    """
    parts = kinds.split(";")
    whole = [part for part in parts if part in known]
    chosen = [
        name
        for name in known
        if name in whole or any(part in name for part in parts if part not in whole)
    ]
    cases = [(name, seed) for name in chosen for seed in range(seeds)]
    found = show.spread_out(measured, cases, workers)
    for name in chosen:
        yield name, [next(found) for _ in range(seeds)]


def taken(
    name: str,
    items: list[dict[str, Any]],
    allowed: float,
    least: int,
    wrong: float | None = None,
) -> Row:
    """Count how many of a kind were recovered within `allowed`; beyond `wrong` one is false."""
    called = [item for item in items if item["status"] == Status.RECOVERED]
    right = [item for item in called if item["error"] <= allowed]
    false = sum(item["error"] > (wrong or allowed) for item in called)
    details = ""
    if right:
        queries, seconds, bound = (
            sorted(item[each] for item in right)[len(right) // 2]
            for each in ("queries", "seconds", "bound")
        )
        details = (
            f"largest error {max(item['error'] for item in right):.1e}; median {queries:,} "
            f"queries, lower bound {bound:,}, {queries / bound:.0f} times; {seconds:.1f} s"
        )
        if "parts" in right[0]:
            details = f"largest of weights {max(item['parts'] for item in right):.1e}; {details}"
    return Row(
        name,
        f"{len(right)} of {len(items)} recovered, {false} false",
        f">= {least} with error <= {allowed:.0e}, 0 false",
        len(right) >= least and not false,
        details,
        items=items,
    )


def fresh_error(
    target: Oracle,
    model: Oracle | None,
    lengths: Sequence[int],
    count: int = 100,
    size: float = 1,
) -> float:
    """Return the worst error on fresh sequences, relative to the largest answer of each length."""
    if model is None:
        return math.inf
    draw = normals(987_654_321)
    worst = 0.0
    for length in lengths:
        sequences = size * draw(count, length, target.dim)
        answers = target(sequences)
        off = (model(sequences) - answers).abs().max()
        worst = max(worst, float(off) / (float(answers.abs().max()) or 1.0))
    return worst
