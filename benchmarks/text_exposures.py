"""Text from attention maps, attention outputs and pooled embeddings of an encoder.

The full run takes all-MiniLM-L6-v2 and SST-2 (subjects.py: `--encoder`, `--data`). Layer 1's maps
are read in closed form from `--texts` sentences; what has to be searched, from fewer (`--searched`
for maps, `--outputs`, `--pooled`). `--layers 1,2` and `--parts maps,attention,pooled`
shorten it. `--quick` takes a random-weight model instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

import show
import subjects
from keyhole.models import Exposure, Loaded
from keyhole.recover import (
    EncoderMaps,
    PooledEmbedding,
    SubLayerOutput,
    TokenSearch,
    recover_texts,
)
from keyhole.recover.attack import Attack
from keyhole.recover.leaks import Leak
from show import Row
from subjects import Change, degraded


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 100,
    layers: list[int] = [1, 2, 3, 4, 5, 6],  # noqa: B006 - read, never changed
    parts: list[str] = ["maps", "attention", "pooled"],  # noqa: B006
    searched: int = 10,
    outputs: int = 5,
    pooled: int = 3,
) -> Iterator[Row]:
    if quick:  # the same code on a random BERT of 100 words, and random texts
        loaded = subjects.tiny("bert", words=96)
        ids = subjects.tiny_texts(4, 8, framed=True, words=96)
        layers, searched, outputs, pooled, least = [1, 2], 1, 1, 1, None
        search = TokenSearch(rounds=1, passes=20, candidates=4)
    else:
        loaded, search, least = subjects.minilm(encoder, device), TokenSearch(), 0.99
        ids = subjects.encoded(loaded, subjects.sst2(data, texts))
    for layer in layers if "maps" in parts else ():
        if layer == 1:
            yield from closed_form(loaded, ids, least)
        else:
            attack = EncoderMaps(deeper=search)
            yield row(loaded, ids[:searched], Exposure("maps", layer), attack)
    for layer in layers if "attention" in parts else ():
        few = ids[: searched if layer == 1 else outputs]
        yield row(loaded, few, Exposure("attention", layer), SubLayerOutput(search))
    if "pooled" in parts and pooled:
        yield row(loaded, ids[:pooled], Exposure("pooled"), PooledEmbedding(search))


def closed_form(loaded: Loaded, ids: list[Tensor], least: float | None) -> Iterator[Row]:
    exposure, few = Exposure("maps", 1), ids[: max(2, len(ids) // 5)]
    yield row(loaded, ids, exposure, EncoderMaps(), least=least)
    changes = {
        "fp16": degraded("float16"), "3 decimals": decimals(3), "2 decimals": decimals(2),
        "1 decimal": decimals(1),
    }  # fmt: skip
    for how, change in changes.items():
        yield row(loaded, few, exposure, EncoderMaps(), how, change)


def decimals(count: int) -> Change:
    def change(leak: Leak) -> Leak:
        return replace(leak, values=(leak.tensors["values"] * 10.0**count).round() / 10.0**count)

    return change


def row(
    loaded: Loaded,
    ids: list[Tensor],
    exposure: Exposure,
    attack: Attack,
    how: str = "fp32",
    change: Change | None = None,
    least: float | None = None,
) -> Row:
    """Recover all texts from one exposure; tokens are counted without the special ones."""
    leaks = [subjects.leak_of(loaded, text, exposure, change) for text in ids]
    recoveries = recover_texts(loaded.model, loaded.tokenizer, leaks, method=attack)
    pairs = [(recovery.ids, text.tolist()) for recovery, text in zip(recoveries, ids, strict=True)]
    tokens = sum(
        a == b for read, text in pairs for a, b in zip(read[1:-1], text[1:-1], strict=False)
    )
    share = tokens / sum(len(text) - 2 for _, text in pairs)
    exact = sum(read == text for read, text in pairs)
    verified = sum(recovery.verified for recovery in recoveries)
    false = sum(
        recovery.verified and a != b for recovery, (a, b) in zip(recoveries, pairs, strict=True)
    )
    seconds = statistics.mean(recovery.seconds for recovery in recoveries)
    measured = f"{share:.1%} of tokens, {exact} of {len(pairs)} exact, {verified} verified"
    if exposure.kind == "pooled":
        measured += (
            f", token F1 {statistics.mean(subjects.f1(a[1:-1], b[1:-1]) for a, b in pairs):.2f}"
        )
    work = statistics.median(recovery.passes - recovery.forwards for recovery in recoveries)
    trials = statistics.median(recovery.forwards for recovery in recoveries)
    details = f"median {work:.0f} passes, {trials:.0f} trials; {seconds:.1f} s a text"
    details += f"; {false} falsely verified" if false else ""
    target = "" if least is None else f">= {least:.0%} of tokens"
    met = None if least is None else share >= least
    return Row(f"{exposure}, {how}, {len(pairs)} texts", measured, target, met, details)


if __name__ == "__main__":
    show.main(run)
