"""Vectors in a table of PostgreSQL: columns of pgvector (vector, halfvec), or arrays of numbers.

Everything is read in one transaction that is READ ONLY and REPEATABLE READ: the server itself
refuses to write, and row numbers mean the same from the first query to the last.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError, KeyholeError
from keyhole.stores.store import Place, Store, library, one_line

_OURS = ("table", "column", "text")
_SECONDS = "10"
_COLUMNS = """
SELECT table_schema, table_name, column_name, udt_name FROM information_schema.columns
WHERE table_schema NOT IN ('pg_catalog', 'information_schema')
ORDER BY table_schema, table_name, ordinal_position
"""
_VECTORS = ("vector", "halfvec", "_float4", "_float8")
_TEXTS = ("text", "varchar", "bpchar")


@contextmanager
def open_postgres(place: Place) -> Generator[Store]:
    psycopg = library("psycopg")
    parts = urlsplit(place.path)
    theirs = {name: value for name, value in place.options.items() if name not in _OURS}
    address = f"{place.path}?{urlencode({'connect_timeout': _SECONDS, **theirs})}"
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # no password
    try:
        with psycopg.connect(address) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            yield _store(psycopg.sql, connection, Place(shown, place.options))
    except psycopg.OperationalError as error:
        raise KeyholeError(f"expected an answer from {shown}, got {one_line(error)}") from error
    except psycopg.Error as error:
        raise InputError(f"expected vectors in {shown}, got {one_line(error)}") from error


def _store(sql: Any, connection: Any, place: Place) -> Store:
    listed = connection.execute(_COLUMNS).fetchall()
    tables = list(dict.fromkeys(_table(*row[:2]) for row in listed if row[3] in _VECTORS))
    table = place.choice("table", tables, "table with a vector column")
    kinds = {row[2]: row[3] for row in listed if _table(*row[:2]) == table}
    columns = [name for name, kind in kinds.items() if kind in _VECTORS]
    column = place.choice("column", columns, f"vector column in the table {table}")
    text = place.text_column([name for name, kind in kinds.items() if kind in _TEXTS])
    schema, relation = next(row[:2] for row in listed if _table(*row[:2]) == table)
    names = {"table": sql.Identifier(schema, relation), "column": sql.Identifier(column)}
    count, dim = connection.execute(
        sql.SQL("SELECT count({column}), max(cardinality({column}::real[])) FROM {table}").format(
            **names
        )
    ).fetchone()

    def read(what: Any, rows: Sequence[int]) -> list[Any]:
        query = sql.SQL(
            "SELECT given FROM (SELECT {what} AS given, row_number() OVER (ORDER BY tableoid, ctid)"
            " - 1 AS place FROM {table} WHERE {column} IS NOT NULL) AS placed"
            " WHERE place = ANY(%s) ORDER BY place"
        ).format(what=what, **names)
        return [value for (value,) in connection.execute(query, (list(rows),)).fetchall()]

    def vectors(rows: Sequence[int]) -> Tensor:
        values = read(sql.SQL("{}::real[]").format(names["column"]), rows)
        if any(len(value) != dim or None in value for value in values):
            raise InputError(f"expected {dim} numbers in every row of {place.path}, {table}")
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def texts(rows: Sequence[int]) -> list[str | None]:
        return read(sql.Identifier(str(text)), rows)

    name = f"{place.path}, {table}.{column}"
    return Store(name, count, dim or 0, vectors, None if text is None else texts)


def _table(schema: str, name: str) -> str:
    """A table as people write it."""
    return name if schema == "public" else f"{schema}.{name}"
