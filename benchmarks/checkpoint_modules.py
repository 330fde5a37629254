"""Attention sub-layers of real checkpoints, taken by queries that return one token's vector.

all-MiniLM-L6-v2, block 3: self-attention with biases and the output projection, 12 heads. And
SmolLM2-135M, block 0: RMS norm, rotary positions, 9 heads that share 3 keys and values, residual.
The lower bound is what symmetries leave of the parameters, over the numbers in an answer; nobody
has published one. subjects.py says where the models come from; `--quick` takes random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import show
import subjects
from keyhole.extract import AttentionSubLayer, Status, judge
from keyhole.models import Loaded
from keyhole.models.sub_layer import sub_layer
from show import Row

TOLERANCE = 1e-8
MOST, MOST_SMALL = 4, 8  # queries, in lower bounds


def run(
    quick: bool,
    encoder: Path | None = None,
    model: Path | None = None,
    device: str = subjects.DEVICE,
    seeds: list[int] = [0, 1],  # noqa: B006 - read, never changed
) -> Iterator[Row]:
    if quick:
        for family in ("bert", "llama"):
            tiny = subjects.tiny(family)
            yield measure(f"random {family}", tiny, 1, True, 0, MOST_SMALL)
        return
    minilm = subjects.minilm(encoder, device)
    for seed in seeds:
        for residual in (False, True):
            yield measure("MiniLM-L6", minilm, 3, residual, seed)
    decoder = subjects.smollm2(model, device)
    for seed in seeds:
        yield measure("SmolLM2-135M", decoder, 0, True, seed)


def measure(
    label: str, loaded: Loaded, layer: int, residual: bool, seed: int, most: int = MOST
) -> Row:
    target = sub_layer(loaded.model, layer, residual=residual)
    result = AttentionSubLayer(seed=seed)(target)
    what = f"{label}, block {layer}{', residual' if residual else ''}, seed {seed}"
    bound = -(-target.unknowns // target.outputs)
    if result.model is None:
        return Row(what, f"{result.status}: {result.reason}", "recovered", False)
    worst = judge(target, result.model, seed + 100).worst
    row = Row(
        what,
        f"{result.queries:,} queries, fresh error {worst:.1e}",
        f"<= {most} times the lower bound, error <= {TOLERANCE:.0e}",
        result.status is Status.RECOVERED and worst <= TOLERANCE and result.queries <= most * bound,
        f"lower bound {bound:,}, {result.queries / bound:.2f} times, {result.seconds:.0f} s",
    )
    return show.itemised(row, [{"queries": result.queries, "error": worst, "bound": bound,
                                "status": result.status, "seconds": result.seconds}])  # fmt: skip


if __name__ == "__main__":
    show.main(run)
