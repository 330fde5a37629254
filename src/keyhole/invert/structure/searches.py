"""Searches of a stack that are finished, on disk: the same run goes on from there.

A search is what takes long in a stack: the inputs of one layer for one output, or a handful of
starts through all layers. What one found is written before the next begins, and its numbers come
back from JSON bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keyhole.core import environment
from keyhole.core.journal import Journal, Run, digest, stopping_on_ctrl_c
from keyhole.core.result import typed
from keyhole.invert.structure.layers import Found, Layers


class Searches:
    """What a run has found so far, by the name of each search; without a journal in memory."""

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = Journal(None, {}) if journal is None else journal
        self.seconds = 0.0  # of all searches, those of earlier runs too

    def __len__(self) -> int:
        return len(self._journal)

    def made(self, name: str, search: Callable[[], Found], like: Tensor) -> Found:
        """What a search finds, or found; inputs are of the kind of `like`."""
        if name not in self._journal:
            began = time.perf_counter()
            with stopping_on_ctrl_c():  # what half a search found is not what all of it finds
                found = search()
            record = {
                "inputs": [X.tolist() for X in found.inputs],
                "end": found.end,
                "seconds": time.perf_counter() - began,
            }
            self._journal.add({name: record})
        found = self._journal.recall(name, partial(_found, like))
        self.seconds += self._journal.recall(name, lambda r: typed(float, r["seconds"], "seconds"))
        return found


def _found(like: Tensor, record: dict[str, Any]) -> Found:
    inputs = typed(list[list[list[float]]], record["inputs"], "inputs")
    return Found([like.new_tensor(X) for X in inputs], typed(str, record["end"], "end"))


def what_determines(stack: Layers, method: str) -> Run:
    """Everything that the inputs found follow from."""
    return {
        "run": "invert layers",
        "keyhole": environment()["keyhole"],
        "method": method,
        "stack": digest(*_parts(stack)),
    }


def name_of(tensor: Tensor) -> str:
    """A short name for the numbers of a tensor."""
    return digest(list(tensor.shape), _bytes(tensor))


def _parts(stack: Layers) -> Sequence[object]:
    weights: list[object] = [name_of(stack.B), stack.tolerance]
    for layer in stack.layers:
        tensors = (layer.W, layer.V, layer.key_bias, layer.output_bias)
        weights += [None if tensor is None else name_of(tensor) for tensor in tensors]
        weights += [layer.causal, layer.residual]
    return weights


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().to(torch.float64).numpy().tobytes()
