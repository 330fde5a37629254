"""Vectors in a .parquet file: a column of lists, of which the row groups asked for are read."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import expect_file
from keyhole.stores.arrow import matrix, string_columns, vector_columns
from keyhole.stores.store import Place, Store, library, one_line


@contextmanager
def open_parquet(place: Place) -> Generator[Store]:
    expect_file(place.path, "a .parquet file of vectors")
    parquet = library("pyarrow.parquet", "pyarrow")
    failures = library("pyarrow").ArrowException
    try:
        file = parquet.ParquetFile(place.path)
    except (OSError, failures) as error:
        raise InputError(
            f"expected a .parquet file of vectors, got {place.path}: {one_line(error)}"
        ) from error
    with file:
        schema, count = file.schema_arrow, file.metadata.num_rows
        column = place.choice("column", vector_columns(schema), "column of vectors")
        text = place.text_column(string_columns(schema))

        def vectors(rows: Sequence[int]) -> Tensor:
            return matrix(_taken(file, column, rows), f"{column} in {place.path}")

        def texts(rows: Sequence[int]) -> list[str | None]:
            return _taken(file, str(text), rows).to_pylist()

        dim = vectors([0]).shape[1] if count else 0
        yield Store(place.path, count, dim, vectors, None if text is None else texts)


def _taken(file: Any, column: str, rows: Sequence[int]) -> Any:
    """Some rows of a column, in ascending order."""
    pieces, start = [], 0
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        inside = [row - start for row in rows if start <= row < end]
        if inside:
            pieces += file.read_row_group(group, columns=[column]).column(0).take(inside).chunks
        start = end
    return library("pyarrow").chunked_array(pieces)
