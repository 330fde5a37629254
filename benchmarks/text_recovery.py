"""Text from what a model exposes of one input: how much comes back, verified, at what cost.

all-MiniLM-L6-v2 on `--texts` sentences of SST-2 (subjects.py: `--encoder`, `--data`); `--parts`
takes some of it:

    exact      hidden states, layer by layer (`--layers`)
    precision  hidden states rounded or noisy
    keys       the keys of layer 1

`--quick` takes random-weight models instead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import show
import subjects
from keyhole import invert
from keyhole.models import Exposure, Loaded, anatomy
from show import Row
from subjects import Change, degraded

PARTS = ["exact", "precision", "keys"]


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 100,
    layers: list[int] = [1, 2, 3, 4, 5, 6],  # noqa: B006 - read, never changed
    parts: list[str] = PARTS,
) -> Iterator[Row]:
    if quick:
        yield from small()
        return
    loaded = subjects.minilm(encoder, device)
    short = subjects.encoded(loaded, subjects.sst2(data, texts))
    for layer in layers:
        if "exact" in parts and short:
            yield from exact(loaded, "SST-2", short, layer)
        if "precision" in parts and short and layer in (3, 6):
            yield from precisions(loaded, short, layer)
    if "keys" in parts and short:
        ids = [text for text in short if 5 <= len(text) <= 60]
        yield from whole("MiniLM", loaded, "kv:1", ids)


def small() -> Iterator[Row]:
    """The same code on random-weight models of a few thousand parameters."""
    loaded, ids = subjects.tiny("bert"), subjects.tiny_texts(12, 8, framed=True)
    for layer in (1, 2):
        yield from exact(loaded, "random texts", ids, layer)
    yield from precisions(loaded, ids[:2], 2)
    plain = subjects.tiny_texts(3, 8, framed=False)
    for family in ("gpt2", "llama"):
        for name in ("hidden:2", "kv:0"):
            yield from whole(f"random {family}", subjects.tiny(family), name, plain[:2])


@dataclass(frozen=True, eq=False)
class Outcome:
    """Recovered texts and the planted ones."""

    truths: list[list[int]]
    recoveries: list[invert.TextRecovery]
    seconds: float

    @property
    def items(self) -> list[dict[str, Any]]:
        """Each text: how long it is, what came back, and at what cost."""
        return [
            {
                "tokens": len(truth),
                "right": sum(map(int.__eq__, truth, recovery.ids)),
                "exact": recovery.ids == truth,
                "verified": recovery.verified,
                "passes": recovery.passes,
                "judging": recovery.judging,
                "tested": recovery.tested,
            }
            for truth, recovery in zip(self.truths, self.recoveries, strict=True)
        ]

    @property
    def tokens(self) -> float:
        """The share of tokens that are right."""
        return sum(item["right"] for item in self.items) / sum(map(len, self.truths))

    @property
    def exact(self) -> float:
        """The share of texts that are right and verified."""
        return sum(self._verified()) / len(self.recoveries)

    @property
    def false(self) -> int:
        return self._verified().count(False)

    def _verified(self) -> list[bool]:
        """Whether each text that is called verified is right."""
        pairs = zip(self.truths, self.recoveries, strict=True)
        return [truth == recovery.ids for truth, recovery in pairs if recovery.verified]

    def median(self, count: str) -> float:
        return statistics.median(getattr(recovery, count) for recovery in self.recoveries)

    @property
    def searched(self) -> float:
        """Passes without the judge's."""
        return statistics.median(recovery.passes - recovery.judging for recovery in self.recoveries)

    @property
    def summary(self) -> str:
        return f"{self.tokens:.2%} of tokens, {self.exact:.1%} of texts exact and verified"

    @property
    def cost(self) -> str:
        backward = statistics.median(each.passes - each.forwards for each in self.recoveries)
        passes = self.median("passes")
        return (
            f"passes median {passes:.0f} ({backward:.0f} with a backward, "
            f"{passes - self.searched:.0f} the judge's), most "
            f"{max(recovery.passes for recovery in self.recoveries)}; {self.seconds:.2f} s a text, "
            f"fitted once on {self.recoveries[0].fitting} random texts"
        )


def recover(
    loaded: Loaded, ids: list[Tensor], exposure: Exposure | int, change: Change | None = None
) -> Outcome:
    """Texts from one exposure; a number means the hidden states of that layer."""
    where = Exposure("hidden", exposure) if isinstance(exposure, int) else exposure
    leaks = [subjects.leak_of(loaded, text, where, change) for text in ids]
    started = time.perf_counter()
    recoveries = invert.recover_texts(loaded.model, loaded.tokenizer, leaks)
    seconds = (time.perf_counter() - started) / len(ids)
    return Outcome([text.tolist() for text in ids], recoveries, seconds)


def exact(loaded: Loaded, name: str, ids: list[Tensor], layer: int) -> Iterator[Row]:
    got = recover(loaded, ids, layer)
    what = f"layer {layer}, {name}, {len(ids)} texts"
    met = got.tokens >= 0.995 and got.exact >= 0.98
    row = Row(f"{what}: recovered", got.summary, ">= 99.5%, >= 98%", met, got.cost)
    yield show.itemised(row, got.items)
    bound, passes = 30 if layer <= 3 else 100, got.median("passes")
    yield Row(f"{what}: median passes", f"{passes:.0f}", f"<= {bound}", passes <= bound)


def precisions(loaded: Loaded, ids: list[Tensor], layer: int) -> Iterator[Row]:
    """What must come back from a leak that is not exact."""
    exactly = recover(loaded, ids, layer).searched
    asked = {
        "bfloat16": degraded("bfloat16"), "int8 per token": degraded("int8"),
        "noise of 1%": degraded(noise=0.01), "noise of 10%": degraded(noise=0.1),
    }  # fmt: skip
    for name, change in asked.items():
        got = recover(loaded, ids, layer, change)
        what = f"layer {layer}, {name}, {len(ids)} texts"
        details = f"{got.cost}; falsely verified: {got.false}"
        row = Row(what, got.summary, ">= 99% of tokens", got.tokens >= 0.99, details)
        yield show.itemised(row, got.items)
        early = got.searched <= exactly + 2
        measured = f"{got.searched:.0f} passes, exact leak {exactly:.0f}"
        yield Row(f"{what}: the search ends", measured, "as early as exact (+ 2)", early)


def whole(label: str, loaded: Loaded, name: str, ids: list[Tensor]) -> Iterator[Row]:
    """All tokens of all texts, by few tests of the vocabulary; the first text pays for the fit."""
    _, fitting = show.timed(lambda: recover(loaded, ids[:1], Exposure.parse(name)))
    got = recover(loaded, ids, Exposure.parse(name))
    positions, vocabulary = sum(len(text) for text in ids), len(anatomy(loaded.model).table)
    what = f"{label}, {name}, {len(ids)} texts"
    cost = f"{got.seconds * len(ids) / positions:.3f} s a token once fitted, which took "
    cost += f"{fitting:.1f} s with the first text on {loaded.model.device}; {got.cost}"
    row = Row(what, got.summary, "100%", got.tokens == got.exact == 1, cost)
    yield show.itemised(row, got.items)
    tested = sum(recovery.tested for recovery in got.recoveries) / positions
    most = vocabulary / 100 if vocabulary > 1000 else None
    yield Row(
        f"{what}: tokens tested a position", f"{tested:.2f} of {vocabulary:,}",
        "" if most is None else f"<= {most:.0f}", None if most is None else tested <= most,
    )  # fmt: skip


if __name__ == "__main__":
    show.main(run)
