"""Text from what a model exposes of one input: how much comes back, verified, at what cost.

The full run takes all-MiniLM-L6-v2, SmolLM2-135M-Instruct, SST-2 and DREAM (subjects.py:
`--encoder`, `--model`, `--data`): hours on two cores.
`--parts` takes some of it:

    exact      hidden states of an encoder, layer by layer (`--layers`), short and long texts
    long       long texts by one search from end to end, and by stages
    time       against plain L-BFGS
    precision  hidden states rounded, noisy, and up to where it breaks
    partial    every second position, and [CLS] alone
    rows       hidden states without their length, order, neighbours or full width
    maps, attention, pooled    attention maps, attention outputs, the mean of the last layer
    decoder, keys    hidden states and KV cache of a decoder (`--exposures`), an encoder's keys

`--texts` sentences are read; of what is slow, or only reported, `--few`. `--quick` takes
random-weight models instead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import show
import subjects
from keyhole import invert
from keyhole.models import Exposure, Loaded, anatomy, capture
from keyhole.recover import (
    EncoderMaps,
    EncoderStates,
    Mark,
    PooledEmbedding,
    SubLayerOutput,
    TokenSearch,
)
from keyhole.recover.attack import Attack
from keyhole.recover.leaks import Leak
from show import Row
from subjects import Change, degraded

PARTS = ["exact", "long", "time", "precision", "partial", "rows", "maps", "attention",
         "pooled", "decoder", "keys"]  # fmt: skip
DECODER = ["hidden:1", "hidden:8", "hidden:15", "hidden:30", "kv:0", "kv:15"]
FEW = {"time": 3, "partial": 20, "rows": 20, "maps": 10, "attention": 5, "pooled": 3, "decoder": 10}


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    model: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 100,
    dialogues: int = 20,
    few: int | None = None,
    layers: list[int] = [1, 2, 3, 4, 5, 6],  # noqa: B006 - read, never changed
    exposures: list[str] = DECODER,
    parts: list[str] = PARTS,
) -> Iterator[Row]:
    if quick:
        yield from small()
        return
    count = {name: number if few is None else few for name, number in FEW.items()}
    if set(parts) - {"decoder"}:
        loaded = subjects.minilm(encoder, device)
        short = subjects.encoded(loaded, subjects.sst2(data, texts))
        long = subjects.encoded(loaded, subjects.dialogues(data, dialogues))
        wanted = parts if short else [part for part in parts if part in ("exact", "long")]
        for layer in layers:
            yield from of_layer(loaded, short, long, layer, wanted, count)
        if "rows" in wanted:
            yield from rows(loaded, short, count["rows"])
        if "pooled" in wanted:
            yield searched(loaded, short[: count["pooled"]], Exposure("pooled"), TokenSearch())
        if "keys" in wanted:
            yield from whole("MiniLM", loaded, "kv:1", of_length(short, 5))
    if "decoder" in parts:
        decoder = subjects.smollm2(model, device)
        ids = of_length(subjects.encoded(decoder, subjects.sst2(data)), 20)
        for name in exposures:
            yield from whole("SmolLM2", decoder, name, ids[: count["decoder"]])


def of_layer(
    loaded: Loaded, short: list[Tensor], long: list[Tensor], layer: int, parts: list[str],
    count: dict[str, int],
) -> Iterator[Row]:  # fmt: skip
    for name, ids in {"SST-2": short, "DREAM, 100+ tokens": long}.items():
        if "exact" in parts and ids:
            yield from exact(loaded, name, ids, layer)
    if "long" in parts and layer == 6 and long:
        yield from in_stages(loaded, long, 6)
    if "time" in parts:
        middle = sorted(short, key=len)[len(short) // 2 :][: count["time"]]
        yield from against_lbfgs(loaded, middle, layer)
    if "precision" in parts and layer in (3, 6):
        yield from precisions(loaded, short, layer)
        yield from breaking(loaded, short[: -(-len(short) // 3)], layer)
    if "partial" in parts and layer in (3, 6):
        yield from partly(loaded, short[: count["partial"]], layer)
    if "maps" in parts:
        yield from maps(loaded, short, layer, count["maps"], TokenSearch(), 0.99)
    if "attention" in parts:
        ids = short[: count["maps" if layer == 1 else "attention"]]
        yield searched(loaded, ids, Exposure("attention", layer), TokenSearch())


def small() -> Iterator[Row]:
    """The same code on random-weight models of a few thousand parameters."""
    loaded, ids = subjects.tiny("bert"), subjects.tiny_texts(12, 8, framed=True)
    search = TokenSearch(rounds=1, passes=20, candidates=4)
    for layer in (1, 2):
        yield from exact(loaded, "random texts", ids, layer)
    yield from in_stages(loaded, ids[:4], 2)
    yield from against_lbfgs(loaded, ids[:1], 2, iterations=20)
    yield from precisions(loaded, ids[:2], 2)
    yield from partly(loaded, ids[:2], 2)
    for layer in (1, 2):
        yield from maps(loaded, ids[:4], layer, 1, search, None)
    for name in ("attention:1", "attention:2", "pooled"):
        yield searched(loaded, ids[:1], Exposure.parse(name), search)
    for case in (
        Rows(2, ("normalised",), share=1.0), Rows(1, ("permuted",), share=0.8),
        Rows(1, ("truncated:24", "normalised"), share=0.8), Rows(1, ("subset:6",)),
    ):  # fmt: skip
        yield from of_rows(loaded, ids[:6], case)
    plain = subjects.tiny_texts(3, 8, framed=False)
    for family in ("gpt2", "llama"):
        for name in ("hidden:2", "kv:0"):
            yield from whole(f"random {family}", subjects.tiny(family), name, plain[:2])
    for form in ("normalised", "permuted"):
        yield from of_rows(subjects.tiny("llama"), plain, Rows(2, (form,), share=1.0), "llama, ")


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

    @property
    def marked(self) -> tuple[int, int]:
        """How many tokens are marked verified, and how many of those are wrong."""
        right = [
            a == b
            for truth, recovery in zip(self.truths, self.recoveries, strict=True)
            for a, b, mark in zip(truth, recovery.ids, recovery.marks, strict=False)
            if mark is Mark.VERIFIED
        ]
        return len(right), len(right) - sum(right)

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
    loaded: Loaded, ids: list[Tensor], exposure: Exposure | int, change: Change | None = None,
    method: Attack | None = None,
) -> Outcome:  # fmt: skip
    """Texts from one exposure; a number means the hidden states of that layer."""
    where = Exposure("hidden", exposure) if isinstance(exposure, int) else exposure
    leaks = [subjects.leak_of(loaded, text, where, change) for text in ids]
    started = time.perf_counter()
    recoveries = invert.recover_texts(loaded.model, loaded.tokenizer, leaks, method=method)
    seconds = (time.perf_counter() - started) / len(ids)
    return Outcome([text.tolist() for text in ids], recoveries, seconds)


# Hidden states of an encoder.


def exact(loaded: Loaded, name: str, ids: list[Tensor], layer: int) -> Iterator[Row]:
    got = recover(loaded, ids, layer)
    what = f"layer {layer}, {name}, {len(ids)} texts"
    met = got.tokens >= 0.995 and got.exact >= 0.98
    row = Row(f"{what}: recovered", got.summary, ">= 99.5%, >= 98%", met, got.cost)
    yield show.itemised(row, got.items)
    bound, passes = 30 if layer <= 3 else 100, got.median("passes")
    yield Row(f"{what}: median passes", f"{passes:.0f}", f"<= {bound}", passes <= bound)


def in_stages(loaded: Loaded, ids: list[Tensor], layer: int) -> Iterator[Row]:
    """Long texts by one search from end to end, and by stages with trials between them."""
    end_to_end = EncoderStates(rounds=EncoderStates().opening, trials=0)
    for name, method in {"one search": end_to_end, "in stages": EncoderStates()}.items():
        got = recover(loaded, ids, layer, method=method)
        what = f"layer {layer}, {len(ids)} long texts, {name}: exact and verified"
        measured = f"{round(got.exact * len(ids))} of {len(ids)}, {got.tokens:.2%} of tokens"
        target, met = (">= 90%", got.exact >= 0.9) if method is not end_to_end else ("", None)
        row = Row(what, measured, target, met, f"falsely verified: {got.false}; {got.cost}")
        yield show.itemised(row, got.items)


def against_lbfgs(
    loaded: Loaded, ids: list[Tensor], layer: int, iterations: int = 600
) -> Iterator[Row]:
    """The same texts, one at a time, by plain L-BFGS decoded at the end."""
    recover(loaded, ids[:1], layer)  # the map is fitted
    ours = [recover(loaded, [text], layer) for text in ids]
    theirs, right = 0.0, 0
    items: list[dict[str, Any]] = []
    for text, own in zip(ids, ours, strict=True):
        leak = subjects.leak_of(loaded, text, Exposure("hidden", layer)).tensors["values"]
        decoded, seconds = show.timed(lambda: plain_lbfgs(loaded, leak, layer, iterations))  # noqa: B023
        hits = int((decoded.cpu() == text).sum())
        theirs, right = theirs + seconds, right + hits
        baseline = {"baseline_seconds": seconds, "baseline_right": hits}
        items.append({**own.items[0], "seconds": own.seconds, **baseline})
    spent, total = sum(each.seconds for each in ours), sum(len(text) for text in ids)
    share = sum(each.tokens * len(text) for each, text in zip(ours, ids, strict=True)) / total
    row = show.ratio(
        f"layer {layer}, {len(ids)} texts, {total} tokens: {iterations} L-BFGS iterations / ours",
        f"{theirs:.1f} s / {spent:.2f} s = {theirs / spent:.0f}",
        ">= 10",
        None if iterations < 600 else theirs / spent >= 10,  # the quick mode's handful says nothing
        f"tokens right: {right / total:.0%} / {share:.0%}",
    )
    yield show.itemised(row, items)


def plain_lbfgs(loaded: Loaded, leak: Tensor, layer: int, iterations: int) -> Tensor:
    table = anatomy(loaded.model).table
    leak = leak.to(table)
    words = table.mean(0).expand(len(leak), -1).clone().requires_grad_()
    solver = torch.optim.LBFGS([words], max_iter=iterations, history_size=20, tolerance_grad=0,
                               tolerance_change=0, line_search_fn="strong_wolfe")  # fmt: skip

    def closure() -> Tensor:
        solver.zero_grad()
        given = capture(loaded.model, Exposure("hidden", layer), embeddings=words[None])["values"]
        loss = (given[0] - leak).square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    return torch.cdist(words.detach(), table).argmin(-1)


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


def breaking(loaded: Loaded, ids: list[Tensor], layer: int) -> Iterator[Row]:
    """Beyond what is asked, up to where it breaks."""
    noise = {f"noise of {share:.0%}": degraded(noise=share) for share in (0.2, 0.4, 0.8)}
    for name, change in {"int4 per token": degraded("int4"), **noise}.items():
        got = recover(loaded, ids, layer, change)
        details = f"{got.cost}; falsely verified: {got.false}"
        row = Row(f"layer {layer}, {name}, {len(ids)} texts", got.summary, details=details)
        yield show.itemised(row, got.items)


def partly(loaded: Loaded, ids: list[Tensor], layer: int) -> Iterator[Row]:
    def only(wanted: Callable[[Tensor], Tensor]) -> Change:
        def change(leak: Leak) -> Leak:
            values = leak.tensors["values"]
            rows = wanted(torch.arange(len(values)))
            return replace(leak, values=values.where(rows[:, None], torch.nan))

        return change

    leaked = {
        "every second position": only(lambda place: place % 2 == 0),
        "only [CLS]": only(lambda place: place == 0),
    }
    for name, change in leaked.items():
        got = recover(loaded, ids, layer, change)
        marked, wrong = got.marked
        details = f"{marked} tokens marked verified, {wrong} of them wrong; {got.cost}"
        what = f"layer {layer}, {name} leaked, {len(ids)} texts"
        yield show.itemised(Row(what, got.summary, details=details), got.items)


# Hidden states without their length, order or full width.


@dataclass(frozen=True)
class Rows:
    """What becomes of a layer's hidden states; `share` of the texts is to come back exactly."""

    layer: int
    forms: tuple[str, ...]
    precision: str = "float32"
    share: float | None = None

    @property
    def words(self) -> str:
        rounded = () if self.precision == "float32" else (self.precision,)
        return f"layer {self.layer}, {', '.join((*self.forms, *rounded))}"

    def change(self) -> Change:
        """One stream of chance for all texts. What was done to the rows is stated, except the steps
        of integers; that rows are normalised has to be seen from their numbers.
        """
        stream = torch.Generator().manual_seed(0)
        stated = self.precision if self.precision != "int8" else None

        def change(leak: Leak) -> Leak:
            done = invert.degrade(leak, self.precision, 0.0, stream, self.forms)
            return replace(done, precision=stated, normalised=None)

        return change


def rows(loaded: Loaded, ids: list[Tensor], few: int) -> Iterator[Row]:
    half = f"truncated:{anatomy(loaded.model).width // 2}"
    for case in (
        Rows(6, ("normalised",), share=0.95), Rows(3, ("permuted",), share=0.95),
        Rows(3, ("normalised",)), Rows(3, ("normalised",), "bfloat16"),
        Rows(6, ("normalised",), "bfloat16"), Rows(3, ("normalised",), "int8"),
        Rows(1, ("permuted",)), Rows(3, ("permuted",), "bfloat16"),
        Rows(3, ("normalised", "permuted")), Rows(3, (half,)), Rows(6, (half,)),
        Rows(3, (half, "normalised")), Rows(3, ("subset:16",)),
        Rows(3, ("subset:16", "permuted")),
    ):  # fmt: skip
        yield from of_rows(loaded, ids if case.share is not None else ids[:few], case)


def of_rows(loaded: Loaded, ids: list[Tensor], case: Rows, name: str = "") -> Iterator[Row]:
    got = recover(loaded, ids, case.layer, case.change())
    what = f"{name}{case.words}, {len(ids)} texts"
    target = "" if case.share is None else f">= {case.share:.0%} exact and verified"
    met = None if case.share is None else got.exact >= case.share
    yield show.itemised(Row(what, got.summary, target, met, got.cost), got.items)
    yield show.exactly(f"{what}: falsely verified", got.false, 0)


# Attention maps, attention outputs, pooled embeddings.


def maps(
    loaded: Loaded, ids: list[Tensor], layer: int, few: int, search: TokenSearch,
    least: float | None,
) -> Iterator[Row]:  # fmt: skip
    """Layer 1's are read in closed form; deeper ones have to be searched."""
    exposure = Exposure("maps", layer)
    if layer > 1:
        yield searched(loaded, ids[:few], exposure, search)
        return
    yield searched(loaded, ids, exposure, None, least=least)
    changes = {"fp16": degraded("float16"), "3 decimals": decimals(3), "2 decimals": decimals(2),
               "1 decimal": decimals(1)}  # fmt: skip
    for how, change in changes.items():
        yield searched(loaded, ids[: max(2, len(ids) // 5)], exposure, None, how, change)


def decimals(count: int) -> Change:
    def change(leak: Leak) -> Leak:
        return replace(leak, values=(leak.tensors["values"] * 10.0**count).round() / 10.0**count)

    return change


def searched(
    loaded: Loaded, ids: list[Tensor], exposure: Exposure, search: TokenSearch | None,
    how: str = "fp32", change: Change | None = None, least: float | None = None,
) -> Row:  # fmt: skip
    """Texts from an exposure by this search, or in closed form; special tokens are not counted."""
    attacks = {"maps": EncoderMaps, "attention": SubLayerOutput, "pooled": PooledEmbedding}
    attack = EncoderMaps() if search is None else attacks[exposure.kind](search)
    got = recover(loaded, ids, exposure, change, attack)
    pairs = [(each.ids, truth) for each, truth in zip(got.recoveries, got.truths, strict=True)]
    right = sum(a == b for a, b in pairs)
    tokens = sum(a == b for x, y in pairs for a, b in zip(x[1:-1], y[1:-1], strict=False))
    share = tokens / sum(len(truth) - 2 for truth in got.truths)
    verified = sum(recovery.verified for recovery in got.recoveries)
    shared = statistics.mean(subjects.f1(a[1:-1], b[1:-1]) for a, b in pairs)
    row = Row(
        f"{exposure}, {how}, {len(ids)} texts",
        f"{share:.1%} of tokens, {right} of {len(ids)} exact, {verified} verified, "
        f"token F1 {shared:.2f}",
        "" if least is None else f">= {least:.0%} of tokens",
        None if least is None else share >= least,
        f"{got.cost}; {got.false} falsely verified",
    )
    return show.itemised(row, got.items)


# Decoders and caches.


def of_length(ids: list[Tensor], min_length: int, max_length: int = 60) -> list[Tensor]:
    return [text for text in ids if min_length <= len(text) <= max_length]


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
