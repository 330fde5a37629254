"""How many threads torch computes with, by the size of the work.

The threads of one operation wait for each other at its end. On a small matrix that takes away most
of the gain; where another process is busy, a thread that has to wait for its turn holds up all
others, thousands of times a second. So small work takes one thread, and large work as many as
torch takes by itself, one for each core. `benchmarks/threads.py` measures both, on matrices on both
sides of the limit; docs/fleets.md says what it measured.

Somebody's own choice stands: the environment's, and a number that torch would not have taken.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

# Numbers in the largest matrix that is multiplied by: 512 by 512. The classifier that ships has a
# quarter of it, all-MiniLM-L6-v2 more than twice as many.
LARGE = 2**18
_CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which people choose for all programs


@contextmanager
def threads_for(size: int) -> Generator[None]:
    """As many threads as help on matrices of so many numbers; in the end, as many as there were."""
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
    # One for each core of the machine, or of those that this process may use.
    cores = {torch.get_num_interop_threads()}
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        cores.add(len(os.sched_getaffinity(0)))
    return threads not in cores


def largest_matrix(model: nn.Module) -> int:
    """How many numbers the largest matrix of a model holds; tables of embeddings are looked up."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    sizes = (
        parameter.shape[-2:].numel()
        for parameter in model.parameters()
        if parameter.dim() >= 2 and parameter not in tables
    )
    return max(sizes, default=0)
