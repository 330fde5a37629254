"""A training loop with a defence: AdamW, linear warm-up and decay, and resumption.

Everything random in an epoch (the order of the examples, dropout, the defence's draws)
depends only on the seed and the epoch, and the learning rate only on the step. So a run
that resumes from the end of an epoch ends with exactly the weights of an uninterrupted
run.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from keyhole.core import FORMAT, Result, dump, read
from keyhole.core.errors import InputError, expect_count, expect_number, first_line
from keyhole.core.files import unwritable
from keyhole.core.journal import digest, expect_same_run
from keyhole.core.progress import Progress, silent
from keyhole.core.result import typed
from keyhole.data import Example, encode
from keyhole.harden.defences.combined import current
from keyhole.harden.defences.defence import SPECIAL, Batch, Defence
from keyhole.models.anatomy import fitting
from keyhole.models.loading import identity


@dataclass(frozen=True, repr=False)
class Training(Result):
    """The cost of a run. `losses` has the mean of each epoch, also of those before a resumption.

    `seconds` counts this call only. `peak` is memory in bytes: of tensors on a GPU, or
    of the whole process on a CPU (0 if the system does not report it). `reason` says
    why the run ended early, or is empty.
    """

    steps: int
    seconds: float
    peak: int
    losses: tuple[float, ...]
    resumed: int = 0
    reason: str = ""

    kind: ClassVar[str] = "training"

    def summary(self) -> str:
        resumed = f", {self.resumed} epochs of them earlier" if self.resumed else ""
        end = self.reason or (
            f"loss {self.losses[-1]:.3f}" if self.losses else "no epoch was completed"
        )
        return f"{self.steps} steps in {self.seconds:.1f} s{resumed}; {end}"


def train(
    model: nn.Module,
    tokenizer: Any,
    examples: Sequence[Example],
    defence: Defence,
    *,
    epochs: int = 3,
    rate: float = 2e-5,
    batch: int = 32,
    seed: int = 0,
    device: str | torch.device = "cpu",
    amp: bool = False,
    max_length: int | None = 128,
    warmup: float = 0.06,
    decay: float = 0.01,
    pool: int = 1,
    checkpoint: str | Path | None = None,
    progress: Progress = silent,
) -> Training:
    """Train `model` in place with a defence; it is in eval mode afterwards.

    `amp` runs the passes in bfloat16 where autocast allows. `pool` is the number of
    batches whose texts are sorted by length together: more is faster, because there is
    less padding, but less random. `progress` is called after every step.
    """
    run = Run(
        identity(model, head=True),
        digest([asdict(example) for example in examples]),
        repr(defence),
        epochs,
        rate,
        batch,
        seed,
        len(examples),
        max_length,
        warmup,
        decay,
        amp,
        pool,
    )
    for name in ("epochs", "batch", "examples", "pool"):
        expect_count(name, getattr(run, name))
    expect_number("rate", rate, above=0)
    # Texts are cut to what the model can take; checkpoints hold the length that was
    # asked for.
    limited = replace(run, max_length=fitting(model, tokenizer, max_length))
    device = torch.device(device)
    model.to(device).requires_grad_(True)
    state = State(model, _optimizer(model, run))
    folder = None if checkpoint is None else Path(checkpoint)
    resumed = 0 if folder is None else resume(folder, run, state, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    reason = ""
    for epoch in range(resumed, epochs):
        model.train()
        batches = _batches(tokenizer, examples, limited, epoch, device)
        reason = _epoch(state, defence, run, epoch, batches, progress)
        if reason:
            break
        if folder is not None:
            save(folder, run, state, epoch + 1)
    model.eval()
    seconds = time.perf_counter() - started
    return Training(
        state.step, seconds, _peak(device), tuple(state.losses), resumed, reason
    )


def _epoch(
    state: State,
    defence: Defence,
    run: Run,
    epoch: int,
    batches: Iterator[tuple[Batch, Tensor]],
    progress: Progress,
) -> str:
    """Train for one epoch. Return the reason if it ended early, otherwise ""."""
    stream = _stream(run.seed, epoch, "defence")
    steps = run.epochs * math.ceil(run.examples / run.batch)
    losses: list[float] = []
    for inputs, labels in batches:
        for group in state.optimizer.param_groups:
            group["lr"] = run.rate * _schedule(state.step, steps, run.warmup)
        state.optimizer.zero_grad()
        # A defence may begin after a share of the steps.
        now = current(defence, state.step / steps)
        loss = _backward(state.model, now, inputs, labels, stream, run.amp)
        if not math.isfinite(loss):
            return f"the loss is {loss} at step {state.step + 1}: try a smaller rate"
        nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        state.step += 1
        losses.append(loss)
        progress(state.step, steps, f"epoch {epoch + 1}, loss {loss:.3f}")
    state.losses.append(sum(losses) / len(losses))
    return ""


def _backward(
    model: nn.Module,
    defence: Defence,
    batch: Batch,
    labels: Tensor,
    stream: torch.Generator,
    amp: bool,
) -> float:
    """Accumulate the gradients of the defence's losses, one by one, and return their sum."""
    losses = defence.losses(model, batch, labels, stream)
    total = torch.zeros((), device=labels.device)
    while True:
        with torch.autocast(labels.device.type, torch.bfloat16, enabled=amp):
            loss = next(losses, None)
        if loss is None:
            return float(total)
        loss.backward()
        total += loss.detach()


def _batches(
    tokenizer: Any,
    examples: Sequence[Example],
    run: Run,
    epoch: int,
    device: torch.device,
) -> Iterator[tuple[Batch, Tensor]]:
    stream = _stream(run.seed, epoch, "order")
    order = torch.randperm(len(examples), generator=stream).tolist()
    shuffled = [examples[number] for number in order]
    for chosen in _batched(shuffled, run, stream):
        inputs, labels = encode(tokenizer, chosen, max_length=run.max_length)
        # Defences spare unknown tokens as they do special ones, as in S-Attend's
        # released code.
        if tokenizer.unk_token_id is not None:
            inputs[SPECIAL] |= inputs["input_ids"] == tokenizer.unk_token_id
        moved = {name: value.to(device) for name, value in inputs.items()}
        yield moved, labels.to(device)


def _batched(
    examples: list[Example],
    run: Run,
    stream: torch.Generator,
) -> Iterator[list[Example]]:
    """Split the examples into batches. With a pool, those of a batch have similar lengths."""
    size = run.batch * run.pool
    for start in range(0, len(examples), size):
        pool = examples[start : start + size]
        order = range(0, len(pool), run.batch)
        if run.pool > 1:
            pool.sort(key=lambda example: len(example.text))
            places = torch.randperm(len(order), generator=stream).tolist()
            order = [order[place] for place in places]
        yield from (pool[first : first + run.batch] for first in order)


def _optimizer(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": run.decay},
        {"params": others, "weight_decay": 0.0},  # biases and norms
    ]
    return torch.optim.AdamW(groups, lr=run.rate)


def _schedule(
    step: int,
    steps: int,
    warmup: float,
) -> float:
    """Return the factor of the rate at a step: linear warm-up, then linear decay to zero."""
    warm = max(1, round(warmup * steps))
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))


def _stream(
    seed: int,
    epoch: int,
    use: str,
) -> torch.Generator:
    """Seed each epoch and use; torch's numbers of neighbouring seeds are unrelated."""
    own = (seed * 1_000_003 + epoch) * 2 + (use == "order")
    return torch.Generator().manual_seed(own)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":  # has no module `resource`
        return 0
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


# Checkpoints: a folder `epoch-N` for the last complete epoch.
#
# It holds the weights as safetensors, the optimizer's state (which is opened with
# `weights_only`), and the run's settings, so that a run with other settings does not
# resume from it. It is written under another name and renamed when it is complete.


@dataclass(frozen=True)
class Run:
    """The settings that determine a run. A checkpoint with other settings is refused.

    `model` is the model's identity at the start, and `data` a digest of the examples.
    """

    model: str
    data: str
    defence: str
    epochs: int
    rate: float
    batch: int
    seed: int
    examples: int
    max_length: int | None
    warmup: float
    decay: float
    amp: bool
    pool: int


@dataclass
class State:
    """The state of a run, from which it can go on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list[float])
    step: int = 0


def save(
    folder: Path,
    run: Run,
    state: State,
    epochs: int,
) -> None:
    """Save a checkpoint after so many epochs, and delete the earlier ones."""
    partial = folder / f"epoch-{epochs}.partial"
    complete = folder / f"epoch-{epochs}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_model(state.model, str(partial / "weights.safetensors"))
        torch.save(state.optimizer.state_dict(), partial / "optimizer.pt")
        record = {
            "format": FORMAT,
            "run": asdict(run),
            "losses": state.losses,
            "step": state.step,
        }
        (partial / "run.json").write_text(dump(record), "utf-8")
        partial.rename(complete)
    # RuntimeError: torch.save
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise unwritable(folder, error) from error
    for old in _saved(folder)[:-1]:
        shutil.rmtree(folder / f"epoch-{old}", ignore_errors=True)


def _saved(folder: Path) -> list[int]:
    names = [path.name.removeprefix("epoch-") for path in folder.glob("epoch-*")]
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def resume(
    folder: Path,
    run: Run,
    state: State,
    device: torch.device,
) -> int:
    """Load the last complete checkpoint, and return its number of epochs."""
    saved = _saved(folder)
    if not saved:
        return 0
    place = folder / f"epoch-{saved[-1]}"
    record = read(place / "run.json")
    expect_same_run(folder, asdict(run), record.get("run"))
    if saved[-1] > run.epochs:
        raise InputError(
            f"{folder} holds {saved[-1]} epochs: more than the {run.epochs} asked for"
        )
    try:
        losses = typed(list[float], record.get("losses"), "losses")
        state.step = typed(int, record.get("step"), "step")
        load_model(state.model, str(place / "weights.safetensors"), device=str(device))
        optimizer = torch.load(
            place / "optimizer.pt", map_location=device, weights_only=True
        )
        state.optimizer.load_state_dict(optimizer)
    except Exception as error:  # torch and pickle raise many kinds for a damaged file
        raise InputError(
            f"the checkpoint {place} is damaged ({first_line(error)}): remove it to train that "
            "epoch again"
        ) from error
    state.losses = losses
    return saved[-1]
