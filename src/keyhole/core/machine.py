"""Limits of this machine: free memory, devices, and how many threads to compute with.

Work that cannot fit into memory is refused before it begins: a machine that runs out of
memory kills programs, and not always the one that asked for it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.filesize import decimal

from keyhole.core.errors import InputError

if TYPE_CHECKING:  # torch and psutil load on demand: `keyhole --help` needs neither
    import torch
    from torch import nn

# share of the free memory that may be asked for: work takes more than its estimate
_USABLE = 0.8
_PASS = 0.25  # share of the free memory that one pass of a model may take
_PASS_PER_WEIGHTS = 0.1  # bytes that one pass may take, for each byte of weights
_PASS_OF_SMALL_MODEL = (
    2**30
)  # bytes that one pass may take even if the weights are small


def available(device: str | torch.device = "cpu") -> int:
    """Return how many bytes are free on a device (on a CPU: without swapping)."""
    if str(device).startswith("cuda"):
        import torch

        # Memory that torch has reserved but not allocated is free, too.
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + spare
    import psutil

    return psutil.virtual_memory().available


def expect_memory(
    needed: int,
    what: str,
    device: str | torch.device = "cpu",
    instead: str = "",
) -> None:
    """Raise if `what` needs more bytes than are free; `instead` says what people can do then."""
    free = int(_USABLE * available(device))
    if needed > free:
        words = (
            f"{what} needs {decimal(needed)} of memory, and {decimal(free)} are free"
        )
        raise InputError(f"{words}: {instead}" if instead else words)


def memory_of_a_pass(device: str | torch.device, weights: int) -> int:
    """Return how many bytes one pass of a model may take besides its `weights` (in bytes).

    A pass may take a small share of what the weights take; of a small model, enough for
    a useful number of texts; and never more than a share of the free memory.
    """
    wanted = max(_PASS_OF_SMALL_MODEL, int(_PASS_PER_WEIGHTS * weights))
    return min(int(_PASS * available(device)), wanted)


def expect_device(name: str | torch.device) -> None:
    """Raise unless numbers can be written to this device and read from it."""
    import torch

    known = "cpu or cuda" if torch.cuda.is_available() else "cpu"
    refusal = InputError(f"{name} is not a device of this machine: choose {known}")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        # No such device, a full one, or "meta"; a torch without CUDA raises an
        # AssertionError.
        raise refusal from error
    if device.type == "cpu" and device.index:  # torch accepts cpu:99 as the CPU
        raise refusal


def device_of(
    asked: str,
    worker: int,
    gpus: int | None = None,
) -> str:
    """Return the device for the worker of this number on its machine.

    If there are several GPUs, `cuda` spreads workers over them; any other name stays as
    it is.
    """
    import torch

    if gpus is None:
        gpus = torch.cuda.device_count()
    if asked == "cuda" and gpus > 1:
        return f"cuda:{worker % gpus}"
    return asked


# The threads of one operation wait for each other at its end. On a small matrix,
# waiting costs most of the gain, and on a busy machine one delayed thread holds up all
# others. So small models run on one thread, and large ones on as many as torch chooses,
# unless people chose a number themselves.

# Several threads are used from a largest matrix of so many numbers on: 512 by 512. The
# classifier that ships with Keyhole has a quarter of that, all-MiniLM-L6-v2 more than
# twice as much.
LARGE = 2**18
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)  # by which people choose for all programs


@contextmanager
def threads_for(size: int) -> Generator[None]:
    """Within this context, use one thread if a model's largest matrix, of `size` numbers, is small.

    If people chose a number of threads, it stays.
    """
    import torch

    before = torch.get_num_threads()
    if size >= LARGE or is_chosen(before):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_chosen(threads: int) -> bool:
    """Return whether somebody chose this number of threads, rather than torch by itself."""
    if any(os.environ.get(name) for name in _VARIABLES):
        return True
    import torch

    # By itself, torch takes a thread for each core of the machine, or of those of this
    # process.
    cores = {torch.get_num_interop_threads()}
    if hasattr(os, "sched_getaffinity"):  # not on every system
        cores.add(len(os.sched_getaffinity(0)))
    return threads not in cores


def largest_matrix(model: nn.Module) -> int:
    """Return the size of the largest matrix that a model multiplies by; embeddings do not count."""
    from torch import nn

    tables = {
        module.weight for module in model.modules() if isinstance(module, nn.Embedding)
    }
    sizes = (
        parameter.shape[-2:].numel()
        for parameter in model.parameters()
        if parameter.dim() >= 2 and parameter not in tables
    )
    return max(sizes, default=0)
