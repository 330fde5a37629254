"""Text from hidden states that leaked without their length, order, neighbours or full width.

The full run takes all-MiniLM-L6-v2 and SST-2 (subjects.py: `--encoder`, `--data`), about an hour on
two cores; `--parts`, a list of the numbers that its rows begin with, `--texts` and `--further`
(texts for what is only reported) shorten it. `--quick` takes random-weight models instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import show
import subjects
from keyhole import invert
from keyhole.models import Exposure, Loaded, anatomy
from keyhole.recover.leaks import Leak
from outcomes import recover
from show import Row
from subjects import Change


@dataclass(frozen=True)
class Case:
    """What becomes of a layer's hidden states; `share` of the texts is to come back exactly."""

    layer: int
    forms: tuple[str, ...]
    precision: str = "float32"
    share: float | None = None

    @property
    def words(self) -> str:
        rounded = () if self.precision == "float32" else (self.precision,)
        return f"layer {self.layer}, {', '.join((*self.forms, *rounded))}"


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 100,
    further: int = 20,
    mixed: int = 5,
    parts: list[int] = [],  # noqa: B006 - read, never changed
) -> Iterator[Row]:
    if quick:
        yield from small()
        return
    loaded = subjects.minilm(encoder, device)
    short = subjects.encoded(loaded, subjects.sst2(data, texts))
    half = f"truncated:{anatomy(loaded.model).width // 2}"
    cases = [
        Case(6, ("normalised",), share=0.95),
        Case(3, ("permuted",), share=0.95),
        Case(3, ("normalised",)),
        Case(3, ("normalised",), "bfloat16"),
        Case(6, ("normalised",), "bfloat16"),
        Case(3, ("normalised",), "int8"),
        Case(1, ("permuted",)),
        Case(3, ("permuted",), "bfloat16"),
        Case(3, ("normalised", "permuted")),
        Case(3, (half,)),
        Case(6, (half,)),
        Case(3, (half, "normalised")),
        Case(3, ("subset:16",)),
        Case(3, ("subset:16", "permuted")),
    ]
    for number, case in enumerate(cases, 1):
        if not parts or number in parts:
            ids = short if case.share is not None else short[:further]
            yield from rows(loaded, ids, case, f"{number}: ")
    if not parts or len(cases) + 1 in parts:
        yield from false_claims(loaded, short[: mixed + 1], 3, f"{len(cases) + 1}: ")


def small() -> Iterator[Row]:
    """The same code on random-weight models of a few thousand parameters."""
    ids = subjects.tiny_texts(6, 8, framed=True)
    cases = [
        Case(2, ("normalised",), share=1.0),
        Case(1, ("permuted",), share=0.8),
        Case(1, ("truncated:24", "normalised"), share=0.8),
        Case(1, ("subset:6",)),
    ]
    for case in cases:
        yield from rows(subjects.tiny("bert"), ids, case)
    yield from false_claims(subjects.tiny("bert"), ids[:3], 1)
    plain = subjects.tiny_texts(3, 8, framed=False)
    for case in (Case(2, ("normalised",), share=1.0), Case(2, ("permuted",), share=1.0)):
        yield from rows(subjects.tiny("llama"), plain, case, "llama, ")


def false_claims(loaded: Loaded, ids: list[Tensor], layer: int, name: str = "") -> Iterator[Row]:
    """Rows in no order that are no text's: some are another text's, or of another layer."""
    exposures = [Exposure("hidden", layer), Exposure("hidden", layer - 1)]
    leaks: list[Leak] = []
    stream = torch.Generator().manual_seed(0)
    for text, next_text in itertools.pairwise(ids):
        own, lower = (subjects.leak_of(loaded, text, exposure) for exposure in exposures)
        other = subjects.leak_of(loaded, next_text, exposures[0]).tensors["values"]
        last = min(len(other), len(text)) - 2
        for strange in (other, lower.tensors["values"]):
            values = own.tensors["values"].clone()
            values[last] = strange[last]
            leak = replace(own, values=values)
            leaks.append(invert.degrade(leak, "float32", 0.0, stream, ["permuted"]))
    recoveries = invert.recover_texts(loaded.model, loaded.tokenizer, leaks)
    claimed = sum(recovery.verified for recovery in recoveries)
    what = f"{name}layer {layer}, permuted, one row of another text or layer, {len(leaks)} leaks"
    yield Row(f"{what}: verified", f"{claimed}", "0", claimed == 0)


def rows(loaded: Loaded, ids: list[Tensor], case: Case, name: str = "") -> Iterator[Row]:
    got = recover(loaded, ids, case.layer, _degraded(case))
    what = f"{name}{case.words}, {len(ids)} texts"
    target = "" if case.share is None else f">= {case.share:.0%} exact and verified"
    met = None if case.share is None else got.exact >= case.share
    yield Row(what, got.summary, target, met, got.cost)
    yield Row(f"{what}: falsely verified", f"{got.false}", "0", got.false == 0)


def _degraded(case: Case) -> Change:
    """One stream of chance for all texts. What was done to the rows is told, except the steps of
    integers; that rows are normalised has to be seen from their numbers.
    """
    stream = torch.Generator().manual_seed(0)
    stated = case.precision if case.precision != "int8" else None

    def change(leak: Leak) -> Leak:
        done = invert.degrade(leak, case.precision, 0.0, stream, case.forms)
        return replace(done, precision=stated, normalised=None)

    return change


if __name__ == "__main__":
    show.main(run)
