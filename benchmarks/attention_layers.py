"""Stacks of attention layers and of whole Transformer blocks, extracted by queries.

Planted layers with residual connections, causal or not, 20 seeds each. `error` is the
largest error on fresh queries, relative to the answers; `parts` of a stack of blocks is
the largest error of a weight, relative to the largest of its matrix. The lower bound is
the number of unknowns divided by the numbers in one answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

import show
from keyhole.extract import AttentionLayers, TransformerBlocks
from keyhole.extract.canonical import compared as parts_of
from keyhole.oracle import Blocks, Oracle, plant
from planted import by_kind, compared, plant_block, taken
from show import Row

LEAST = 0.9  # of the seeds
EXACT = 1e-10
SINGLE = 1e-4  # of answers in float32
FLOAT32 = ", float32"
LAST = False, False  # the last token's vector, no mask
SIZES = [
    (d, heads, every) for d in (8, 16) for heads in (1, 2) for every in (True, False)
]
TARGETS = [  # layers, heads of each, d, vectors of every token, causal
    *((2, heads, d, every, False) for d, heads, every in SIZES),
    (2, 3, 8, *LAST),
    (3, 1, 8, *LAST),
    (3, 2, 8, *LAST),
    (4, 1, 8, *LAST),
    (2, 4, 8, *LAST),
    *((2, heads, d, every, True) for d, heads, every in SIZES),
]
KINDS: dict[str, dict[str, Any]] = {
    f"{layers} layers of {heads} {'heads' if heads > 1 else 'head'}, d = {d}"
    f"{', causal' if causal else ''}, {'every' if every else 'last'} token": {
        "layers": layers,
        "heads": heads,
        "dim": d,
        "every_token": every,
        "causal": causal,
    }
    for layers, heads, d, every, causal in TARGETS
}
KINDS |= {
    name + FLOAT32: KINDS[name] for name in ["2 layers of 1 head, d = 8, last token"]
}
GELU = {"activation": "gelu"}
SWIGLU = {"activation": "silu", "gated": True}
RMS = ("RMSNorm", "rms")
LAYER = ("LayerNorm", "layer")
SEEN = {"every_token": True, "causal": True}
WHOLE: list[tuple[int, int, int, tuple[str, str], dict[str, Any], dict[str, bool]]] = [
    *((2, 8, 4, norm, GELU, {}) for norm in (LAYER, RMS)),
    *((2, 8, 2, norm, SWIGLU, {}) for norm in (LAYER, RMS)),
    (2, 8, 4, RMS, GELU, SEEN),
    (2, 8, 2, LAYER, SWIGLU, SEEN),
    (3, 10, 4, LAYER, GELU, {}),
    *((2, 16, 16, norm, act, {}) for norm in (LAYER, RMS) for act in (GELU, SWIGLU)),
    (2, 16, 32, RMS, GELU, {}),
]  # blocks of 2 heads, d, units of each
for _blocks, _d, _width, (_norm, _short), _act, _seen in WHOLE:
    _name = (
        f"{_blocks} blocks, {_norm}, {_width} {'SwiGLU' if _act is SWIGLU else 'GELU'} units each, "
        f"d = {_d}{', causal, every token' if _seen else ''}"
    )
    KINDS[_name] = {
        "blocks": _blocks,
        "dim": _d,
        "heads": 2,
        "width": _width,
        "norm": _short,
        **_act,
        **_seen,
    }


class Float32:
    """A target whose inputs and answers are rounded to float32."""

    def __init__(self, inner: Oracle) -> None:
        self.inner = inner
        self.dim = inner.dim

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.inner(sequences.float().double()).float().double()


def run(
    quick: bool, seeds: int = 20, workers: int = 2, kinds: str = ""
) -> Iterator[Row]:
    if quick:
        seeds = 1
        workers = 1
        kinds = next(iter(KINDS))
    for name, items in by_kind(measured, KINDS, kinds, seeds, workers):
        allowed = SINGLE if name.endswith(FLOAT32) else EXACT
        yield taken(name, items, allowed, math.ceil(LEAST * seeds))


def measured(case: tuple[str, int]) -> dict[str, Any]:
    name, seed = case
    if "blocks" in KINDS[name]:
        return measure_blocks(seed, **KINDS[name])
    target = plant("attention-layers", **KINDS[name], seed=seed)
    asked = Float32(target) if name.endswith(FLOAT32) else target
    return compared(target, AttentionLayers(seed=seed)(asked), seed, target.dim)


def measure_blocks(seed: int, blocks: int, **kind: Any) -> dict[str, Any]:
    each = [plant_block(**kind, seed=seed * blocks + place) for place in range(blocks)]
    target = Blocks.of(each)
    item = {}
    result = TransformerBlocks(seed=seed)(target)
    if isinstance(result.model, Blocks):
        item = {"parts": max(parts_of(target, result.model).values())}
    return {**compared(target, result, seed, target.dim), **item}


if __name__ == "__main__":
    show.main(run)
