"""S-Attend trained as in its released program (docs/papers.md), then attacked as in tasks.py.

MiniLM (`--encoder`) is trained on all of SST-2 with `--methods` (`plain` and
`sattend-token:RATE`): AdamW without decay or clipping, in float16 on a GPU, with the
released grid of rates and warm-ups, or only with `--rate` and `--warmup`. The best
epoch on the dev set is kept, and its first right answers are attacked. For other
defences see `tasks.py --tasks sst2`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

import show
import trained
from keyhole.data import encode
from keyhole.harden import Training
from keyhole.models import Loaded
from show import Row
from trained import Options, Run, Task, Tiny

TOKENS = "sattend-token:"
# run_sattend.py and its sweep
RATES = (2e-5, 3e-5, 1e-5)
WARMUPS = (0.06, 0.1)
RELEASED = Options(
    methods=["plain", *(f"{TOKENS}{rate}" for rate in (0.1, 0.2, 0.5))],
    seeds=[0, 1, 2],
    attacks=["random", "as-released", "strongest"],
    right=100,
    warmup=0.06,
)


def run(quick: bool, options: Options = RELEASED) -> Iterator[Row]:
    if options.join:
        yield from trained.table(trained.joined(options.join))
        return
    if wrong := [
        each for each in options.methods if not each.startswith(("plain", TOKENS))
    ]:
        raise SystemExit(
            f"--methods takes plain and {TOKENS}RATE only, not {', '.join(wrong)}"
        )
    if quick:
        options = Tiny(
            methods=["plain", f"{TOKENS}0.2"],
            examples=40,
            epochs=1,
            batch=16,
            rate=3e-3,
            dev=8,
            right=2,
            share=0.03,
            attacks=["random", "as-released"],
        )
    task = Task("sst2, as released", *options.sst2(), 4, 32, RATES[0]).given(options)
    for method, seed in options.trainings:
        loaded = options.fresh(seed)
        known = best_of_grid(loaded, task, method, seed, options)
        yield trained.attack(loaded, task, known, options)


def best_of_grid(
    loaded: Loaded, task: Task, method: str, seed: int, options: Options
) -> Run:
    """Train with each point of the grid, and leave the best epoch on dev in `loaded`."""
    settings = {"examples": len(task.train), "epochs": task.epochs, "batch": task.batch}
    kept: Run = {
        "what": task.name,
        "method": method,
        "seed": seed,
        "settings": settings,
    }
    kept["attacks"] = {}
    start = copy.deepcopy(loaded.model.state_dict())
    best = -1.0
    batches = task.batches(loaded, options, task.dev)
    if options.rate:
        points = [(options.rate, options.warmup)]
    else:
        points = product(RATES, WARMUPS)
    state = start
    for rate, warmup in points:
        loaded.model.load_state_dict(start)
        curve: list[float] = []
        for done in epochs(
            loaded, replace(task, rate=rate), method, seed, warmup, options.device
        ):
            curve.append(batches.accuracy())
            trained.log(
                f"{method}, seed {seed}, {rate:g}, {warmup:g}: {curve[-1]:.1%}; {done}"
            )
            if curve[-1] > best:
                best = curve[-1]
                state = copy.deepcopy(loaded.model.state_dict())
                kept |= {"training": done.to_dict(), "curve": list(curve)}
                kept["settings"] |= {
                    "rate": rate,
                    "warmup": warmup,
                    "share": options.share,
                }
    loaded.model.load_state_dict(state)
    loaded.model.requires_grad_(False)
    return kept


def epochs(
    loaded: Loaded, task: Task, method: str, seed: int, warmup: float, device: str
) -> Iterator[Training]:
    """Train, and yield after each epoch; keys are dropped in the attention mask, as published."""
    model = loaded.model
    started = time.perf_counter()
    on_gpu = device.startswith("cuda")
    model.to(device).requires_grad_(True)
    optimizer = torch.optim.AdamW(
        model.parameters(), task.rate, weight_decay=0.0, fused=on_gpu
    )
    scaler = torch.amp.GradScaler(enabled=on_gpu)
    steps = task.epochs * math.ceil(len(task.train) / task.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            step / (warmup * steps), (steps - step) / ((1 - warmup) * steps)
        ),
    )
    dropped = 0.0 if method == "plain" else float(method.removeprefix(TOKENS))
    inputs, labels = encode(loaded.tokenizer, task.train)
    lengths = inputs["attention_mask"].sum(1)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    spared = inputs.pop("special_tokens_mask").bool()  # no [UNK] in SST-2
    labels = labels.to(device)
    torch.manual_seed(seed)
    losses = list[float]()
    for epoch in range(task.epochs):
        model.train()
        total = torch.zeros((), device=device)
        order = torch.randperm(len(task.train)).split(task.batch)
        for chosen in order:
            width = int(lengths[chosen].max())
            numbers = chosen.to(device)
            given = {name: value[numbers, :width] for name, value in inputs.items()}
            if dropped:
                drawn = (
                    torch.rand(given["attention_mask"].shape, device=device) < dropped
                )
                given["attention_mask"] *= spared[numbers, :width] | ~drawn
            with torch.autocast(torch.device(device).type, torch.float16, on_gpu):
                loss = model(**given, labels=labels[numbers]).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            total += loss.detach()
        model.eval()
        losses.append(float(total) / len(order))
        yield Training(
            (epoch + 1) * len(order),
            time.perf_counter() - started,
            torch.cuda.max_memory_allocated(device) if on_gpu else 0,
            tuple(losses),
        )


if __name__ == "__main__":
    show.main(run)
