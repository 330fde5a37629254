"""Vectors in an index of FAISS (Johnson, Douze and Jégou, 2019), as `faiss.write_index` left it.

An index that keeps vectors whole gives them back as they were. One that keeps codes (product
quantisation, 8 bits) gives back the vectors that the codes stand for: the store's note says so.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.errors import InputError
from keyhole.files import expect_file
from keyhole.memory import expect_room
from keyhole.stores.store import Place, Store, library, one_line


@contextmanager
def open_faiss(place: Place) -> Generator[Store]:
    expect_file(place.path, "an index of FAISS")
    faiss = library("faiss", "faiss-cpu")
    expect_room(Path(place.path).stat().st_size, place.path)
    try:
        whole = faiss.read_index(place.path, faiss.IO_FLAG_READ_ONLY)
        index = _within(faiss, whole)
        inverted = faiss.try_extract_index_ivf(index)
        if inverted is not None:
            inverted.make_direct_map()  # in memory: which list holds which vector
    except (RuntimeError, TypeError) as error:
        raise _unreadable(place.path, error) from error

    def vectors(rows: Sequence[int]) -> Tensor:
        try:
            return torch.from_numpy(np.stack([index.reconstruct(int(row)) for row in rows]))
        except RuntimeError as error:
            raise _unreadable(place.path, error) from error

    kind = type(index).__name__
    note = "" if "Flat" in kind else f"{kind} keeps codes, from which vectors are made again"
    yield Store(place.path, int(index.ntotal), int(index.d), vectors, note=note)
    del whole  # which owns the memory that the others only point to


def _within(faiss: Any, index: Any) -> Any:
    """The index below those that only give other numbers to its vectors."""
    index = faiss.downcast_index(index)
    while isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        index = faiss.downcast_index(index.index)
    return index


def _unreadable(path: str, error: Exception) -> InputError:
    reason = one_line(error)
    # "Error in virtual void faiss::…(…) at file.cpp:80: Error: 'what' failed: why"
    return InputError(f"expected an index of FAISS, got {path}: {reason.rpartition('Error:')[2]}")
