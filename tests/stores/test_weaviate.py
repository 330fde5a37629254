"""Weaviate by its own client, with a stand-in for its server (weaviate_stand_in.py)."""

from __future__ import annotations

import socket
from uuid import UUID

import numpy as np
import pytest
import torch

import keyhole
from keyhole.core.errors import InputError, KeyholeError
from keyhole.stores import address_of, open_store

pytest.importorskip("weaviate", reason="weaviate-client is not installed")

from weaviate_stand_in import Collection, served

VECTORS = np.random.default_rng(2).normal(size=(2500, 4)).astype(np.float32)
TEXTS = [f"letter {number}" for number in range(len(VECTORS))]
IDS = [UUID(int=(number + 1) << 64) for number in range(len(VECTORS))]
ROWS = [0, 999, 1000, 2499]


def objects(vectors, text="content"):
    rows = zip(vectors, TEXTS, strict=False)
    made = [(vector, {text: words, "n": n}) for n, (vector, words) in enumerate(rows)]
    return dict(zip(IDS, made, strict=False))


TWO = [{"title": [1.0, 0.0], "body": [0.0, float(n)]} for n in range(3)]
COLLECTIONS = {
    "Letters": Collection(objects(VECTORS)),
    "Named": Collection(objects(TWO)),
    "Empty": Collection({}),
    "Bare": Collection(objects([[], []])),
    "Shared": Collection(objects(VECTORS[:3]), tenant="a"),
}


@pytest.fixture(scope="module")
def server():
    with served(COLLECTIONS) as (address, port):
        yield f"weaviate:{address}?grpc_port={port}"


def opening(target):
    with open_store(target) as store:
        return store.read(range(store.count))


def test_vectors_are_read_in_several_answers(server):
    with open_store(f"{server}&collection=Letters") as store:
        assert (store.count, store.dim, store.note) == (2500, 4, "")
        assert store.name == f"{server[9:].partition('?')[0]}, Letters"
        assert torch.equal(store.read(ROWS).float(), torch.from_numpy(VECTORS[ROWS]))
        assert store.texts is not None
        assert store.texts(ROWS) == [TEXTS[row] for row in ROWS]
        whole = torch.cat([vectors for _, vectors in store.batches()])
        assert torch.equal(whole.float(), torch.from_numpy(VECTORS))


def test_one_of_several_vectors_must_be_named(server):
    named = f"{server}&collection=Named"
    with pytest.raises(
        InputError, match=r"vector of an object \(title, body\): add \?vector=NAME"
    ):
        opening(named)
    assert opening(f"{named}&vector=body").tolist() == [
        [0.0, 0.0],
        [0.0, 1.0],
        [0.0, 2.0],
    ]
    with open_store(f"{named}&vector=body&text=content") as store:
        assert store.texts is not None
        assert store.texts([2]) == ["letter 2"]
    with pytest.raises(
        InputError, match="has no column of texts n: choose among content"
    ):
        opening(f"{named}&vector=body&text=n")


def test_a_tenant_must_be_named(server):
    with pytest.raises(KeyholeError, match="'' is not the tenant"):
        opening(f"{server}&collection=Shared")
    assert opening(f"{server}&collection=Shared&tenant=a").shape == (3, 4)


def test_missing_parts_are_named(server):
    with pytest.raises(
        InputError, match=r"collection \(Bare, Empty, .*add \?collection=NAME"
    ):
        opening(server)
    with pytest.raises(InputError, match="has no collection Nothing: choose among"):
        opening(f"{server}&collection=Nothing")
    with pytest.raises(InputError, match="Empty holds no vectors"):
        opening(f"{server}&collection=Empty")
    with pytest.raises(InputError, match="has no vector of an object"):
        opening(f"{server}&collection=Bare")


def test_servers_that_do_not_answer_are_named(server, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
    address = server.partition("?")[0]
    with pytest.raises(
        KeyholeError, match=f"does not answer on its gRPC port, {nobody}: open"
    ):
        opening(f"{address}?grpc_port={nobody}")
    with pytest.raises(KeyholeError, match="is Weaviate running there") as refused:
        opening(f"weaviate:http://somebody:s3cret@127.0.0.1:{nobody}")
    assert "s3cret" not in str(refused.value)
    for wrong in (
        f"weaviate:{tmp_path}",
        f"{address}?grpc_port=x",
        "weaviate:http://host:x",
    ):
        with pytest.raises(
            InputError, match="is not an address of Weaviate: write weaviate:http://"
        ):
            opening(wrong)


def test_the_key_comes_from_the_environment(monkeypatch):
    with served({"Letters": Collection(objects(VECTORS[:3]))}, key="s3cret") as (
        address,
        port,
    ):
        target = f"weaviate:{address}?grpc_port={port}"
        for key in ("", "wrong"):
            monkeypatch.setenv("KEYHOLE_API_KEY", key)
            with pytest.raises(
                InputError, match="asks for a key, or another: set KEYHOLE_API_KEY"
            ):
                opening(target)
        monkeypatch.setenv("KEYHOLE_API_KEY", "s3cret")
        assert opening(target).shape == (3, 4)


def test_another_machine_needs_authorization():
    assert address_of("weaviate:https://host:8080?collection=a") == "https://host:8080"
    with pytest.raises(InputError, match="another machine: give --authorized"):
        keyhole.audit("weaviate:http://192.0.2.1:8080", model="demo")
