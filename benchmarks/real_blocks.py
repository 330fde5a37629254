"""Whole blocks of real checkpoints, taken by queries that return one token's vector.

all-MiniLM-L6-v2, block 3: attention, GELU, biases, LayerNorms behind the sums. Stage by stage: the
norms and the sum of attention, the feed-forward layer, attention; each matrix next to the truth, in
the form that can be known. The lower bound is what symmetries leave of the parameters, over the
numbers in an answer. subjects.py says where the models come from; `--quick` takes a planted block.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import show
import subjects
from keyhole.extract import TransformerBlock, judge
from keyhole.extract.blocks.canonical import compared
from keyhole.models.block import block
from keyhole.oracle.block import Block, plant_block
from show import Row

TOLERANCE = 1e-6


def run(
    quick: bool, encoder: Path | None = None, device: str = subjects.DEVICE, layer: int = 3,
    seed: int = 0,
) -> Iterator[Row]:  # fmt: skip
    if quick:
        planted = plant_block(16, norm="behind", width=32, epsilon=1e-12)
        yield from measure("planted, norms behind, d = 16", planted, "cpu", seed)
        return
    loaded = subjects.minilm(encoder, "cpu")
    yield from measure(f"MiniLM-L6, block {layer}", block(loaded.model, layer), device, seed)


def measure(label: str, target: Block, device: str, seed: int) -> Iterator[Row]:
    started = time.perf_counter()
    result = TransformerBlock(seed=seed, device=device)(target)
    bound = -(-target.unknowns // target.dim)
    cost = (f"{result.queries:,} queries, lower bound {bound:,}, {result.queries / bound:.1f} times; "
            f"{time.perf_counter() - started:.0f} s")  # fmt: skip
    if not isinstance(result.model, Block):
        yield Row(label, f"{result.status}: {result.reason}", "recovered", False, cost)
        return
    errors = compared(target, result.model)
    worst = judge(target, result.model, seed + 100).worst
    largest = max(errors.values())
    row = Row(
        label, f"{result.status}, largest relative error of a matrix {largest:.1e}",
        f"<= {TOLERANCE:.0e}", largest <= TOLERANCE,
        f"{cost}; fresh error {worst:.1e}; " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()),
    )  # fmt: skip
    yield show.itemised(row, [{"errors": errors, "fresh": worst, "queries": result.queries,
                               "bound": bound, "status": result.status, "reason": result.reason}])  # fmt: skip


if __name__ == "__main__":
    show.main(run)
