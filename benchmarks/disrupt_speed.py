"""What batches and processes bring: the same greedy asked singly, and two workers against one.

`--model` is a fine-tuned classifier's folder, by default the classifier that ships with Keyhole,
on SST-2's dev set. `--quick` takes random weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import show
import subjects
from keyhole import disrupt
from keyhole.data import Example, encode, read_examples
from keyhole.disrupt import HackAttend, Rerank
from keyhole.models import Loaded, load_model
from keyhole.models.demo import FOLDER
from show import Row


def run(
    quick: bool,
    model: str = str(FOLDER),
    data: Path = subjects.DATA,
    examples: int = 32,
    sweep_examples: int = 400,
    batch: int = 256,
    parts: list[str] = ["singly", "processes"],  # noqa: B006 - read, never changed
    device: str = subjects.DEVICE,
) -> Iterator[Row]:
    if quick:
        loaded = subjects.tiny("bert", head="AutoModelForSequenceClassification")
        lines = subjects.random_lines(loaded, 4, 8, 8)
        texts = [Example(str(number), number % 2, line) for number, line in enumerate(lines)]
        yield from singly(loaded, texts, batch, None)
        return
    texts = read_examples(data / "sst2" / "dev.tsv")
    if "singly" in parts:
        loaded = load_model(model, task="classification", device=device)
        yield from singly(loaded, texts[:examples], batch, 10)
    if "processes" in parts:
        yield processes(model, texts[:sweep_examples])


def singly(
    loaded: Loaded, examples: list[Example], batch: int, least: float | None
) -> Iterator[Row]:
    """The released greedy, one query at a time and in batches: the same masks, less time."""
    ordered = sorted(examples, key=lambda example: len(example.text))
    seconds: list[float] = []
    found: list[list[disrupt.Outcome]] = []
    for single in (True, False):
        method = HackAttend.as_released(batch=batch, one_at_a_time=single)
        outcomes: list[disrupt.Outcome] = []
        # Once unmeasured: the first pass on a device pays for what all share.
        method(loaded.model, *encode(loaded.tokenizer, ordered[:1]))
        started = time.perf_counter()
        for start in range(0, len(ordered), 16):
            inputs, labels = encode(loaded.tokenizer, ordered[start : start + 16])
            outcomes += method(loaded.model, inputs, labels).outcomes
        seconds.append((time.perf_counter() - started) / len(ordered))
        found.append(outcomes)
    same = sum(
        (a.flipped, a.steps, a.cut) == (b.flipped, b.steps, b.cut)
        for a, b in zip(*found, strict=True)
    )
    ratio = seconds[0] / seconds[1]
    yield Row(
        f"greedy one query at a time / in batches, an example, {loaded.model.device.type}",
        f"{seconds[0]:.2f} s / {seconds[1]:.3f} s = {ratio:.1f}",
        f">= {least}" if least else "",
        ratio >= least if least else None,
        promise=False,
    )
    yield Row("  the same masks", f"{same} of {len(ordered)}", "all", same == len(ordered))


def processes(model: str, examples: list[Example]) -> Row:
    """Examples a second of two workers against one, each with one thread.

    Over the second half of the examples: by then every worker has started and loaded its model.
    """
    rates: list[float] = []
    method = HackAttend(schedule=Rerank(refine=0, prefixes=4))
    source = disrupt.ModelSource(model)
    for workers in (1, 2):
        stamps: list[tuple[float, int]] = []
        disrupt.sweep(
            method, source, examples, workers=workers, batch_size=4,
            progress=lambda done, *_, stamps=stamps: stamps.append((time.perf_counter(), done)),
        )  # fmt: skip
        half = [stamp for stamp in stamps if stamp[1] >= len(examples) // 2]
        (first, before), (last, after) = half[0], half[-1]
        rates.append((after - before) / (last - first))
    ratio = rates[1] / rates[0]
    measured = f"{rates[1]:.2f} / {rates[0]:.2f} examples a second = {ratio:.2f}"
    return Row("two processes / one", measured, ">= 1.7", ratio >= 1.7, promise=False)


if __name__ == "__main__":
    show.main(run)
