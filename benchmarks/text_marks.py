"""Marks of tokens: how often is a token that is marked verified or likely right?

Hidden states of every layer in turn, as they are and rounded, noisy (stated or not) and with
positions missing, of the classifier that ships and of all-MiniLM-L6-v2 where it is installed or
given (subjects.py: `--encoder`, `--data`). Special tokens do not count: nobody has to read them.
 `--texts` for each precision, `--partial` for each partial leak (its search is long,
so it ends early), `--models demo,minilm` and `--leaks "int4;noise of 10%"` shorten it. `--quick`
takes a random-weight model instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import show
import subjects
from keyhole.models import Exposure, Loaded, anatomy
from keyhole.models.demo import load_demo
from keyhole.recover import EncoderStates, Mark, TextRecovery, recover_texts
from keyhole.recover.attack import Target
from keyhole.recover.leaks import Leak
from show import Row
from subjects import Change, degraded


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 1000,
    partial: int = 100,
    models: list[str] = ["demo", "minilm"],  # noqa: B006 - read, never changed
    leaks: str = "",
) -> Iterator[Row]:
    if quick:
        ids = subjects.tiny_texts(2, 8, framed=True)
        yield from parts(subjects.tiny("bert"), ids, 2, EncoderStates(rounds=2, samples=1000))
        return
    sentences = subjects.sst2(data, texts)
    for name in models:
        loaded = load_demo(device=device) if name == "demo" else subjects.minilm(encoder, device)
        ids = subjects.encoded(loaded, sentences, anatomy(loaded.model).max_length)
        yield from parts(loaded, ids, partial, EncoderStates(), leaks.split(";") if leaks else None)


def parts(
    loaded: Loaded,
    ids: list[Tensor],
    partial: int,
    attack: EncoderStates,
    leaks: list[str] | None = None,
) -> Iterator[Row]:
    """One row for each state that a leak may be in."""
    whole: dict[str, Change] = {
        "float32": degraded(), "bfloat16": degraded("bfloat16"), "int8": degraded("int8"),
        "int4": degraded("int4"), "noise of 10%": degraded(noise=0.1),
        "noise of 20%": degraded(noise=0.2), "noise of 10%, stated": stated(0.1),
        "noise of 20%, stated": stated(0.2),
    }  # fmt: skip
    missing: dict[str, Change] = {
        "every second position": leaving_out(2),
        "two of three positions": leaving_out(3, kept=False),
        "every second position, int4": leaving_out(2, degraded("int4")),
        "every second position, noise of 10%": leaving_out(2, degraded(noise=0.1)),
    }
    for name, change in (whole | missing).items():
        if leaks is None or name in leaks:
            few = ids[:partial] if name in missing else ids
            search = replace(attack, rounds=min(attack.rounds, 4)) if name in missing else attack
            yield measure(f"{loaded.name}, {name}", loaded, few, change, search)


def stated(noise: float) -> Change:
    """Noise whose strength the attacker is told."""
    add = degraded(noise=noise)

    def change(leak: Leak) -> Leak:
        return replace(add(leak), noise=noise * float(leak.tensors["values"].std()))

    return change


def leaving_out(step: int, first: Change | None = None, kept: bool = True) -> Change:
    """Only every so many positions leak; or, if they are not `kept`, only the others."""

    def change(leak: Leak) -> Leak:
        values = (first(leak) if first else leak).tensors["values"]
        rows = (torch.arange(len(values)) % step == 0) == kept
        return replace(leak, values=values.where(rows[:, None], torch.nan))

    return change


@dataclass
class Marked:
    """How many tokens have a mark, and how many of those are right."""

    tokens: int = 0
    right: int = 0

    @property
    def wrong(self) -> int:
        return self.tokens - self.right

    @property
    def share(self) -> str:
        return f"{self.right / self.tokens:.2%} of {self.tokens:,} right" if self.tokens else "none"


def measure(
    what: str, loaded: Loaded, ids: list[Tensor], change: Change, attack: EncoderStates
) -> Row:
    """All layers in turn: text k leaks from layer k mod L."""
    started = time.perf_counter()
    target, layers = Target.of(loaded.model, loaded.tokenizer), anatomy(loaded.model).layers
    marked = {mark: Marked() for mark in Mark}
    exact = 0
    for layer in range(1, layers + 1):
        chosen = ids[layer - 1 :: layers]
        leaks = [
            subjects.leak_of(loaded, text, Exposure("hidden", layer), change) for text in chosen
        ]
        recoveries = recover_texts(loaded.model, loaded.tokenizer, leaks, method=attack)
        for text, recovery in zip(chosen, recoveries, strict=True):
            count(target, text, recovery, marked)
            exact += recovery.verified
    verified, likely, unknown = (marked[mark] for mark in Mark)
    met = verified.wrong == 0 and likely.right >= 0.9 * likely.tokens
    seconds = (time.perf_counter() - started) / len(ids)
    measured = f"likely: {likely.share}; verified: {verified.tokens:,}, {verified.wrong} wrong"
    details = f"unknown: {unknown.share}; {exact} texts verified; {seconds:.2f} s a text"
    what = f"{what}, {len(ids)} texts of layers 1 to {layers}"
    return Row(what, measured, "likely >= 90%, verified 0 wrong", met, details)


def count(target: Target, text: Tensor, recovery: TextRecovery, marked: dict[Mark, Marked]) -> None:
    """Add up the marks of one text, its frame left out."""
    known = target.framed(len(text)).cpu()
    tokens = zip(recovery.marks, recovery.ids, text.tolist(), known.tolist(), strict=True)
    for mark, id_, true, framed in tokens:
        if framed != true:
            marked[mark].tokens += 1
            marked[mark].right += id_ == true


if __name__ == "__main__":
    show.main(run)
