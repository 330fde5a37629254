"""The device to compute on, if this machine has it."""

from __future__ import annotations

import torch

from keyhole.errors import InputError


def expect_device(name: str | torch.device) -> None:
    """Refuse a device that nothing can be computed on and read back from."""
    here = "cpu or cuda" if torch.cuda.is_available() else "cpu"
    refusal = InputError(f"expected a device of this machine ({here}), got {name}")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # No such device, no room on it, or none that holds numbers; a torch without CUDA asserts.
        raise refusal from error
    if device.type == "cpu" and device.index:  # torch takes cpu:99 for cpu
        raise refusal


def device_of(asked: str, worker: int, gpus: int | None = None) -> str:
    """What `cuda` means for the worker of that number on its machine: of several GPUs, each one.

    With more workers than GPUs they share; a device that is named by its number is that one.
    """
    gpus = torch.cuda.device_count() if gpus is None else gpus
    return f"cuda:{worker % gpus}" if asked == "cuda" and gpus > 1 else asked
