"""Flips by cutting attention: as released, stronger, and at random, exactly counted.

The full run attacks a fine-tuned classifier (`--model`, a folder; without it the classifier in the
box, for which no figure is promised) on SST-2's dev set, with `--task hellaswag` or `--task dream`
a multiple-choice model, with `--task next-token` a causal one (`--model` may be a .gguf file).

`--batch-size` examples are attacked in one call, `--batch` masked ones go through the model in one
pass, in `--workers` processes (0: this one). `--only` takes rows by a part of their names,
`--resume FOLDER` remembers finished examples. `--quick` takes random weights instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

import show
import subjects
import trained
from keyhole import disrupt
from keyhole.data import read_examples
from keyhole.disrupt import HackAttend
from keyhole.models.demo import FOLDER
from show import Row

TASKS = {
    "sst2": ("sst2/dev.tsv", "classification"),
    "hellaswag": ("hellaswag/dev.jsonl", "choice"),
    "dream": ("dream/dev.json", "choice"),
    "next-token": ("sst2/dev.tsv", "causal"),
}


def run(
    quick: bool,
    model: str | None = None,
    data: Path = subjects.DATA,
    task: Literal["sst2", "hellaswag", "dream", "next-token"] = "sst2",
    examples: int | None = None,
    share: float = 0.01,
    max_length: int | None = None,
    batch: int = 64,
    batch_size: int = 16,
    only: str = "",
    workers: int = 0,
    resume: Path | None = None,
    device: str = subjects.DEVICE,
) -> Iterator[Row]:
    if quick:
        yield from on_random_weights()
        return
    if model is None and task != "sst2":
        raise SystemExit(f"--task {task} needs a model: give its folder as --model")
    file, head = TASKS[task]
    texts = read_examples(data / file, limit=examples)
    source = disrupt.ModelSource(model or str(FOLDER), head, device, max_length=max_length)
    if resume:
        resume.mkdir(parents=True, exist_ok=True)
    for name, method in attacks(share, batch).items():
        if only not in name:
            continue

        def progress(done: int, total: int | None = None, note: str = "", name: str = name) -> None:
            print(f"\r{name}: {done}/{total} {note}", end="", file=sys.stderr)

        started = time.perf_counter()
        found = disrupt.sweep(
            method, source, texts, workers=workers, batch_size=batch_size, progress=progress,
            resume=resume and resume / f"{task} {name}.jsonl".replace(" ", "-"),
        )  # fmt: skip
        promised = task == "sst2" and model is not None
        yield row(name, found, time.perf_counter() - started, promised)


def attacks(share: float, batch: int) -> dict[str, HackAttend]:
    per, model = f"{share:.0%} of each head", f"{share:.0%} of the model"
    return {
        f"as released, {per}": HackAttend.as_released(share, batch=batch),
        f"as released, half scale, {per}": HackAttend.as_released(share, "half", batch=batch),
        f"attention score, {per}": HackAttend.as_released(share, ranking="attention", batch=batch),
        f"random, {per}": HackAttend.random(share, batch=batch),
        f"stronger, {per}": HackAttend.strongest(share, batch=batch),
        f"stronger, {model}": HackAttend.strongest(share, "model", batch=batch),
        **{
            f"stronger, {scope}, sparing {words}": HackAttend.strongest(
                share, "model" if scope == model else "head", spare=spare, batch=batch
            )
            for scope in (per, model)
            for spare, words in (("special keys", "special keys only"), ("padding", "padding only"))
        },
    }


TARGETS = {"random": ("<= 2%", lambda rate: rate <= 0.02),
           "stronger, 1% of each head": (">= 75%", lambda rate: rate >= 0.75),
           "stronger, 1% of the model": (">= 98%", lambda rate: rate >= 0.98),
           "stronger, 1% of the model, sparing padding only": (
               ">= 98%", lambda rate: rate >= 0.98)}  # fmt: skip


def row(name: str, found: disrupt.Disruption, seconds: float, promised: bool) -> Row:
    worst = max((outcome.worst_head for outcome in found.attacked), default=0.0)
    most = max((outcome.share for outcome in found.attacked), default=0.0)
    details = (
        f"{found.flips} of {len(found.attacked)} right ({found.skipped} skipped); flips took "
        f"{found.share:.2%} of all units; most {most:.2%} of all, {worst:.2%} of a head; "
        f"{found.queries:.0f} queries, {seconds / max(1, len(found.attacked)):.2f} s an example; "
        f"k = 0 changed {found.control.change:g}"
    )
    target = TARGETS.get(name, TARGETS.get(name.split(",")[0])) if promised else None
    goal, met = target if target else ("", None)
    row = Row(name, f"{found.success:.1%}", goal, met and met(found.success), details)
    return show.itemised(row, [
        {"id": each.id, "right": each.right, "flipped": each.flipped, "masked": each.masked,
         "units": each.units, "queries": each.queries} for each in found.outcomes
    ])  # fmt: skip


def on_random_weights() -> Iterator[Row]:
    """A random-weight BERT: nothing to be proud of flips, but every row is made."""
    model = subjects.tiny("bert", head="AutoModelForSequenceClassification").model
    ids = torch.stack(subjects.tiny_texts(2, 14, framed=True))
    labels = model(input_ids=ids).logits.argmax(-1)
    for name, method in attacks(0.01, 32).items():
        started = time.perf_counter()
        found = trained.shortened(method)(model, {"input_ids": ids}, labels)
        yield row(name, found, time.perf_counter() - started, promised=False)


if __name__ == "__main__":
    show.main(run)
