"""Vectors in a table of LanceDB: a folder of files that are written once and only read here."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import is_folder
from keyhole.stores.arrow import matrix, string_columns, vector_columns
from keyhole.stores.store import Place, Store, library, one_line

_SUFFIX = ".lance"


@contextmanager
def open_lancedb(place: Place) -> Generator[Store]:
    if not is_folder(place.path):
        raise InputError(f"expected a folder of LanceDB, got {place.path}: there is no such folder")
    lancedb = library("lancedb")
    try:
        table = _table(lancedb, place)
        schema, count = table.schema, int(table.count_rows())
    except (RuntimeError, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"expected a folder of LanceDB, got {place.path}: {one_line(error)}"
        ) from error
    column = place.choice("column", vector_columns(schema), "column of vectors")
    text = place.text_column(string_columns(schema))

    def taken(name: str, rows: Sequence[int]) -> Any:
        return table.take_offsets(list(rows)).select([name]).to_arrow().column(name)

    def vectors(rows: Sequence[int]) -> Tensor:
        return matrix(taken(column, rows), f"{column} in {place.path}")

    def texts(rows: Sequence[int]) -> list[str | None]:
        return taken(str(text), rows).to_pylist()

    dim = vectors([0]).shape[1] if count else 0
    yield Store(place.path, count, dim, vectors, None if text is None else texts)


def _table(lancedb: Any, place: Place) -> Any:
    names = sorted(path.name.removesuffix(_SUFFIX) for path in Path(place.path).glob(f"*{_SUFFIX}"))
    return lancedb.connect(place.path).open_table(place.choice("table", names, "table"))
