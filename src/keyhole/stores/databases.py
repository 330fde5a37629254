"""Vectors in databases and on servers.

Chroma, Qdrant's local mode, LanceDB, Milvus, Weaviate, PostgreSQL; servers of
embeddings. Each `open_…` function takes a `Place` and yields a `Store` (store.py).
"""

from __future__ import annotations

import io
import logging
import pickle
import shutil
import socket
import sqlite3
import tempfile
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

import httpx
import numpy as np

from keyhole.core.endpoint import KEY, EndpointOptions, without_password
from keyhole.core.errors import InputError, KeyholeError, first_line
from keyhole.core.files import exists, is_folder, reading
from keyhole.oracle.http import Http
from keyhole.oracle.protocol import OracleError
from keyhole.stores.files import arrow_store
from keyhole.stores.store import ROWS_FOR_NAMES, Place, Store, column_store, library

_BATCH = 1000  # rows in one answer of a server


@contextmanager
def _temporary_copy(folder: str, what: str) -> Generator[str]:
    """Yield the path of a copy that only its owner may read, and remove it after the block."""
    with tempfile.TemporaryDirectory(prefix="keyhole-") as temporary:
        copy = Path(temporary) / "copy.db"
        with reading(what, folder, OSError):  # of which shutil.Error is one
            shutil.copytree(folder, copy)
        yield str(copy)


def _keyed_store(
    name: str,
    keys: Sequence[Any],
    get: Callable[[str, list[Any]], dict[Any, Any]],
    vector: str,
    text: str | None,
    note: str = "",
) -> Store:
    """Return a store that is read by keys: `get(column, keys)` returns values by key."""

    def read(column: str, rows: Sequence[int]) -> list[Any]:
        wanted = [keys[row] for row in rows]
        found: dict[Any, Any] = {}
        for start in range(0, len(wanted), _BATCH):
            found |= get(column, wanted[start : start + _BATCH])
        return [found.get(key) for key in wanted]

    return column_store(name, len(keys), read, vector, text, np.float32, note)


# Chroma. It writes to a folder that it opens (it migrates tables and takes locks), so
# it opens a copy. Its telemetry is switched off.

_CHROMA = "a folder of Chroma"


@contextmanager
def open_chroma(place: Place) -> Generator[Store]:
    if not exists(Path(place.path) / "chroma.sqlite3"):
        raise InputError(f"{place.path} is not {_CHROMA}: it has no chroma.sqlite3")
    chromadb = library("chromadb")
    settings = chromadb.Settings(anonymized_telemetry=False, allow_reset=False)
    with (
        _temporary_copy(place.path, _CHROMA) as copy,
        reading(_CHROMA, place.path, chromadb.errors.ChromaError),
        ExitStack() as stack,
    ):
        client = chromadb.PersistentClient(copy, settings)
        if hasattr(client, "close"):
            stack.callback(client.close)
        yield _chroma_store(client, place)


def _chroma_store(client: Any, place: Place) -> Store:
    names = [collection.name for collection in client.list_collections()]
    name = place.choice("collection", sorted(names), "collection")
    collection = client.get_collection(name)
    ids: list[str] = sorted(collection.get(include=[])["ids"])

    def get(column: str, wanted: list[str]) -> dict[str, Any]:
        given = collection.get(ids=wanted, include=[column])
        return dict(zip(given["ids"], given[column], strict=True))

    note = "read from a temporary copy, because Chroma writes to what it opens"
    where = f"{place.path}, {name}"
    return _keyed_store(where, ids, get, "embeddings", "documents", note)


# Qdrant's local mode, read without its library.
#
# `QdrantClient(path=…)` keeps each collection as `collection/NAME/storage.sqlite`, a
# table points(id, point) of pickled points. Unpickling would run code from the file, so
# every class that a pickle names is replaced by one that only keeps its fields. SQLite
# opens the database as `immutable`, so that it does not even take a lock.


class _Fields:
    """Takes the place of any class that a pickle names: it keeps the state that it is given."""

    def __init__(self, *_: object) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        held = _as_dict(state)
        # where pydantic keeps a model's fields
        self.fields = _as_dict(held.get("__dict__", held))


class _FieldsUnpickler(pickle.Unpickler):
    """Reads a pickle without importing or calling anything that it names."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ARG002
        return _Fields

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError(f"a reference to something outside: {pid!r:.40}")


@contextmanager
def open_qdrant(place: Place) -> Generator[Store]:
    folder = Path(place.path) / "collection"
    names = sorted(path.parent.name for path in folder.glob("*/storage.sqlite"))
    if not names:
        raise InputError(
            f"{place.path} is not a folder of Qdrant's local mode: it has no "
            "collection/NAME/storage.sqlite"
        )
    name = place.choice("collection", names, "collection")
    file = folder / name / "storage.sqlite"
    for end in ("-wal", "-journal"):
        if exists(f"{file}{end}"):
            raise InputError(f"Qdrant is writing to {file}{end}: close it first")
    address = f"{file.absolute().as_uri()}?mode=ro&immutable=1"
    with (
        reading("a collection of Qdrant's local mode", file, sqlite3.Error),
        closing(sqlite3.connect(address, uri=True)) as database,
    ):
        yield _qdrant_store(database, place, name)


def _qdrant_store(
    database: sqlite3.Connection,
    place: Place,
    name: str,
) -> Store:
    where = f"{place.path}, {name}"
    listed = database.execute("SELECT rowid FROM points ORDER BY rowid")
    row_ids = array("q", (row_id for (row_id,) in listed))
    if not row_ids:
        raise InputError(f"{where} holds no vectors")

    def point(row: int) -> dict[str, Any]:
        query = "SELECT point FROM points WHERE rowid = ?"
        (blob,) = database.execute(query, (row_ids[row],)).fetchone()
        try:
            fields: dict[str, Any] = _FieldsUnpickler(io.BytesIO(blob)).load().fields
        except Exception as error:  # bytes that are no pickle may raise anything
            raise InputError(
                f"{place.path} holds a point that is not Qdrant's: {error!r:.80}"
            ) from error
        if "vector" not in fields:
            raise InputError(f"{place.path} holds a point of Qdrant without a vector")
        return fields

    def payload(row: int) -> dict[str, Any]:
        return _as_dict(point(row).get("payload"))

    names = list(_dense(point(0)["vector"]))
    vector = place.choice("vector", names, "vector of a point")
    text = place.text_field(map(payload, range(len(row_ids))))

    def read(column: str, rows: Sequence[int]) -> list[Any]:
        if column == "vector":
            return [_dense(point(row)["vector"]).get(vector) for row in rows]
        return [payload(row).get(str(text)) for row in rows]

    return column_store(where, len(row_ids), read, "vector", text and "payload")


def _dense(held: object) -> dict[str, list[float]]:
    """Return the dense vectors of a point by name; a single vector without a name gets ""."""
    named = _as_dict(held) if isinstance(held, dict) else {"": held}
    return {
        name: values
        for name, values in named.items()
        if isinstance(values, list) and values and isinstance(values[0], int | float)
    }


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# LanceDB: a folder of files that are never overwritten.


@contextmanager
def open_lancedb(place: Place) -> Generator[Store]:
    what = "a folder of LanceDB"
    if not is_folder(place.path):
        raise InputError(f"cannot read {place.path} as {what}: there is no such folder")
    lancedb = library("lancedb")
    names = sorted(path.stem for path in Path(place.path).glob("*.lance"))
    name = place.choice("table", names, "table")
    with reading(what, place.path, RuntimeError, OSError, ValueError):
        table = lancedb.connect(place.path).open_table(name)
        schema = table.schema
        count = int(table.count_rows())

    def read(column: str, rows: Sequence[int]) -> Any:
        return table.take_offsets(list(rows)).select([column]).to_arrow().column(column)

    yield arrow_store(place, schema, count, read)


# Milvus: its client reads a server, and a folder of Milvus Lite.
#
# Milvus Lite is a server inside this process. It locks its folder and writes a log to
# it, so it opens a copy. Nothing is changed on another server: a collection that is not
# loaded is refused.

_MILVUS_NOTE = "read from a temporary copy, because Milvus Lite writes to what it opens"


@contextmanager
def open_milvus(place: Place) -> Generator[Store]:
    if "://" in place.path:
        public = without_password(place.path)
        with _milvus_client(place.path, public) as client:
            yield _milvus_store(client, replace(place, path=public), "")
        return
    if not exists(Path(place.path) / "collections"):
        raise InputError(
            f"{place.path} is not a folder of Milvus Lite: it has no folder collections (of Milvus "
            "Lite 2, which kept one file, export the vectors to Parquet)"
        )
    library("pymilvus")
    lite = library("milvus_lite.server_manager", "milvus-lite").server_manager_instance
    with _temporary_copy(place.path, "a folder of Milvus Lite") as copy:
        try:
            with _milvus_client(copy, place.path) as client:
                yield _milvus_store(client, place, _MILVUS_NOTE)
        finally:
            lite.release_server(copy)


@contextmanager
def _milvus_client(address: str, shown: str) -> Generator[Any]:
    """Yield a client of a server or of a folder of Milvus Lite; errors name it as `shown`."""
    milvus = library("pymilvus")
    # What it logs is raised as well.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    parts = urlsplit(address)
    token = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    given = {"token": token} if parts.username else {}
    public = without_password(address)
    try:
        with closing(milvus.MilvusClient(public, timeout=10, **given)) as client:
            yield client
    except milvus.MilvusException as error:
        raise KeyholeError(
            f"{shown} does not answer as Milvus: {first_line(error)}"
        ) from error


def _milvus_store(
    client: Any,
    place: Place,
    note: str,
) -> Store:
    name = place.choice("collection", sorted(client.list_collections()), "collection")
    where = f"{place.path}, {name}"
    if note:  # a copy of ours
        client.load_collection(name)
    elif client.get_load_state(name)["state"].name != "Loaded":
        raise InputError(
            f"the collection {name} of {place.path} is not loaded: load it first"
        )
    fields = client.describe_collection(name)["fields"]
    vectors = [each["name"] for each in fields if each["type"].name == "FLOAT_VECTOR"]
    vector = place.choice("vector", vectors, f"field of float vectors in {name}")
    (key,) = (each["name"] for each in fields if each.get("is_primary"))
    keys: list[Any] = []
    listed = client.query_iterator(name, batch_size=_BATCH, output_fields=[key])
    with closing(listed) as batches:
        while batch := batches.next():
            keys += [row[key] for row in batch]
    if not keys:
        raise InputError(f"{where} holds no vectors")
    keys.sort()
    some = client.get(name, ids=keys[:ROWS_FOR_NAMES], output_fields=["*"])
    text = place.text_field({k: row[k] for k in row if k != key} for row in some)

    def get(column: str, ids: list[Any]) -> dict[Any, Any]:
        given = client.get(name, ids=ids, output_fields=[key, column])
        return {row[key]: row.get(column) for row in given}

    return _keyed_store(where, keys, get, vector, text, note)


# Weaviate: its client asks a server, and changes nothing there.
#
# The checks that the client makes first are skipped: it would ask PyPI for its newest
# release, and would wait a minute if nothing listens at its gRPC port, which
# `_connect_weaviate` checks.

_KEY_REQUIRED = (401, 403)


@contextmanager
def open_weaviate(place: Place) -> Generator[Store]:
    weaviate = library("weaviate", "weaviate-client")
    public = without_password(place.path)
    try:
        port = int(place.options.get("grpc_port", 50051))
        address = weaviate.connect.ConnectionParams.from_url(place.path, port)
    except ValueError as error:
        raise InputError(
            f"{public} is not an address of Weaviate: write weaviate:http://HOST:PORT, with "
            "?grpc_port=PORT where that is not 50051"
        ) from error
    headers = EndpointOptions().secrets()
    client = weaviate.WeaviateClient(
        address, additional_headers=headers, skip_init_checks=True
    )
    try:
        with closing(client):
            _connect_weaviate(client, address.grpc, public)
            yield _weaviate_store(client, replace(place, path=public))
    except weaviate.exceptions.WeaviateStartUpError as error:
        raise KeyholeError(
            f"nobody answers at {public}: is Weaviate running there?"
        ) from error
    except weaviate.exceptions.WeaviateBaseError as error:
        if getattr(error, "status_code", None) in _KEY_REQUIRED:
            raise InputError(
                f"{public} asks for a key, or another: set {KEY}"
            ) from error
        raise KeyholeError(
            f"{public} does not answer as Weaviate: {first_line(error)}"
        ) from error


def _connect_weaviate(
    client: Any,
    grpc: Any,
    public: str,
) -> None:
    try:
        client.connect()
    # raised by the answers of another program
    except (httpx.HTTPError, LookupError, TypeError, AttributeError) as error:
        raise KeyholeError(
            f"{public} does not answer as Weaviate: {error!r:.80}"
        ) from error
    try:
        socket.create_connection((grpc.host, grpc.port), timeout=10).close()
    except OSError as error:
        raise KeyholeError(
            f"{public} does not answer on its gRPC port, {grpc.port}: open it, or add "
            "?grpc_port=PORT"
        ) from error


def _weaviate_store(client: Any, place: Place) -> Store:
    name = place.choice("collection", list(client.collections.list_all()), "collection")
    where = f"{place.path}, {name}"
    collection = client.collections.use(name)
    if "tenant" in place.options:
        collection = collection.with_tenant(place.options["tenant"])
    listed = collection.iterator(return_properties=False, cache_size=_BATCH)
    keys = sorted(each.uuid for each in listed)
    if not keys:
        raise InputError(f"{where} holds no vectors")
    some = collection.query.fetch_objects_by_ids(
        keys[:ROWS_FOR_NAMES], limit=ROWS_FOR_NAMES, include_vector=True
    ).objects
    vector = place.choice("vector", list(_dense(some[0].vector)), "vector of an object")
    text = place.text_field(each.properties for each in some)

    def get(column: str, ids: list[Any]) -> dict[Any, Any]:
        is_text = column == "text"
        given = collection.query.fetch_objects_by_ids(
            ids,
            limit=len(ids),
            include_vector=not is_text,
            return_properties=[text] if is_text else False,
        )
        return {
            each.uuid: each.properties.get(text) if is_text else each.vector.get(vector)
            for each in given.objects
        }

    return _keyed_store(where, keys, get, vector, text and "text")


# PostgreSQL: columns of pgvector (vector, halfvec), or arrays of numbers.
#
# Everything is read in one transaction, READ ONLY and REPEATABLE READ: the server
# itself refuses to write, and row numbers mean the same from the first query to the
# last.

_OPTIONS = ("table", "column", "text")  # all others are the driver's
_TIMEOUT = "10"  # seconds
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
    driver = {"connect_timeout": _TIMEOUT, **place.options}
    for name in _OPTIONS:
        driver.pop(name, None)
    address = f"{place.path}?{urlencode(driver)}"
    public = without_password(place.path)
    try:
        with psycopg.connect(address) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            yield _postgres_store(psycopg.sql, connection, Place(public, place.options))
    except psycopg.OperationalError as error:
        raise KeyholeError(f"{public} does not answer: {first_line(error)}") from error
    except psycopg.Error as error:
        raise InputError(
            f"cannot read vectors from {public}: {first_line(error)}"
        ) from error


def _postgres_store(
    sql: Any,
    connection: Any,
    place: Place,
) -> Store:
    tables: dict[str, dict[str, str]] = {}  # the type of each column
    identifiers: dict[str, Any] = {}
    for schema, relation, column, kind in connection.execute(_COLUMNS).fetchall():
        table = relation if schema == "public" else f"{schema}.{relation}"
        tables.setdefault(table, {})[column] = kind
        identifiers.setdefault(table, sql.Identifier(schema, relation))
    with_vectors = [name for name in tables if {*_VECTORS} & {*tables[name].values()}]
    table = place.choice("table", with_vectors, "table with a vector column")
    kinds = tables[table]
    vectors = [name for name, kind in kinds.items() if kind in _VECTORS]
    vector = place.choice("column", vectors, f"vector column in the table {table}")
    text = place.text_column([name for name, kind in kinds.items() if kind in _TEXTS])
    names = {"table": identifiers[table], "column": sql.Identifier(vector)}
    counting = sql.SQL("SELECT count({column}) FROM {table}").format(**names)
    (count,) = connection.execute(counting).fetchone()

    def read(column: str, rows: Sequence[int]) -> list[Any]:
        what = sql.SQL("{}::real[]" if column == vector else "{}").format(
            sql.Identifier(column)
        )
        query = sql.SQL(
            "SELECT given FROM (SELECT {what} AS given, row_number() OVER (ORDER BY tableoid, ctid)"
            " - 1 AS place FROM {table} WHERE {column} IS NOT NULL) AS placed"
            " WHERE place = ANY(%s) ORDER BY place"
        ).format(what=what, **names)
        return [value for (value,) in connection.execute(query, (list(rows),))]

    where = f"{place.path}, {table}.{vector}"
    return column_store(where, count, read, vector, text, np.float32)


# A server that turns texts into embeddings, in the form of OpenAI's `POST
# /v1/embeddings`.
#
# It keeps no vectors, so it is asked to embed texts that are known. Its answers show
# how the vectors of its other clients are made (encoder, pooling), and whether they can
# be read.

_TEXTS_PER_REQUEST = 32


@contextmanager
def open_embeddings_api(place: Place) -> Generator[Store]:
    if not place.known:
        raise InputError(
            f"{place.path} keeps no vectors: give --known with texts to ask for their embeddings"
        )
    url = place.path.rstrip("/")
    with closing(Http(url, EndpointOptions(), retries=2)) as http:
        url = without_password(url)
        model = place.options.get("model") or _only_model(http, url)

        def read(column: str, rows: Sequence[int]) -> list[Any]:
            texts = [place.known[row] for row in rows]
            if column == "text":
                return texts
            vectors: list[list[float]] = []
            for start in range(0, len(texts), _TEXTS_PER_REQUEST):
                some = texts[start : start + _TEXTS_PER_REQUEST]
                vectors += _embedded(http, url, model, some)
            return vectors

        note = "the texts of --known, asked for now"
        yield column_store(url, len(place.known), read, "embedding", "text", note=note)


def _only_model(http: Http, url: str) -> str:
    """Return the name of the server's only model, or a default if it does not list its models."""
    try:
        answer = http.request("GET", f"{url.removesuffix('/embeddings')}/models")
    except OracleError:  # some servers neither list their models nor need a name
        return "default"
    listed: Any = answer.get("data")
    entries = map(_as_dict, listed if isinstance(listed, list) else [])
    names = [str(entry["id"]) for entry in entries if "id" in entry]
    if len(names) > 1:
        raise InputError(
            f"{url} has several models ({', '.join(names[:5])}): add ?model=NAME"
        )
    return next(iter(names), "default")


def _embedded(
    http: Http,
    url: str,
    model: str,
    texts: Sequence[str],
) -> list[list[float]]:
    content = {"model": model, "input": list(texts), "encoding_format": "float"}
    answer = http.request("POST", url, content)
    try:
        entries = sorted(answer["data"], key=lambda entry: int(entry["index"]))
        vectors = [
            [float(number) for number in entry["embedding"]] for entry in entries
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise OracleError(
            f"{url} did not answer with embeddings: {error!r:.80}"
        ) from error
    if len(vectors) != len(texts):
        raise OracleError(
            f"{url} answered with {len(vectors)} embeddings for {len(texts)} texts"
        )
    return vectors
