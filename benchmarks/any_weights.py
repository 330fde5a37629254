"""Texts of causal models with random weights of many scales and depths: is every one read?

`--parts` selects:

    causal      a Llama and a GPT-2 of width 64 and 2 to 30 layers, weights of standard deviation
                0.02 to 0.5: hidden states of the first, middle and last layer, KV
                caches of the second and last; every text must be read exactly
    vocabulary  the same with four layers and a vocabulary of 30,522 tokens
    half        the same as `causal`, with weights in bfloat16 and float16

`--texts` random texts of 16 tokens are read from each. A leak must never be called that
of another model (*mismatch*).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

import show
import subjects
from keyhole.core import Status
from keyhole.models import Exposure, Loaded, anatomy
from show import Row

PARTS = ["causal", "vocabulary", "half"]
FAMILIES = ("llama", "gpt2")


def run(
    quick: bool, device: str = subjects.DEVICE, texts: int = 4, parts: list[str] = PARTS
) -> Iterator[Row]:
    scales = [0.02, 0.1, 0.5]
    layers = [2, 4, 12, 30]
    width = 64
    words = 2000
    length = 16
    if quick:
        scales = [0.1, 0.5]
        layers = [2]
        width = 32
        words = 600
        texts = 1
        length = 4
    everything: list[dict[str, Any]] = []
    for what, family, scale, depth, vocabulary, dtype in plan(
        scales, layers, words, parts, quick
    ):
        loaded = subjects.tiny(
            family,
            vocabulary,
            scale=scale,
            num_hidden_layers=depth,
            hidden_size=width,
            intermediate_size=2 * width,
        )
        loaded = replace(loaded, model=loaded.model.to(device, dtype))
        ids = subjects.tiny_texts(texts, length, False, vocabulary)
        items: list[dict[str, Any]] = []
        for exposure in exposures(loaded):
            found, _ = subjects.read_back(loaded, ids, exposure)
            items += [{"exposure": str(exposure), **item} for item in found]
        everything += items
        yield row(f"{what}, scale {scale}, {depth} layers", items)
    mismatched = sum(item["status"] == Status.MISMATCH for item in everything)
    false = subjects.claims(everything)[1]
    of = f"of {len(everything)} texts"
    yield show.exactly("true leaks called mismatch", mismatched, 0, of)
    yield show.exactly("texts verified falsely", false, 0, of)


def plan(
    scales: list[float], layers: list[int], words: int, parts: list[str], quick: bool
) -> Iterator[tuple[str, str, float, int, int, torch.dtype]]:
    """Yield each row's name, family, scale, depth, vocabulary and data type."""
    if "causal" in parts:
        for family, depth, scale in product(FAMILIES, layers, scales):
            yield family, family, scale, depth, words, torch.float32
    if "vocabulary" in parts and not quick:
        for family, scale in product(FAMILIES, scales):
            name = f"{family}, 30,522 tokens"
            yield name, family, scale, 4, 30_522 - len(subjects.SPECIAL), torch.float32
    if "half" in parts:
        dtypes = (torch.bfloat16, torch.float16)
        for dtype, family, depth, scale in product(dtypes, FAMILIES, layers, scales):
            name = f"{family}, {str(dtype).removeprefix('torch.')}"
            yield name, family, scale, depth, words, dtype


def exposures(loaded: Loaded) -> list[Exposure]:
    """Return hidden states of the first, middle and last layer, caches of the second and last."""
    parts = anatomy(loaded.model)
    hidden = sorted({1, parts.layers // 2, parts.layers})
    caches = sorted({1, parts.layers - 1}) if parts.causal else []
    return [
        *(Exposure("hidden", layer) for layer in hidden),
        *(Exposure("kv", layer) for layer in caches),
    ]


def row(what: str, items: list[dict[str, Any]]) -> Row:
    statuses = Counter(item["status"] for item in items)
    tested = sum(item["tested"] for item in items) / sum(
        item["tokens"] for item in items
    )
    seconds = sum(item["seconds"] for item in items)
    details = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    details += f"; {tested:,.0f} tokens tested per position; {seconds:.1f} s"
    return show.every(what, subjects.claims(items)[0], len(items), details, items=items)


if __name__ == "__main__":
    show.main(run)
