"""Vectors in an index of FAISS (Johnson, Douze and Jégou, 2019), as `faiss.write_index` left it.

An index that keeps vectors whole gives them back as they were. One that keeps codes (product
quantisation, 8 bits) gives back the vectors that the codes stand for: the store's note says so, and
its steps or its codebook say what else the same code stands for.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import expect_file
from keyhole.core.machine import expect_room
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
    steps, ends = _steps(faiss, index)
    yield Store(
        place.path, int(index.ntotal), int(index.d), vectors, note=note, steps=steps, ends=ends,
        codebook=_codebook(faiss, index),
    )  # fmt: skip
    del whole  # which owns the memory that the others only point to


def _within(faiss: Any, index: Any) -> Any:
    """The index below those that only give other numbers to its vectors."""
    index = faiss.downcast_index(index)
    while isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        index = faiss.downcast_index(index.index)
    return index


def _steps(faiss: Any, index: Any) -> tuple[Tensor | None, Tensor | None]:
    """The steps (d,) and the ends (2, d) of an index with a range for each number, or for all."""
    kinds = faiss.ScalarQuantizer
    levels = {
        kinds.QT_8bit: 255, kinds.QT_8bit_uniform: 255, kinds.QT_6bit: 63, kinds.QT_4bit: 15,
        kinds.QT_4bit_uniform: 15,
    }  # fmt: skip
    if not isinstance(index, faiss.IndexScalarQuantizer) or index.sq.qtype not in levels:
        return None, None
    ranges = torch.from_numpy(faiss.vector_to_array(index.sq.trained))
    begins, lengths = ranges.view(2, -1).expand(2, index.d)
    return lengths / levels[index.sq.qtype], torch.stack([begins, begins + lengths])


def _codebook(faiss: Any, index: Any) -> Tensor | None:
    """The centroids (blocks, codes, numbers) of product quantisation."""
    if not isinstance(index, faiss.IndexPQ):
        return None
    centroids = torch.from_numpy(faiss.vector_to_array(index.pq.centroids))
    return centroids.view(index.pq.M, index.pq.ksub, index.pq.dsub)


def _unreadable(path: str, error: Exception) -> InputError:
    reason = one_line(error)
    # "Error in virtual void faiss::…(…) at file.cpp:80: Error: 'what' failed: why"
    return InputError(f"expected an index of FAISS, got {path}: {reason.rpartition('Error:')[2]}")
