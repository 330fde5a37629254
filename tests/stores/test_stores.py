"""Every kind of store: the vectors are read, and no file changes."""

from __future__ import annotations

import json
import pickle
import sqlite3
import sys

import numpy as np
import pytest
import torch

import made_stores
from keyhole.core.errors import InputError, MissingExtra
from keyhole.stores import KINDS, kind_of, open_store
from keyhole.target import STORES

VECTORS = np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32)
TEXTS = [f"letter {number}" for number in range(10)]
ROWS = [0, 2, 3, 9]


@pytest.mark.parametrize("maker", made_stores.MAKERS, ids=lambda maker: maker.__name__)
def test_vectors_are_read_and_nothing_changes(maker, tmp_path):
    target = maker(tmp_path, VECTORS, TEXTS)
    before = made_stores.fingerprint(tmp_path)
    with open_store(target) as store:
        assert (store.count, store.dim) == VECTORS.shape
        assert torch.equal(store.read(ROWS).float(), torch.from_numpy(VECTORS[ROWS]))
        whole = torch.cat([vectors for _, vectors in store.batches()])
        assert torch.equal(whole.float(), torch.from_numpy(VECTORS))
        assert store.identity.startswith("10 vectors of 6 numbers")
        assert (store.texts is not None) == (maker in made_stores.WITH_TEXTS)
        if store.texts is not None:
            assert store.texts(ROWS) == [TEXTS[row] for row in ROWS]
    assert made_stores.fingerprint(tmp_path) == before


def test_the_identity_depends_on_the_vectors_alone(tmp_path):
    first = tmp_path / "first"
    second = tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    targets = [
        made_stores.npy(first, VECTORS, TEXTS),
        made_stores.jsonl(second, VECTORS, TEXTS),
        made_stores.npy(second, VECTORS[::-1], TEXTS),
    ]
    identities = []
    for target in targets:
        with open_store(target) as store:
            identities.append(store.identity)
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("chroma:folder", "Chroma"),
        ("chroma:folder?collection=a", "Chroma"),
        ("qdrant:/x", "Qdrant"),
        ("lancedb:x", "LanceDB"),
        ("milvus:x.db?collection=a", "Milvus"),
        ("milvus:http://root:secret@host:19530", "Milvus"),
        ("weaviate:http://host:8080?collection=a", "Weaviate"),
        ("postgresql://u@h/db?table=t&column=c", "PostgreSQL"),
        ("postgres:///db", "PostgreSQL"),
        ("x/y.faiss", "an index of FAISS"),
        ("y.parquet?column=v", "Parquet"),
        ("y.npy", "a NumPy array"),
        ("y.jsonl", "JSON lines"),
        ("https://host/v1/embeddings", "a server of embeddings"),
        ("http://host:1/v1/embeddings?model=m", "a server of embeddings"),
        ("http://host:1/v2/models/m", None),
        ("http://host/y.npy", None),
        ("demo", None),
        ("owner/model", None),
        ("target.safetensors", None),
    ],
)
def test_the_kind_of_a_target(target, name):
    kind = kind_of(target)
    assert (None if kind is None else kind.name) == name


def test_every_kind_has_a_name_and_a_form_of_its_own():
    assert (
        len({kind.name for kind in KINDS})
        == len({kind.form for kind in KINDS})
        == len(KINDS)
    )


def test_half_precision_is_kept(tmp_path):
    with open_store(
        made_stores.npy(tmp_path, VECTORS.astype(np.float16), TEXTS)
    ) as store:
        assert store.read(ROWS).dtype == torch.float16


def opening(target):
    with open_store(str(target)) as store:
        return store.read(range(store.count))


def test_one_of_several_columns_must_be_named(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps({"a": [1.0, 2.0], "b": [3.0, 4.0]}) + "\n")
    with pytest.raises(
        InputError, match=r"has more than one .* \(a, b\): add \?column=NAME"
    ):
        opening(path)
    with pytest.raises(
        InputError, match=r"has no field that holds a vector c: choose among a, b"
    ):
        opening(f"{path}?column=c")
    with pytest.raises(
        InputError, match=r"has no option \?table=: .* are \?column=, \?text="
    ):
        opening(f"{path}?table=c")
    assert opening(f"{path}?column=b").tolist() == [[3.0, 4.0]]


WRONG = {
    "empty.jsonl": b"",
    "words.jsonl": b'{"text": "a"}\n',
    "ragged.jsonl": b"[1.0, 2.0]\n[1.0]\n",
    "infinite.jsonl": b"[1e400, 2.0]\n",
    "large.jsonl": b"[1%s, 2.0]\n" % (b"0" * 400),
    "half.jsonl": b"[1.0, 2.0]\n[1.0,",
    "garbage.npy": b"garbage",
    "garbage.parquet": b"garbage",
    "garbage.faiss": b"garbage",
}


@pytest.mark.parametrize("name", WRONG)
def test_files_without_vectors_are_one_line_errors(name, tmp_path):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    if name.endswith(".faiss"):
        pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    (tmp_path / name).write_bytes(WRONG[name])
    with pytest.raises(InputError, match=f"{name}.*") as raised:
        opening(tmp_path / name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "target", ["none.npy", "none.faiss", "chroma:none", "qdrant:none", "lancedb:none"]
)
def test_missing_stores_are_one_line_errors(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"none\b.*:"):
        opening(target)


def test_arrays_without_vectors_are_refused(tmp_path):
    np.save(tmp_path / "flat.npy", VECTORS[0])
    np.save(tmp_path / "whole.npy", VECTORS.astype(int))
    np.save(tmp_path / "objects.npy", np.array([[{}]]), allow_pickle=True)
    for name in ("flat", "whole", "objects"):
        with pytest.raises(InputError, match="array of"):
            opening(tmp_path / f"{name}.npy")


def test_nan_is_refused(tmp_path):
    broken = VECTORS.copy()
    broken[4, 1] = np.nan
    with pytest.raises(InputError, match=r"row 4 of .* holds NaN or infinity"):
        opening(made_stores.npy(tmp_path, broken, TEXTS))


def test_a_pickled_point_runs_nothing(tmp_path):
    """Unpickling this point would write a file."""
    witness = tmp_path / "witness"

    class Trap:
        def __reduce__(self):
            return (exec, (f"open({str(witness)!r}, 'w').close()",))

    with pytest.raises(AttributeError):  # what plain unpickling does
        pickle.loads(pickle.dumps(Trap())).fields  # noqa: B018
    assert witness.exists()
    witness.unlink()
    folder = tmp_path / "qdrant" / "collection" / "letters"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "storage.sqlite") as database:
        database.execute("CREATE TABLE points (id TEXT PRIMARY KEY, point BLOB)")
        database.execute("INSERT INTO points VALUES ('a', ?)", (pickle.dumps(Trap()),))
    database.close()
    with pytest.raises(InputError, match="a point of Qdrant without a vector"):
        opening(f"qdrant:{tmp_path / 'qdrant'}")
    assert not witness.exists()


def test_a_store_that_is_being_written_is_refused(tmp_path):
    target = made_stores.qdrant(tmp_path, VECTORS, TEXTS)
    (tmp_path / "qdrant" / "collection" / "letters" / "storage.sqlite-wal").touch()
    with pytest.raises(InputError, match="Qdrant is writing to"):
        opening(target)


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("chromadb", "chroma:c"),
        ("lancedb", "lancedb:c"),
        ("faiss", "x.faiss"),
        ("pyarrow.parquet", "x.parquet"),
        ("psycopg", "postgresql://localhost/none"),
        ("weaviate", "weaviate:http://localhost"),
    ],
)
def test_a_missing_library_names_its_extra(module, target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").mkdir()
    for name in ("c/chroma.sqlite3", "x.faiss", "x.parquet"):
        (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"pip install 'keyhole\[stores\]'"):
        opening(target)


def test_every_form_of_a_target_has_a_store_that_opens_it():
    assert [kind.form for kind in KINDS] == list(STORES)


def test_an_archive_of_arrays_is_no_array(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.savez(file, a=VECTORS)
    with pytest.raises(InputError, match="npz"):
        opening(tmp_path / "x.npy")


@pytest.mark.parametrize("option", ["", "?text=text", "?text=words"])
def test_a_row_without_a_text_does_not_hide_the_texts_of_others(tmp_path, option):
    name = option.partition("=")[2] or "text"
    rows = [{name: None, "v": [1.0, 2.0]}, {"id": "b", name: "second", "v": [1.0, 3.0]}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with open_store(f"{tmp_path / 'x.jsonl'}{option}") as store:
        assert store.texts is not None
        assert store.texts([0, 1]) == [None, "second"]


@pytest.mark.parametrize("maker", [made_stores.qdrant, made_stores.milvus])
def test_a_point_without_a_text_does_not_hide_the_texts_of_others(maker, tmp_path):
    texts = [7, *TEXTS[1:]]
    with open_store(maker(tmp_path, VECTORS, texts)) as store:
        assert store.texts is not None
        assert store.texts([0, 1]) == [None, TEXTS[1]]


def test_texts_of_categories_are_texts(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    target = made_stores.parquet(
        tmp_path, VECTORS, arrow.array(TEXTS).dictionary_encode()
    )
    with open_store(target) as store:
        assert store.texts is not None
        assert store.texts([0, 1]) == TEXTS[:2]


def test_a_byte_order_mark_before_json_lines_is_no_error(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a", "v": [1.0, 2.0]}\n')
    with open_store(str(tmp_path / "x.jsonl")) as store:
        assert store.texts is not None
        assert store.texts([0]) == ["a"]
