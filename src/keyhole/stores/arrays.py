"""Vectors in files of NumPy: one array (.npy), or several by name (.npz), perhaps with the texts.

A .npy file is mapped into memory, so that only the rows that are read cost anything. Pickled
objects are refused: loading them would run whatever the file says.
"""

from __future__ import annotations

import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import expect_file, trouble
from keyhole.core.machine import expect_room
from keyhole.stores.store import TEXT_NAMES, Place, Store


@contextmanager
def open_npy(place: Place) -> Generator[Store]:
    """One array (texts, numbers)."""
    array = _load(place.path, "an array of vectors in a .npy file", mmap_mode="r")
    if not _holds_vectors(array):
        raise InputError(
            f"expected an array of floating-point vectors (texts, numbers) in {place.path}, got "
            f"{array.dtype} of shape {tuple(array.shape)}"
        )
    yield _store(place.path, array)


@contextmanager
def open_npz(place: Place) -> Generator[Store]:
    """Several arrays by name: the one that holds vectors, and one of as many texts."""
    expect_file(place.path, "arrays in a .npz file")
    try:
        with zipfile.ZipFile(place.path) as archive:
            expect_room(sum(info.file_size for info in archive.infolist()), place.path)
    except (OSError, zipfile.BadZipFile) as error:
        raise trouble("arrays in a .npz file", place.path, error) from error
    with _load(place.path, "arrays in a .npz file") as file:
        arrays = {name: _member(file, name, place.path) for name in file.files}
    named = [name for name, array in arrays.items() if _holds_vectors(array)]
    vectors = arrays[place.choice("array", named, "array of vectors")]
    words = {
        name: array
        for name, array in arrays.items()
        if array.dtype.kind == "U" and array.shape == vectors.shape[:1]
    }
    plural = {
        name.removesuffix("s"): name for name in words if name.removesuffix("s") in TEXT_NAMES
    }
    named = place.text_column(list(words)) or next(iter(plural.values()), None)
    yield _store(place.path, vectors, None if named is None else words[named])


def _store(path: str, array: Any, words: Any = None) -> Store:
    def vectors(rows: Sequence[int]) -> Tensor:
        # Copied: what is mapped into memory from a file that is only read cannot be written to.
        return torch.from_numpy(np.array(array[np.asarray(rows, dtype=np.int64)]))

    def texts(rows: Sequence[int]) -> list[str | None]:
        return [str(words[row]) for row in rows]

    count, dim = array.shape
    return Store(path, count, dim, vectors, None if words is None else texts)


def _holds_vectors(array: Any) -> bool:
    return array.ndim == 2 and array.dtype in (np.float16, np.float32, np.float64)


def _load(path: str, what: str, **options: Any) -> Any:
    expect_file(path, what)
    try:
        return np.load(path, allow_pickle=False, **options)
    except (OSError, ValueError, EOFError) as error:
        raise trouble(what, path, error) from error


def _member(file: Any, name: str, path: str) -> Any:
    try:
        return file[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise trouble(f"an array {name}", path, error) from error
