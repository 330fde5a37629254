"""Attention sub-layers of real checkpoints, taken by queries that return one token's vector.

all-MiniLM-L6-v2, block 3: self-attention with biases and the output projection, 12 heads. And
SmolLM2-135M, block 0: RMS norm, rotary positions, 9 heads that share 3 keys and values, residual.
The floor is what symmetries leave of the parameters, over the numbers in an answer; nobody has
published a bound. texts.py says where the models come from; `--quick` takes random weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import show
import subjects
from keyhole.extract import AttentionSubLayer, Status, judge
from keyhole.models import Loaded
from keyhole.models.sub_layer import sub_layer
from show import Row

OPTIONS = subjects.options(texts=0)
OPTIONS.add_argument("--seeds", type=subjects.listed, default=[0, 1])
CHOSEN = subjects.chosen(OPTIONS)
TOLERANCE = 1e-8
MOST, MOST_SMALL = 4, 8  # queries for each one of the floor


def run(quick: bool) -> list[Row]:
    return subjects.collect(small() if quick else full(), strict=quick)


def full() -> Iterator[subjects.Part]:
    encoder = subjects.minilm(CHOSEN)
    for seed in CHOSEN.seeds:
        for residual in (False, True):
            yield "MiniLM", lambda r=residual, s=seed: measure("MiniLM-L6", encoder, 3, r, s)
    decoder = subjects.smollm2(CHOSEN)
    for seed in CHOSEN.seeds:
        yield "SmolLM2", lambda s=seed: measure("SmolLM2-135M", decoder, 0, True, s)


def small() -> Iterator[subjects.Part]:
    for family in ("bert", "llama"):
        loaded = subjects.tiny(family)
        yield family, lambda w=family, m=loaded: measure(f"random {w}", m, 1, True, 0, MOST_SMALL)


def measure(
    label: str, loaded: Loaded, layer: int, residual: bool, seed: int, most: int = MOST
) -> Iterator[Row]:
    target = sub_layer(loaded.model, layer, residual=residual)
    result = AttentionSubLayer(seed=seed)(target)
    what = f"{label}, block {layer}{', residual' if residual else ''}, seed {seed}"
    floor = -(-target.unknowns // target.outputs)
    if result.model is None:
        yield Row(what, f"{result.status}: {result.reason}", "recovered", False)
        return
    worst = judge(target, result.model, seed + 100).worst
    yield Row(
        what,
        f"{result.queries:,} queries, fresh error {worst:.1e}",
        f"<= {most} times the floor, error <= {TOLERANCE:.0e}",
        result.status is Status.RECOVERED and worst <= TOLERANCE and result.queries <= most * floor,
        f"floor {floor:,}, {result.queries / floor:.2f} times, {result.seconds:.0f} s",
    )


if __name__ == "__main__":
    show.main(run, __doc__)
