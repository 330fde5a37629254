"""Text from an encoder's hidden states: how much comes back, verified, at what cost.

The full run takes all-MiniLM-L6-v2, SST-2 and DREAM (subjects.py: `--encoder`, `--data`), and an
ALBERT that reads reactions (`--reactions`): hours on two cores. `--layers 3,6`, `--parts
exact,long,time,precision,partial,false,reactions`, `--texts`, `--dialogues` (0 leaves them out),
`--degraded` (texts for each precision) and `--leaks` (corrupted ones, from number `--start` on)
shorten it. `--quick` takes a random-weight model instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import show
import subjects
from keyhole.models import Exposure, Loaded, anatomy, capture
from keyhole.recover import EncoderStates
from keyhole.recover.leaks import Leak
from mismatches import Subject, false_claims
from outcomes import recover
from show import Row
from subjects import Change

PARTS = ["exact", "long", "time", "precision", "partial", "false", "reactions"]
OF_SENTENCES = ("time", "precision", "partial", "false")  # parts that take texts of SST-2 alone
# Of 20 leaks so many are of each exposure.
MISMATCHED = {"hidden:1": 3, "hidden:2": 2, "hidden:3": 4, "hidden:4": 2, "hidden:6": 4, "kv:1": 3,
              "kv:3": 1, "maps:1": 1}  # fmt: skip


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    reactions: Path | None = None,
    texts: int = 100,
    dialogues: int = 20,
    degraded: int = 100,
    partial: int = 20,
    timed: int = 3,
    leaks: int = 1000,
    start: int = 0,
    layers: list[int] = [1, 2, 3, 4, 5, 6],  # noqa: B006 - read, never changed
    parts: list[str] = PARTS,
) -> Iterator[Row]:
    if quick:
        yield from small()
        return
    loaded = subjects.minilm(encoder, device)
    short = subjects.encoded(loaded, subjects.sst2(data, texts))
    long = subjects.encoded(loaded, subjects.dialogues(data, dialogues))
    wanted = [part for part in parts if short or part not in OF_SENTENCES]
    named = {"SST-2": short, "DREAM, 100+ tokens": long}
    for layer in layers:
        for name, ids in named.items():
            if "exact" in wanted and ids:
                yield from exact(loaded, name, ids, layer)
        if "long" in wanted and layer == 6 and long:
            yield from in_stages(loaded, long, 6)
        if "time" in wanted:
            middle = sorted(short, key=len)[len(short) // 2 :][:timed]
            yield from against_lbfgs(loaded, middle, layer)
    for layer in [layer for layer in layers if layer in (3, 6)]:
        if "precision" in wanted:
            few = short[:degraded]
            yield from precisions(loaded, few, layer)
            yield from breaking(loaded, few[: -(-len(few) // 3)], layer)
        if "partial" in wanted:
            yield from partly(loaded, short[:partial], layer)
    if "false" in wanted:
        yield from false_claims(Subject.of(loaded, short), plan(leaks, start))
    if "reactions" in wanted:
        yield from of_reactions(subjects.rxnmapper(reactions, device))


def plan(count: int, start: int) -> list[tuple[Exposure, range]]:
    shares = {Exposure.parse(name): share for name, share in MISMATCHED.items()}
    first = {exposure: start * share // 20 for exposure, share in shares.items()}
    sizes = {exposure: -(-count * share // 20) for exposure, share in shares.items()}
    return [(share, range(first[share], first[share] + sizes[share])) for share in shares]


def small() -> Iterator[Row]:
    """The same code on a random-weight model of a few thousand parameters."""
    loaded = subjects.tiny("bert")
    ids = subjects.tiny_texts(12, 8, framed=True)
    for layer in (1, 2):
        yield from exact(loaded, "random texts", ids, layer)
    yield from in_stages(loaded, ids[:4], 2)
    yield from against_lbfgs(loaded, ids[:1], 2, iterations=20)
    yield from precisions(loaded, ids[:2], 2)
    yield from partly(loaded, ids[:2], 2)
    mismatched = [(Exposure("hidden", 1), range(9)), (Exposure("maps", 1), range(2))]
    yield from false_claims(Subject.of(loaded, ids), mismatched)


def of_reactions(loaded: Loaded) -> Iterator[Row]:
    """ALBERT, which runs one block twelve times, on a reaction in SMILES."""
    ids = subjects.encoded(loaded, [subjects.REACTION])
    for layer in (1, 6, 12):
        got = recover(loaded, ids, layer)
        what = f"rxnmapper, layer {layer}, a reaction of {len(ids[0])} tokens"
        yield Row(what, got.summary, details=got.cost)


def exact(loaded: Loaded, name: str, ids: list[Tensor], layer: int) -> Iterator[Row]:
    got = recover(loaded, ids, layer)
    what = f"layer {layer}, {name}, {len(ids)} texts"
    met = got.tokens >= 0.995 and got.exact >= 0.98
    yield Row(f"{what}: recovered", got.summary, ">= 99.5%, >= 98%", met, got.cost)
    bound = 30 if layer <= 3 else 100
    yield Row(f"{what}: median passes", f"{got.passes:.0f}", f"<= {bound}", got.passes <= bound)


def in_stages(loaded: Loaded, ids: list[Tensor], layer: int) -> Iterator[Row]:
    """Long texts by one search from end to end, and by stages with trials between them."""
    whole = EncoderStates(rounds=EncoderStates().opening, trials=0)
    for name, method in {"one search": whole, "in stages": EncoderStates()}.items():
        got = recover(loaded, ids, layer, method=method)
        exactly = round(got.exact * len(ids))
        what = f"layer {layer}, {len(ids)} long texts, {name}: exact and verified"
        measured = f"{exactly} of {len(ids)}, {got.tokens:.2%} of tokens"
        target, met = (">= 90%", got.exact >= 0.9) if method is not whole else ("", None)
        details = f"falsely verified: {got.false}; {got.cost}"
        yield Row(what, measured, target, met, details)


def against_lbfgs(
    loaded: Loaded, ids: list[Tensor], layer: int, iterations: int = 600
) -> Iterator[Row]:
    """The same texts, one at a time, by plain L-BFGS decoded at the end."""
    recover(loaded, ids[:1], layer)  # the map is fitted
    ours = [recover(loaded, [text], layer) for text in ids]
    theirs, right = 0.0, 0
    for text in ids:
        leak = subjects.leak_of(loaded, text, Exposure("hidden", layer)).tensors["values"]
        started = time.perf_counter()
        decoded = plain_lbfgs(loaded, leak, layer, iterations).cpu()
        theirs += time.perf_counter() - started
        right += int((decoded == text).sum())
    spent = sum(outcome.seconds for outcome in ours)
    total = sum(len(text) for text in ids)
    ratio = theirs / spent
    what = f"layer {layer}, {len(ids)} texts, {total} tokens: {iterations} L-BFGS iterations / ours"
    measured = f"{theirs:.1f} s / {spent:.2f} s = {ratio:.0f}"
    exactly = (
        sum(outcome.tokens * len(text) for outcome, text in zip(ours, ids, strict=True)) / total
    )
    details = f"tokens right: {right / total:.0%} / {exactly:.0%}"
    if iterations < 600:  # the quick mode's handful says nothing about the ratio
        yield Row(what, measured, details=details)
    else:
        yield Row(what, measured, ">= 10", ratio >= 10, details, promise=False)


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
        "bfloat16": subjects.degraded("bfloat16"), "int8 per token": subjects.degraded("int8"),
        "noise of 1%": subjects.degraded(noise=0.01), "noise of 10%": subjects.degraded(noise=0.1),
    }  # fmt: skip
    for name, change in asked.items():
        got = recover(loaded, ids, layer, change)
        what = f"layer {layer}, {name}, {len(ids)} texts"
        details = f"{got.cost}; falsely verified: {got.false}"
        yield Row(what, got.summary, ">= 99% of tokens", got.tokens >= 0.99, details)
        early = got.searched <= exactly + 2
        measured = f"{got.searched:.0f} passes, exact leak {exactly:.0f}"
        yield Row(f"{what}: the search ends", measured, "as early as exact (+ 2)", early)


def breaking(loaded: Loaded, ids: list[Tensor], layer: int) -> Iterator[Row]:
    """Beyond what is asked, up to where it breaks."""
    changes = {
        "int4 per token": subjects.degraded("int4"), "noise of 20%": subjects.degraded(noise=0.2),
        "noise of 40%": subjects.degraded(noise=0.4), "noise of 80%": subjects.degraded(noise=0.8),
    }  # fmt: skip
    for name, change in changes.items():
        got = recover(loaded, ids, layer, change)
        details = f"{got.cost}; falsely verified: {got.false}"
        yield Row(f"layer {layer}, {name}, {len(ids)} texts", got.summary, details=details)


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
        yield Row(f"layer {layer}, {name} leaked, {len(ids)} texts", got.summary, details=details)


if __name__ == "__main__":
    show.main(run)
