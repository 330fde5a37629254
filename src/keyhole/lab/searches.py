"""Searches of a stack that are finished, on disk: the same run goes on from there.

A search is what takes long in a stack: the inputs of one layer for one output, or a handful of
starts through all layers. What one found is written before the next begins, and its numbers come
back from JSON bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.journal import Journal, Run, digest, stopping_on_ctrl_c
from keyhole.core.result import typed

_FIX = "give --force to begin anew, or remove this file"


@dataclass(frozen=True, eq=False)
class Found:
    """What one search found, and how it ended, in words."""

    inputs: Sequence[Tensor]
    end: str


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
        record = self._journal.records[name]
        try:
            inputs = typed(list[list[list[float]]], record["inputs"], "inputs")
            self.seconds += typed(float, record["seconds"], "seconds")
            return Found([like.new_tensor(X) for X in inputs], typed(str, record["end"], "end"))
        except (KeyError, ValueError) as error:
            raise InputError(
                f"expected a finished search in {self._journal.path}, got {error}: {_FIX}"
            ) from error


@contextmanager
def opened(path: str | Path | None, run: Run, *, force: bool) -> Generator[Searches]:
    """The searches of a run; a file that remembers none in the end is not left behind."""
    with Journal(path, run, replace=force, fix=_FIX) as journal:
        try:
            yield Searches(journal)
        finally:
            if journal.path is not None and not journal.records:
                journal.path.unlink(missing_ok=True)


def name_of(tensor: Tensor) -> str:
    """A short name for the numbers of a tensor."""
    return digest(list(tensor.shape), _bytes(tensor))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().to(torch.float64).numpy().tobytes()
