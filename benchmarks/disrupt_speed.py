"""What batches bring: the released greedy, one query at a time and in batches, the same masks.

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
from keyhole.disrupt import HackAttend
from keyhole.models import Loaded, load_model
from keyhole.models.demo import FOLDER
from show import Row


def run(
    quick: bool,
    model: str = str(FOLDER),
    data: Path = subjects.DATA,
    examples: int = 32,
    batch: int = 256,
    device: str = subjects.DEVICE,
) -> Iterator[Row]:
    if quick:
        loaded = subjects.tiny("bert", head="AutoModelForSequenceClassification")
        lines = subjects.random_lines(loaded, 4, 8, 8)
        texts = [Example(str(number), number % 2, line) for number, line in enumerate(lines)]
        yield from singly(loaded, texts, batch, None)
        return
    loaded = load_model(model, task="classification", device=device)
    texts = read_examples(data / "sst2" / "dev.tsv", limit=examples)
    yield from singly(loaded, texts, batch, 10)


def singly(
    loaded: Loaded, examples: list[Example], batch: int, least: float | None
) -> Iterator[Row]:
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
    row = show.ratio(
        f"greedy one query at a time / in batches, an example, {loaded.model.device.type}",
        f"{seconds[0]:.2f} s / {seconds[1]:.3f} s = {ratio:.1f}",
        f">= {least}",
        ratio >= least if least else None,
    )
    yield show.itemised(row, [
        {"flipped": a.flipped, "queries": a.queries, "same": (a.steps, a.cut) == (b.steps, b.cut)}
        for a, b in zip(*found, strict=True)
    ])  # fmt: skip
    yield show.every("  the same masks", same, len(ordered))


if __name__ == "__main__":
    show.main(run)
