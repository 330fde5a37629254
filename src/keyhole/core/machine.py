"""This machine: how much memory is free, which devices there are, how many threads to compute with.

Sizes that cannot fit into memory are refused in one line, before any is taken: a machine that runs
out of it ends programs, not always the one that asked.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keyhole.core.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to load, and `keyhole --help` needs none of it
    import torch
    from torch import nn

_PASS = 0.25  # of what is free, for one pass of a model, …
_OF_WEIGHTS = 0.1  # … and of what its weights take, …
_LEAST = 2**30  # … or bytes, where that is less
_SHARE = 0.8  # of what is free: something must be left for the work itself


def available(device: str | torch.device = "cpu") -> int:
    """Bytes that can be had on a device, on a CPU without swapping."""
    if str(device).startswith("cuda"):
        import torch

        # What torch holds for later is as good as free.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    import psutil  # on demand: `keyhole --help` needs none of it

    return psutil.virtual_memory().available


def expect_memory(
    needed: int, what: str, device: str | torch.device = "cpu", instead: str = ""
) -> None:
    """Refuse `what` where it needs more bytes than there are; `instead` says what to do then."""
    free = int(_SHARE * available(device))
    if needed > free:
        words = f"{what} needs {shown(needed)} of memory, and {shown(free)} are free"
        raise InputError(f"{words}: {instead}" if instead else words)


def memory_of_a_pass(device: str | torch.device, weights: int) -> int:
    """Bytes that one pass of a model may take besides its weights, of so many bytes.

    A small share of them, so that the whole takes little more than the model; of a small model, as
    much as makes a pass worth its while; and never more than a part of what is free.
    """
    return min(int(_PASS * available(device)), max(_LEAST, int(_OF_WEIGHTS * weights)))


def shown(size: int) -> str:
    """Bytes as people read them."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if size >= 10 ** (power + 2):
            return f"{size // 10**power:,} {unit}"
        if size >= 10**power:
            return f"{size / 10**power:.1f} {unit}"
    return f"{size:,} bytes"


# The device to compute on, if this machine has it.


def expect_device(name: str | torch.device) -> None:
    """Refuse a device that nothing can be computed on and read back from."""
    import torch

    known = "cpu or cuda" if torch.cuda.is_available() else "cpu"
    refusal = InputError(f"{name} is not a device of this machine: choose {known}")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # No such device, a full one, or none that holds numbers; a torch without CUDA asserts.
        raise refusal from error
    if device.type == "cpu" and device.index:  # torch takes cpu:99 for cpu
        raise refusal


def device_of(asked: str, worker: int, gpus: int | None = None) -> str:
    """What `cuda` means for the worker of that number on its machine: of several GPUs, each one.

    With more workers than GPUs they share; a device that is named by its number is that one.
    """
    import torch

    gpus = torch.cuda.device_count() if gpus is None else gpus
    return f"cuda:{worker % gpus}" if asked == "cuda" and gpus > 1 else asked


# How many threads torch computes with, by the size of the work.
#
# The threads of one operation wait for each other at its end. On a small matrix that takes away
# most of the gain; where another process is busy, a thread that has to wait for its turn holds up
# all others, thousands of times a second. So small work takes one thread, and large work as many as
# torch takes by itself, one for each core.
#
# Somebody's own choice stands: the environment's, and a number that torch would not have taken.

# Numbers in the largest matrix that is multiplied by: 512 by 512. The classifier that ships has a
# quarter of it, all-MiniLM-L6-v2 more than twice as many.
LARGE = 2**18
_CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which people choose for all programs


@contextmanager
def threads_for(size: int) -> Generator[None]:
    """As many threads as help on matrices of so many numbers; in the end, as many as there were."""
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
    """Did somebody choose this number, or did torch by itself?"""
    if any(os.environ.get(name) for name in _CHOICES):
        return True
    import torch

    # One for each core of the machine, or of those that this process may use.
    cores = {torch.get_num_interop_threads()}
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        cores.add(len(os.sched_getaffinity(0)))
    return threads not in cores


def largest_matrix(model: nn.Module) -> int:
    """How many numbers the largest matrix of a model holds; tables of embeddings are looked up."""
    from torch import nn

    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    sizes = (
        parameter.shape[-2:].numel()
        for parameter in model.parameters()
        if parameter.dim() >= 2 and parameter not in tables
    )
    return max(sizes, default=0)
