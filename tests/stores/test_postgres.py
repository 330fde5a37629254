"""Vectors in a real PostgreSQL, started for these tests: arrays, and the types of pgvector."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from keyhole.core.errors import InputError, KeyholeError
from keyhole.stores import open_store
from postgres_server import postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed")
VECTORS = np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32)
TEXTS = [f"letter {number}" for number in range(10)]
ROWS = [0, 2, 3, 9]


@pytest.fixture(scope="module")
def server():
    # Not in pytest's own folder, which another user cannot enter and whose path is too
    # long.
    with (
        tempfile.TemporaryDirectory(prefix="keyhole-pg-") as folder,
        postgres(Path(folder)) as address,
    ):
        yield address


@pytest.fixture
def database(server):
    """An empty schema for each test."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS other CASCADE")
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        yield connection


def fill(database, kind="real[]", table="letters", vectors=VECTORS):
    database.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, text text, embedding {kind})"
    )
    for number, (vector, text) in enumerate(zip(vectors.tolist(), TEXTS, strict=True)):
        values = (number, text, vector if "[]" in kind else str(vector))
        database.execute(f"INSERT INTO {table} VALUES (%s, %s, %s)", values)


@pytest.mark.parametrize(
    "kind", ["real[]", "double precision[]", "vector(6)", "halfvec(6)"]
)
def test_vectors_are_read(kind, server, database):
    if "vec" in kind:
        try:
            database.execute("CREATE EXTENSION vector")
        except psycopg.Error:
            pytest.skip("this PostgreSQL has no extension pgvector")
    if "half" in kind:
        expected = VECTORS.astype(np.float16).astype(np.float32)
    else:
        expected = VECTORS
    fill(database, kind)
    database.execute("INSERT INTO letters VALUES (99, 'no vector', NULL)")
    with open_store(server) as store:
        assert (store.count, store.dim) == VECTORS.shape
        assert torch.equal(store.read(ROWS), torch.from_numpy(expected[ROWS]))
        assert store.texts is not None
        assert store.texts(ROWS) == [TEXTS[row] for row in ROWS]
        assert store.identity.startswith("10 vectors of 6 numbers")


def test_nothing_is_written(server, database):
    """Compare the content, and the transactions that last wrote each row."""
    fill(database)
    content = "SELECT l::text, xmin::text, ctid::text FROM letters l ORDER BY ctid"
    before = database.execute(content).fetchall()
    with open_store(server) as store:
        store.read(range(store.count))
    assert database.execute(content).fetchall() == before


def test_nothing_could_be_written(server, database):
    """Read a view that writes when it is read: the server itself refuses."""
    fill(database)
    database.execute("CREATE TABLE readers (at timestamptz)")
    database.execute(
        "CREATE FUNCTION noted(vector real[]) RETURNS real[] LANGUAGE sql AS "
        "'INSERT INTO readers VALUES (now()); SELECT vector'"
    )
    database.execute(
        "CREATE VIEW watched AS SELECT noted(embedding) AS embedding FROM letters"
    )
    with pytest.raises(
        InputError, match="cannot execute INSERT in a read-only transaction"
    ):
        open_store(f"{server}&table=watched").__enter__()
    assert database.execute("SELECT count(*) FROM readers").fetchone() == (0,)
    database.execute("SELECT count(embedding) FROM watched")  # as any other client does
    assert database.execute("SELECT count(*) FROM readers").fetchone() == (10,)


def test_one_of_several_tables_and_columns_must_be_named(server, database):
    fill(database)
    database.execute("CREATE SCHEMA other")
    fill(database, table='other."odd ""name"""', vectors=VECTORS + 1)
    with pytest.raises(
        InputError, match=r"has more than one table .* add \?table=NAME"
    ):
        open_store(server).__enter__()
    with open_store(f'{server}&table=other.odd "name"&column=embedding') as store:
        assert torch.equal(store.read(ROWS), torch.from_numpy(VECTORS[ROWS] + 1))
    with pytest.raises(
        InputError, match=r"has no vector column in the table letters none"
    ):
        open_store(f"{server}&table=letters&column=none").__enter__()


def test_wrong_addresses_are_one_line_errors(server, database):
    with pytest.raises(InputError, match=r"has no table with a vector column"):
        open_store(server).__enter__()
    for wrong in (
        "postgresql://owner:secret@127.0.0.1:1/none",
        "postgresql:///x?host=/none",
    ):
        with pytest.raises(
            KeyholeError, match=r"postgresql:.* does not answer"
        ) as raised:
            open_store(wrong).__enter__()
        assert "secret" not in str(raised.value)
        assert "\n" not in str(raised.value)
