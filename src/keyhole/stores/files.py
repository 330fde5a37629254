"""Vectors in files: NumPy arrays, JSON lines, Parquet, and indices of FAISS.

Each `open_…` function takes a `Place` and yields a `Store` (store.py).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError, first_line
from keyhole.core.files import expect_file, parse, reading
from keyhole.core.machine import expect_memory
from keyhole.stores.store import Place, Store, column_store, library

# One NumPy array (.npy).
#
# The file is mapped into memory, so that only the rows that are read cost anything.
# Pickled objects are refused: loading them would run code from the file.


@contextmanager
def open_npy(place: Place) -> Generator[Store]:
    what = "an array of vectors in a .npy file"
    expect_file(place.path, what)
    with reading(what, place.path, OSError, ValueError, EOFError):
        array: Any = np.load(place.path, allow_pickle=False, mmap_mode="r")
    if not isinstance(array, np.ndarray):  # an .npz, whatever its name
        array.close()
        raise InputError(
            f"expected one array in {place.path}, got an archive of arrays (.npz)"
        )
    if array.ndim != 2 or array.dtype not in (np.float16, np.float32, np.float64):
        raise InputError(
            f"expected an array of floating-point vectors (texts, numbers) in {place.path}, got "
            f"{array.dtype} of shape {tuple(array.shape)}"
        )

    def vectors(rows: Sequence[int]) -> Tensor:
        # A copy, since the mapped array is read-only.
        return torch.from_numpy(np.array(array[np.asarray(rows, dtype=np.int64)]))

    count, dim = array.shape
    yield Store(place.path, count, dim, vectors)


# JSON lines: each line is an object with a list of numbers in it, or a list itself.
#
# The file is read once to find the beginnings of its lines. Rows are then read from
# there.

_UNNAMED = "the line itself"  # the name of the column if lines are lists


@contextmanager
def open_json_lines(place: Place) -> Generator[Store]:
    expect_file(place.path, "a .jsonl file of vectors")
    with Path(place.path).open("rb") as file:
        starts = _line_starts(file)
        first = _row(file, starts, 0, place.path) if starts else {}
        names = [name for name, value in first.items() if _is_vector(value)]
        column = place.choice("column", names, "field that holds a vector")
        text = place.text_field(_readable(file, starts, place))

        def read(column: str, rows: Sequence[int]) -> list[Any]:
            return [_row(file, starts, row, place.path).get(column) for row in rows]

        yield column_store(place.path, len(starts), read, column, text)


def _readable(
    file: IO[bytes],
    starts: array[int],
    place: Place,
) -> Iterator[dict[str, Any]]:
    for row in range(len(starts)):
        with suppress(InputError):  # it is reported when the row is read
            yield _row(file, starts, row, place.path)


def _line_starts(file: IO[bytes]) -> array[int]:
    """Return the positions of the lines that are not blank."""
    starts = array("q")
    place = 0
    for line in file:
        if line.strip():
            starts.append(place)
        place += len(line)
    return starts


def _row(
    file: IO[bytes],
    starts: array[int],
    row: int,
    path: str,
) -> dict[str, Any]:
    file.seek(starts[row])
    line = file.readline()
    try:
        # Only a file may begin with a byte order mark.
        value: Any = parse(line.decode("utf-8" if starts[row] else "utf-8-sig"))
    except ValueError as error:
        raise InputError(f"row {row} of {path} is not JSON: {error}") from error
    if isinstance(value, list):
        return {_UNNAMED: value}
    if isinstance(value, dict):
        return value
    raise InputError(
        f"expected an object or a list in row {row} of {path}, got {line[:40]!r}"
    )


def _is_vector(value: Any) -> bool:
    if not isinstance(value, list) or len(value) < 2:
        return False
    return all(type(number) in (int, float) for number in value)


# Columns of Apache Arrow: lists of one length, of floating-point numbers or of bytes.
#
# Bytes are codes of 8 bits without their scale, so the vectors are read with length 1.
# Or each byte packs eight signs, as NumPy and sentence-transformers do; the encoder's
# width tells which (`Store.packed`). A column of binary data is offered only if no
# other column holds vectors, or if it was asked for.


@contextmanager
def open_parquet(place: Place) -> Generator[Store]:
    what = "a .parquet file of vectors"
    expect_file(place.path, what)
    parquet = library("pyarrow.parquet", "pyarrow")
    arrow = library("pyarrow")
    with reading(what, place.path, OSError, arrow.ArrowException):
        file = parquet.ParquetFile(place.path)

    def read(column: str, rows: Sequence[int]) -> Any:
        """Read only the row groups that hold these rows."""
        pieces = []
        start = 0
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            inside = [row - start for row in rows if start <= row < end]
            if inside:
                table = file.read_row_group(group, columns=[column])
                pieces += table.column(0).take(inside).chunks
            start = end
        return arrow.chunked_array(pieces)

    with file:
        yield arrow_store(place, file.schema_arrow, file.metadata.num_rows, read)


def arrow_store(
    place: Place,
    schema: Any,
    count: int,
    read: Callable[[str, Sequence[int]], Any],
) -> Store:
    """Return the store of a table; `read(column, rows)` gives rows of a column in their order."""
    types = library("pyarrow").types

    def is_any(kind: Any, *names: str) -> bool:
        return any(getattr(types, f"is_{name}")(kind) for name in names)

    def holds_vectors(kind: Any) -> bool:
        is_list = is_any(kind, "list", "large_list", "fixed_size_list")
        return is_list and is_any(kind.value_type, "floating", "int8", "uint8")

    def holds_texts(kind: Any) -> bool:
        inside = kind.value_type if is_any(kind, "dictionary") else kind
        return is_any(inside, "string", "large_string")

    columns = [field.name for field in schema if holds_vectors(field.type)]
    binary = [
        field.name
        for field in schema
        if is_any(field.type, "binary", "large_binary", "fixed_size_binary")
    ]
    wanted = place.options.get("column")
    if not columns or wanted in binary:
        columns += binary
    strings = [field.name for field in schema if holds_texts(field.type)]
    column = place.choice("column", columns, "column of vectors")
    text = place.text_column(strings)

    def vectors(rows: Sequence[int]) -> Tensor:
        return _matrix(read(column, rows), f"{column} in {place.path}")

    def texts(rows: Sequence[int]) -> list[str | None]:
        return read(str(text), rows).to_pylist()

    first = vectors([0]) if count else torch.zeros(1, 0)
    store = Store(
        place.path, count, first.shape[1], vectors, None if text is None else texts
    )
    return store if first.is_floating_point() else _coded(store)


def _coded(store: Store) -> Store:
    """Return a store of bytes, read as codes of 8 bits or (`packed`) as eight signs each."""

    def codes(rows: Sequence[int]) -> Tensor:
        return torch.nn.functional.normalize(store.vectors(rows).double())

    def signs(rows: Sequence[int]) -> Tensor:
        given = store.vectors(rows).numpy()
        # sentence-transformers subtracts 128 for its format "binary"
        if given.dtype != np.uint8:
            given = (given.astype(np.int16) + 128).astype(np.uint8)
        bits = np.unpackbits(given, axis=1)
        return torch.from_numpy(2.0 * bits - 1.0) / math.sqrt(8 * store.dim)

    packed = replace(
        store,
        dim=8 * store.dim,
        vectors=signs,
        note="it keeps one bit of each number, its sign",
    )
    note = "it keeps 8 bits of each number without their scale: vectors are read with length 1"
    return replace(store, vectors=codes, note=note, packed=packed)


def _matrix(column: Any, where: str) -> Tensor:
    """Return a column of lists, or of bytes, as (rows, numbers)."""
    compute = library("pyarrow.compute")
    if column.null_count or not len(column):
        raise InputError(f"every row of {where} must have a vector")
    if not hasattr(column.type, "value_type"):
        rows = [np.frombuffer(row, np.uint8) for row in column.to_pylist()]
        if len({len(row) for row in rows}) != 1:
            raise InputError(f"all vectors of {where} must have the same length")
        return torch.from_numpy(np.stack(rows))
    lengths = compute.unique(compute.list_value_length(column)).to_pylist()
    numbers = compute.list_flatten(column)
    if len(lengths) != 1 or numbers.null_count:
        raise InputError(
            f"all vectors of {where} must have the same length, not {lengths[:5]}"
        )
    return torch.from_numpy(np.array(numbers.to_numpy())).view(len(column), lengths[0])


# An index of FAISS (Johnson, Douze and Jégou, 2019), written by `faiss.write_index`.
#
# An index of whole vectors returns them unchanged. An index of codes (product
# quantisation, 8 bits) returns the vectors that the codes stand for. Then the store has
# a note, and its steps or its codebook determine which other vectors have the same
# code.


@contextmanager
def open_faiss(place: Place) -> Generator[Store]:
    expect_file(place.path, "an index of FAISS")
    faiss = library("faiss", "faiss-cpu")
    expect_memory(Path(place.path).stat().st_size, place.path)
    try:
        whole = faiss.read_index(place.path, faiss.IO_FLAG_READ_ONLY)
        index = _unwrapped(faiss, whole)
        inverted = faiss.try_extract_index_ivf(index)
        ids: Any = range(int(index.ntotal))
        # Its vectors may have any ids; the map is in memory only.
        if inverted is not None:
            inverted.set_direct_map_type(faiss.DirectMap.Hashtable)
            ids = _ids(faiss, inverted.invlists)
    except (RuntimeError, TypeError) as error:
        raise _unreadable(place.path, error) from error

    def vectors(rows: Sequence[int]) -> Tensor:
        try:
            return torch.from_numpy(
                np.stack([index.reconstruct(int(ids[row])) for row in rows])
            )
        except RuntimeError as error:
            raise _unreadable(place.path, error) from error

    kind = type(index).__name__
    note = ""
    if "Flat" not in kind:
        note = f"{kind} keeps codes, from which vectors are made again"
    rounding = _rounding(faiss, index)
    yield Store(
        place.path, len(ids), int(index.d), vectors, note=note, rounding=rounding
    )
    del whole  # not earlier, since it owns the memory of `index`


def _ids(faiss: Any, lists: Any) -> Any:
    """Return the ids in the lists of an inverted file, sorted."""
    found = [np.zeros(0, np.int64)]
    for number in range(lists.nlist):
        if size := lists.list_size(number):
            found.append(faiss.rev_swig_ptr(lists.get_ids(number), size))
    return np.unique(np.concatenate(found))


def _unwrapped(faiss: Any, index: Any) -> Any:
    """Return the index inside those that only renumber its vectors."""
    index = faiss.downcast_index(index)
    while isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        index = faiss.downcast_index(index.index)
    return index


def _rounding(faiss: Any, index: Any) -> dict[str, Tensor]:
    """Return the steps (d,) and the ends (2, d) of scalar quantisation, or a codebook."""
    if isinstance(index, faiss.IndexPQ):
        centroids = torch.from_numpy(faiss.vector_to_array(index.pq.centroids))
        shape = (index.pq.M, index.pq.ksub, index.pq.dsub)
        return {"codebook": centroids.view(shape)}
    kinds = faiss.ScalarQuantizer
    levels = {
        kinds.QT_8bit: 255,
        kinds.QT_8bit_uniform: 255,
        kinds.QT_6bit: 63,
        kinds.QT_4bit: 15,
        kinds.QT_4bit_uniform: 15,
    }
    kind = getattr(getattr(index, "sq", None), "qtype", None)
    if kind not in levels:
        return {}
    ranges = torch.from_numpy(faiss.vector_to_array(index.sq.trained))
    # The uniform kinds have one range for all numbers.
    begins, lengths = ranges.view(2, -1).expand(2, index.d)
    ends = torch.stack([begins, begins + lengths])
    return {"steps": lengths / levels[kind], "ends": ends}


def _unreadable(path: str, error: Exception) -> InputError:
    # FAISS writes "Error in virtual void faiss::…(…) at file.cpp:80: Error: 'what'
    # failed: why".
    reason = first_line(error).rpartition("Error:")[2].strip()
    return InputError(f"cannot read {path} as an index of FAISS: {reason}")
