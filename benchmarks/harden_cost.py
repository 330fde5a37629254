"""What training with S-Attend and the other defences costs: time and memory against plain training.

A BERT of MiniLM's size with random weights: cost does not depend on what it has learnt. Time is the
median of whole steps (passes, optimizer), of all methods in turn. Memory, measured on a GPU alone,
is the peak of what one step adds to the weights and the optimizer's state. Plain training runs with
the model's fastest attention (SDPA).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import show
from keyhole.harden import ASA, R3F, SMART, AttackMasks, Defence, FreeLB, Plain, SAttend
from show import Row

SATTEND: dict[str, Defence] = {
    "S-Attend, unit": SAttend(0.2, "unit"),
    "S-Attend, token": SAttend(0.2, "token"),
}
OTHERS: dict[str, Defence] = {
    "FreeLB, 3 steps": FreeLB(),
    "SMART": SMART(),
    "R3F": R3F(),
    "ASA": ASA(),
    "attack masks": AttackMasks(),
}


def run(
    quick: bool,
    device: str = "cpu",
    amp: bool = False,
    layers: int = 6,
    width: int = 384,
    heads: int = 12,
    repeats: int = 5,
    batches: list[int] = [8, 32],  # noqa: B006 - read, never changed
    lengths: list[int] = [32, 128],  # noqa: B006
) -> Iterator[Row]:
    if quick:
        layers, width, heads, repeats, batches, lengths = 1, 24, 2, 1, [4], [16]
    for batch in batches:
        for length in lengths:
            # The others once: their cost is in passes, and passes are what S-Attend's rows show.
            others = OTHERS if (batch, length) == (batches[-1], lengths[0]) else {}
            bench = Bench(classifier(layers, width, heads), batch, length, device, amp)
            methods = {"plain": Plain(), **SATTEND, **others}
            yield from compare(bench, methods, repeats, f"batch {batch}, length {length}")


def compare(bench: Bench, methods: dict[str, Defence], repeats: int, size: str) -> Iterator[Row]:
    for method in methods.values():  # the first step allocates what later ones reuse
        bench.step(method)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            seconds[name].append(bench.step(method))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    measured = {name: f"{took * 1e3:.0f} ms" for name, took in medians.items()}
    details = {name: f"time × {took / medians['plain']:.2f}" for name, took in medians.items()}
    if bench.device.type == "cuda":
        memory = {name: bench.memory(method) for name, method in methods.items()}
        for name, taken in memory.items():
            measured[name] += f", {taken / 2**20:.1f} MiB"
            details[name] += f", memory × {taken / memory['plain']:.2f}"
    for name in methods:
        yield Row(f"{name}, {size}", measured[name], details=details[name])


class Bench:
    """One model, one batch, steps of training on it."""

    def __init__(self, model: Any, batch: int, length: int, device: str, amp: bool) -> None:
        self.device, self.amp = torch.device(device), amp
        self.model = model.to(self.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-5)
        self.stream = torch.Generator().manual_seed(0)
        ids = torch.randint(5, 1000, (batch, length), generator=self.stream)
        special = torch.zeros_like(ids)
        special[:, 0] = special[:, -1] = 1
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        made["special_tokens_mask"] = special
        self.batch = {name: value.to(self.device) for name, value in made.items()}
        self.labels = torch.randint(2, (batch,), generator=self.stream).to(self.device)

    def step(self, method: Defence) -> float:
        self._wait()
        started = time.perf_counter()
        self.optimizer.zero_grad()
        losses = method.losses(self.model, self.batch, self.labels, self.stream)
        while True:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
                loss = next(losses, None)
            if loss is None:
                break
            loss.backward()
        self.optimizer.step()
        self._wait()
        return time.perf_counter() - started

    def memory(self, method: Defence) -> int:
        self._wait()
        self.optimizer.zero_grad()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step(method)
        return torch.cuda.max_memory_allocated(self.device) - before

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def classifier(layers: int, width: int, heads: int) -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, intermediate_size=4 * width, num_labels=2,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


if __name__ == "__main__":
    show.main(run)
