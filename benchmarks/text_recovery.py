"""Text from what a model exposes of one input: how much is read and verified, at what cost.

all-MiniLM-L6-v2 on `--texts` sentences of SST-2 (subjects.py: `--encoder`, `--data`).
`--parts` selects:

    exact      hidden states, layer by layer (`--layers`)
    precision  rounded or noisy hidden states of layers 3 and 6
    keys       the keys and values of layer 1

`--quick` takes models with random weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import show
import subjects
from keyhole.data import read_texts
from keyhole.models import Exposure, Loaded
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
    short = subjects.encoded(loaded, read_texts(data / "sst2" / "dev.tsv")[:texts])
    for layer in layers:
        if "exact" in parts and short:
            yield from exact(loaded, "SST-2", short, layer)
        if "precision" in parts and short and layer in (3, 6):
            yield from precisions(loaded, short, layer)
    if "keys" in parts and short:
        ids = [text for text in short if 5 <= len(text) <= 60]
        yield from whole("MiniLM", loaded, "kv:1", ids)


def small() -> Iterator[Row]:
    """Run the same code on models of a few thousand random parameters."""
    loaded = subjects.tiny("bert")
    ids = subjects.tiny_texts(12, 8, framed=True)
    for layer in (1, 2):
        yield from exact(loaded, "random texts", ids, layer)
    yield from precisions(loaded, ids[:2], 2)
    plain = subjects.tiny_texts(3, 8, framed=False)
    for family in ("gpt2", "llama"):
        for name in ("hidden:2", "kv:0"):
            yield from whole(f"random {family}", subjects.tiny(family), name, plain[:2])


@dataclass(frozen=True, eq=False)
class Outcome:
    """The measurements of each text, and the mean seconds per text."""

    items: list[dict[str, Any]]
    seconds: float

    @property
    def tokens(self) -> float:
        """The share of tokens that are right."""
        right, tokens = (
            sum(item[name] for item in self.items) for name in ("right", "tokens")
        )
        return right / tokens

    @property
    def exact(self) -> float:
        """The share of texts that are right and verified."""
        return subjects.claims(self.items)[0] / len(self.items)

    def median(self, count: str, without: str = "") -> float:
        return statistics.median(
            item[count] - item.get(without, 0) for item in self.items
        )

    @property
    def summary(self) -> str:
        return (
            f"{self.tokens:.2%} of tokens, {self.exact:.1%} of texts exact and verified"
        )

    @property
    def cost(self) -> str:
        passes = self.median("passes")
        return (
            f"passes median {passes:.0f} ({self.median('passes', 'forwards'):.0f} with a backward, "
            f"{passes - self.median('passes', 'judging'):.0f} the judge's), most "
            f"{max(item['passes'] for item in self.items)}; {self.seconds:.2f} s per text, "
            f"fitted once on {self.items[0]['fitting']} random texts"
        )


def recover(
    loaded: Loaded, ids: list[Tensor], exposure: Exposure, change: Change | None = None
) -> Outcome:
    items, seconds = subjects.read_back(loaded, ids, exposure, change)
    return Outcome(items, seconds / len(ids))


def exact(loaded: Loaded, name: str, ids: list[Tensor], layer: int) -> Iterator[Row]:
    got = recover(loaded, ids, Exposure("hidden", layer))
    what = f"layer {layer}, {name}, {len(ids)} texts"
    bound = 30 if layer <= 3 else 100
    met = got.tokens >= 0.995 and got.exact >= 0.98 and got.median("passes") <= bound
    wanted = f">= 99.5%, >= 98%, median passes <= {bound}"
    yield Row(f"{what}: recovered", got.summary, wanted, met, got.cost, items=got.items)


def precisions(loaded: Loaded, ids: list[Tensor], layer: int) -> Iterator[Row]:
    """Read rounded and noisy hidden states."""
    where = Exposure("hidden", layer)
    changes = {
        "bfloat16": degraded("bfloat16"),
        "int8 per token": degraded("int8"),
        "noise of 1%": degraded(noise=0.01),
        "noise of 10%": degraded(noise=0.1),
    }
    for name, change in changes.items():
        got = recover(loaded, ids, where, change)
        what = f"layer {layer}, {name}, {len(ids)} texts"
        details = f"{got.cost}; falsely verified: {subjects.claims(got.items)[1]}"
        met = got.tokens >= 0.99
        yield Row(what, got.summary, ">= 99% of tokens", met, details, items=got.items)


def whole(label: str, loaded: Loaded, name: str, ids: list[Tensor]) -> Iterator[Row]:
    """Read all texts; the first is read once before, to fit the maps."""
    _, fitting = show.timed(lambda: recover(loaded, ids[:1], Exposure.parse(name)))
    got = recover(loaded, ids, Exposure.parse(name))
    positions = sum(len(text) for text in ids)
    what = f"{label}, {name}, {len(ids)} texts"
    cost = (
        f"{got.seconds * len(ids) / positions:.3f} s per token once fitted, which took "
    )
    cost += f"{fitting:.1f} s with the first text on {loaded.model.device}; {got.cost}"
    yield Row(
        what, got.summary, "100%", got.tokens == got.exact == 1, cost, items=got.items
    )


if __name__ == "__main__":
    show.main(run)
