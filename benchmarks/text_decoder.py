"""Text from a causal decoder's hidden states and KV cache, and from an encoder's keys and values.

The full run takes SmolLM2-135M-Instruct, all-MiniLM-L6-v2 and SST-2 (see subjects.py for `--model`,
`--encoder` and `--data`); `--exposures hidden:1,kv:15` and `--texts` shorten it, `--only decoder`
or `--only encoder` leaves the other out. Fitting is spent once for a model and layer and is printed
apart from the seconds for each token. `--quick` takes random-weight models instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import show
import subjects
from keyhole import invert
from keyhole.models import Exposure, Loaded, anatomy
from show import Row

EXPOSURES = ["hidden:1", "hidden:8", "hidden:15", "hidden:30", "kv:0", "kv:15"]
SHORTEST, LONGEST = 20, 60
SPARSE = 0.01  # of the vocabulary: what "well below" is taken to be


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    model: Path | None = None,
    texts: int = 10,
    exposures: list[str] = EXPOSURES,
    only: Literal["decoder", "encoder", ""] = "",
) -> Iterator[Row]:
    if quick:
        yield from small()
        return
    if only != "encoder":
        decoder = subjects.smollm2(model, device)
        ids = sentences(decoder, data, texts)
        for name in exposures:
            yield from recovery("SmolLM2", decoder, name, ids)
    if only != "decoder":
        minilm = subjects.minilm(encoder, device)
        ids = sentences(minilm, data, 10 * texts, shortest=5)
        yield from recovery("MiniLM", minilm, "kv:1", ids)


def small() -> Iterator[Row]:
    """The same code on random-weight models of a few thousand parameters."""
    for family in ("gpt2", "llama"):
        loaded = subjects.tiny(family)
        ids = [text.tolist() for text in subjects.tiny_texts(2, 8, framed=False)]
        for name in ("hidden:2", "kv:0"):
            yield from recovery(f"random {family}", loaded, name, ids)


def recovery(label: str, loaded: Loaded, name: str, ids: list[list[int]]) -> Iterator[Row]:
    """Recover the texts one by one: the first one also pays for the fit."""
    exposure = Exposure.parse(name)
    leaks = [subjects.leak_of(loaded, text, exposure) for text in ids]
    results: dict[int, invert.TextRecovery] = {}
    clock = [time.perf_counter()]
    for number, result in invert.recovering(loaded.model, loaded.tokenizer, leaks):
        results[number] = result
        clock.append(time.perf_counter())
    pairs = [(text, results[number]) for number, text in enumerate(ids)]
    positions = sum(len(text) for text in ids)
    right = sum(a == b for text, result in pairs for a, b in zip(text, result.ids, strict=False))
    exact = sum(text == result.ids and result.verified for text, result in pairs)
    tested = sum(result.tested for _, result in pairs) / positions
    vocabulary = len(anatomy(loaded.model).table)
    seconds = clock[-1] - clock[0]
    fitting = sum(result.fitting for result in results.values())
    # What the first text took beyond the others' pace went into the fit.
    rest = positions - len(ids[next(iter(results))])
    pace = f"{(clock[-1] - clock[1]) / rest:.3f} s a token once fitted, " if rest else ""
    summary = f"{right / positions:.2%} of tokens, {exact} of {len(ids)} texts exact and verified"
    cost = f"{seconds:.1f} s in all on {loaded.model.device}, {pace}{fitting:,} tokens for the fit"
    what = f"{label}, {name}, {len(ids)} texts"
    yield Row(what, summary, "100%", right == positions and exact == len(ids), cost)
    sparse = SPARSE * vocabulary if vocabulary > 1000 else None
    yield Row(
        f"{what}: tokens tested a position", f"{tested:.2f} of {vocabulary:,}",
        "" if sparse is None else f"<= {sparse:.0f}", None if sparse is None else tested <= sparse,
    )  # fmt: skip


def sentences(loaded: Loaded, data: Path, count: int, shortest: int = SHORTEST) -> list[list[int]]:
    """The first SST-2 sentences of a length between `shortest` and 60 tokens."""
    every = (text.tolist() for text in subjects.encoded(loaded, subjects.sst2(data)))
    return [ids for ids in every if shortest <= len(ids) <= LONGEST][:count]


if __name__ == "__main__":
    show.main(run)
