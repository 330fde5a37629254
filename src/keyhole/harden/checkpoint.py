"""Checkpoints of a training run: a folder `epoch-N` for the last whole epoch.

It is written under another name and renamed when it is whole: weights as safetensors, the
optimizer's state and the running means (opened with `weights_only`), and what the run was, so that
another run is not mistaken for it.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from keyhole.core import FORMAT, dump, read
from keyhole.core.errors import InputError
from keyhole.core.files import trouble
from keyhole.core.journal import expect_same_run
from keyhole.core.result import typed


@dataclass(frozen=True)
class Run:
    """What determines a run; a checkpoint of another one is refused.

    `model` is the model's identity at the start, `data` a digest of the examples.
    """

    model: str
    data: str
    defence: str
    epochs: int
    rate: float
    batch: int
    seed: int
    examples: int
    longest: int | None
    warmup: float
    decay: float
    amp: bool
    pool: int
    average: float


@dataclass
class State:
    """What grows along a run; `average` are the weights' running means, if they are kept."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: list[Tensor] | None = None
    losses: list[float] = field(default_factory=list[float])
    step: int = 0


def save(folder: Path, run: Run, state: State, epoch: int) -> None:
    partial, whole = folder / f"epoch-{epoch}.partial", folder / f"epoch-{epoch}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_model(state.model, str(partial / "weights.safetensors"))
        kept = {"optimizer": state.optimizer.state_dict(), "average": state.average}
        torch.save(kept, partial / "optimizer.pt")
        record = {"format": FORMAT, "run": asdict(run), "losses": state.losses, "step": state.step}
        (partial / "run.json").write_text(dump(record), "utf-8")
        partial.rename(whole)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save tells it as the second
        shutil.rmtree(partial, ignore_errors=True)
        raise trouble("a folder to write", folder, error) from error
    for old in _saved(folder)[:-1]:
        shutil.rmtree(folder / f"epoch-{old}", ignore_errors=True)


def _saved(folder: Path) -> list[int]:
    names = [path.name.removeprefix("epoch-") for path in folder.glob("epoch-*")]
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def resume(folder: Path, run: Run, state: State, device: torch.device) -> int:
    """Load the last whole checkpoint; the number of epochs that it has behind it."""
    saved = _saved(folder)
    if not saved:
        return 0
    place = folder / f"epoch-{saved[-1]}"
    record = read(place / "run.json")
    expect_same_run(folder, asdict(run), record.get("run"))
    if saved[-1] > run.epochs:
        raise InputError(f"expected at most {run.epochs} epochs in {folder}, got {saved[-1]}")
    try:
        losses = typed(list[float], record.get("losses"), "losses")
        state.step = typed(int, record.get("step"), "step")
        load_model(state.model, str(place / "weights.safetensors"), device=str(device))
        kept = torch.load(place / "optimizer.pt", map_location=device, weights_only=True)
        state.optimizer.load_state_dict(kept["optimizer"])
        state.average = kept["average"]
    except Exception as error:  # whatever torch and pickle make of a damaged file
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"expected a whole checkpoint in {place}, got {first}: remove it, to train that epoch "
            "again"
        ) from error
    state.losses = losses
    return saved[-1]
