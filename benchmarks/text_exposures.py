"""Text from attention maps, attention outputs and pooled embeddings of an encoder.

The full run takes all-MiniLM-L6-v2 and SST-2 (see texts.py for `--encoder` and `--data`). Layer 1's
maps are read in closed form from `--texts` sentences; what has to be searched, from fewer
(`--searched` for maps, `--outputs`, `--pooled`). `--layers 1,2` and `--parts maps,attention,pooled`
shorten it. `--quick` takes a random-weight model instead.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

import show
import texts
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
from texts import Change, degraded

OPTIONS = texts.options(texts=100)
OPTIONS.add_argument("--layers", type=texts.listed, default=[1, 2, 3, 4, 5, 6])
OPTIONS.add_argument("--parts", default="maps,attention,pooled")
OPTIONS.add_argument("--searched", type=int, default=10)
OPTIONS.add_argument("--outputs", type=int, default=5)
OPTIONS.add_argument("--pooled", type=int, default=3)
CHOSEN = texts.chosen(OPTIONS)


def run(quick: bool) -> list[Row]:
    return texts.collect(small() if quick else full(), strict=quick)


def full() -> Iterator[texts.Part]:
    loaded = texts.minilm(CHOSEN)
    ids = texts.encoded(loaded, texts.sst2(CHOSEN.data, CHOSEN.texts))
    yield from parts(loaded, ids, CHOSEN, TokenSearch(), least=0.99)


def small() -> Iterator[texts.Part]:
    """The same code on a random BERT of 100 words, and random texts."""
    loaded, ids = texts.tiny("bert", words=96), texts.tiny_texts(4, 8, framed=True, words=96)
    few = argparse.Namespace(
        layers=[1, 2], searched=1, outputs=1, pooled=1, parts="maps,attention,pooled"
    )
    yield from parts(loaded, ids, few, TokenSearch(rounds=1, passes=20, candidates=4), least=None)


def parts(
    loaded: Loaded,
    ids: list[Tensor],
    given: argparse.Namespace,
    search: TokenSearch,
    least: float | None,
) -> Iterator[texts.Part]:
    def each(count: int, exposure: Exposure, attack: Attack) -> texts.Part:
        return str(exposure), lambda: [row(loaded, ids[:count], exposure, attack)]

    wanted = given.parts.split(",")
    for layer in given.layers if "maps" in wanted else ():
        if layer == 1:
            yield "maps:1", lambda: closed_form(loaded, ids, least)
        else:
            yield each(given.searched, Exposure("maps", layer), EncoderMaps(deeper=search))
    for layer in given.layers if "attention" in wanted else ():
        count = given.searched if layer == 1 else given.outputs
        yield each(count, Exposure("attention", layer), SubLayerOutput(search))
    if "pooled" in wanted and given.pooled:
        yield each(given.pooled, Exposure("pooled"), PooledEmbedding(search))


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
    leaks = [texts.leak_of(loaded, text, exposure, change) for text in ids]
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
        measured += f", token F1 {statistics.mean(f1(*pair) for pair in pairs):.2f}"
    work = statistics.median(recovery.passes - recovery.forwards for recovery in recoveries)
    trials = statistics.median(recovery.forwards for recovery in recoveries)
    details = f"median {work:.0f} passes, {trials:.0f} trials; {seconds:.1f} s a text"
    details += f"; {false} falsely verified" if false else ""
    target = "" if least is None else f">= {least:.0%} of tokens"
    met = None if least is None else share >= least
    return Row(f"{exposure}, {how}, {len(pairs)} texts", measured, target, met, details)


def f1(ids: list[int], truth: list[int]) -> float:
    """Of the bags of tokens, special ones left out."""
    common = sum((Counter(ids[1:-1]) & Counter(truth[1:-1])).values())
    return 2 * common / max(1, len(ids) - 2 + len(truth) - 2)


if __name__ == "__main__":
    show.main(run, __doc__)
