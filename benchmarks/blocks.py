"""Whole Transformer blocks extracted by queries: attention, feed-forward layer, biases, norms.

Planted blocks of every kind, ten seeds each. `error` is the largest error on fresh
sequences of 1 to 8 tokens, relative to the answers. Targets named `scores` answer with
one number. The lower bound is the number of unknowns, less the symmetries, divided by
the numbers in an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import show
from keyhole.extract import TransformerBlock
from planted import by_kind, compared, plant_block, taken
from show import Row

BITS = (
    2.0**-45
)  # for blocks without norms; ePrint 2026/1678 reaches 2⁻⁵¹ at d = 8, 6 heads
TOLERANCE = 1e-6
LEAST = 9  # of ten seeds
SWIGLU = {"activation": "silu", "gated": True}
LLAMA = {**SWIGLU, "groups": 2, "rotary": True, "biases": False}
WIDE = {"dim": 32, "heads": 8, "width": 64}
BERT = {"norm": "behind", "epsilon": 1e-12}
NORMS = {"none": "", "layer": "LayerNorm, ", "rms": "RMSNorm, "}
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "ReLU, d = 8, 6 heads": (
        {
            "dim": 8,
            "heads": 6,
            "head_dim": 1,
            "width": 16,
            "activation": "relu",
            "norm": "none",
        },
        BITS,
    ),
    "ReLU, d = 32, 8 heads": ({**WIDE, "activation": "relu", "norm": "none"}, BITS),
}
for _size in ({}, WIDE):
    _dim = f"d = {_size.get('dim', 16)}"
    for _norm, _name in NORMS.items():
        KINDS[f"{_name}GELU, {_dim}"] = {**_size, "norm": _norm}, TOLERANCE
        KINDS[f"{_name}SwiGLU, {_dim}"] = {**_size, **SWIGLU, "norm": _norm}, TOLERANCE
    KINDS[f"RMSNorm, SwiGLU, rotary, grouped keys, {_dim}"] = (
        {**_size, **LLAMA},
        TOLERANCE,
    )
    KINDS[f"LayerNorms behind the sums, GELU, {_dim}"] = {**_size, **BERT}, TOLERANCE
    for _activation in ("GELU", "ReLU"):
        KINDS[f"LayerNorms behind the sums, epsilon 1e-5, {_activation}, {_dim}"] = (
            {**_size, "norm": "behind", "activation": _activation.lower()},
            TOLERANCE,
        )
NARROW = {"dim": 8, "heads": 2, "score": True}
for _size, _units, _gated in ((NARROW, 8, 4), ({"score": True}, 32, 16)):
    _dim = f"d = {_size.get('dim', 16)}"
    for _norm, _name in list(NORMS.items())[1:]:
        KINDS[f"scores, {_name}GELU, {_dim}"] = (
            {**_size, "width": _units, "norm": _norm},
            TOLERANCE,
        )
        KINDS[f"scores, {_name}SwiGLU, {_dim}"] = (
            {**_size, **SWIGLU, "width": _gated, "norm": _norm},
            TOLERANCE,
        )
for _norm in ("layer", "rms"):
    KINDS[f"{NORMS[_norm]}ReLU, d = 16"] = (
        {"activation": "relu", "norm": _norm},
        TOLERANCE,
    )
LAYERS = (("relu", 16, 4), ("gelu", 16, 4), ("gelu", 12, 2), ("relu", 8, 2))
for _activation, _dim, _heads in LAYERS:
    for _first in (True, False):
        KINDS[
            f"PyTorch's layer, {_activation},{' norm_first,' * _first} d = {_dim}"
            f"{', 2 heads' * (_heads == 2)}"
        ] = {"pytorch": (_activation, _dim, _heads, _first)}, TOLERANCE


class PyTorch:
    """torch.nn.TransformerEncoderLayer as initialised."""

    def __init__(
        self, activation: str, dim: int, heads: int, norm_first: bool, *, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.dim = self.outputs = dim
        self.layer = torch.nn.TransformerEncoderLayer(
            dim,
            heads,
            2 * dim,
            0.0,
            activation,
            norm_first=norm_first,
            batch_first=True,
            dtype=torch.float64,
        ).eval()
        self.unknowns = sum(part.numel() for part in self.layer.parameters())

    def __call__(self, sequences: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.layer(sequences)[:, -1]


def run(
    quick: bool, seeds: int = 10, workers: int = 2, kinds: str = ""
) -> Iterator[Row]:
    if quick:
        seeds = 1
        workers = 1
        kinds = next(iter(KINDS))
    if quick:
        least = 0
    elif seeds == 10:
        least = LEAST
    else:
        least = seeds
    for name, items in by_kind(measured, KINDS, kinds, seeds, workers):
        yield taken(name, items, KINDS[name][1], least, TOLERANCE)


def measured(case: tuple[str, int]) -> dict[str, Any]:
    name, seed = case
    kind = KINDS[name][0]
    if "pytorch" in kind:
        target = PyTorch(*kind["pytorch"], seed=seed)
    else:
        target = plant_block(**kind, seed=seed)
    return compared(target, TransformerBlock(seed=seed)(target), seed, target.outputs)


if __name__ == "__main__":
    show.main(run)
