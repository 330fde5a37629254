"""Milvus by its own client: a folder of Milvus Lite, and a server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import keyhole
import made_stores
from keyhole.core.errors import InputError, KeyholeError
from keyhole.stores import address_of, open_store

MilvusClient = pytest.importorskip(
    "pymilvus", reason="pymilvus is not installed"
).MilvusClient
VECTORS = np.random.default_rng(1).normal(size=(2500, 4)).astype(np.float32)
TEXTS = [f"letter {number}" for number in range(len(VECTORS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("milvus")
    made_stores.milvus(path, VECTORS, TEXTS)
    return path / "milvus.db"


@pytest.fixture
def address(folder):
    """Yield the address of a server of Milvus Lite, which locks the folder while it runs."""
    from milvus_lite.adapter.grpc.server import start_server_in_thread

    server, database, port = start_server_in_thread(str(folder), port=0)
    yield f"http://127.0.0.1:{port}"
    server.stop(grace=0)
    database.close()


def opening(target):
    with open_store(target):
        pass


def test_a_server_is_read(address):
    with pytest.raises(
        InputError, match=r"letters of http://.* is not loaded: load it first"
    ):
        opening(f"milvus:{address}")
    loaded = MilvusClient(address)
    loaded.load_collection("letters")
    loaded.close()
    with open_store(f"milvus:{address}") as store:
        assert (store.count, store.dim, store.note) == (2500, 4, "")
        assert store.name == f"{address}, letters"
        rows = [0, 999, 1000, 2499]
        assert torch.equal(store.read(rows).float(), torch.from_numpy(VECTORS[rows]))
        assert store.texts is not None
        assert store.texts(rows) == [TEXTS[row] for row in rows]
        whole = torch.cat([vectors for _, vectors in store.batches()])
        assert torch.equal(whole.float(), torch.from_numpy(VECTORS))


def test_missing_parts_are_named(folder, address, tmp_path):
    with pytest.raises(
        InputError, match="has no collection nothing: choose among letters"
    ):
        opening(f"milvus:{address}?collection=nothing")
    with pytest.raises(InputError, match="is not a folder of Milvus Lite"):
        opening(f"milvus:{tmp_path}")
    with pytest.raises(KeyholeError, match="does not answer as Milvus") as refused:
        opening("milvus:http://root:s3cret@127.0.0.1:9")
    assert "s3cret" not in str(refused.value)


def test_another_machine_needs_authorization(folder):
    assert address_of("milvus:https://host:19530?collection=a") == "https://host:19530"
    assert address_of(f"milvus:{folder}") is None
    with pytest.raises(InputError, match="another machine: give --authorized"):
        keyhole.audit("milvus:http://192.0.2.1:19530", model="demo")
