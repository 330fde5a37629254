"""A real store of every kind with known vectors, written by the kind's own library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest


def npy(folder: Path, vectors: np.ndarray, texts: list[str]) -> str:
    np.save(folder / "vectors.npy", vectors)
    return str(folder / "vectors.npy")


def jsonl(folder: Path, vectors: np.ndarray, texts: list[str]) -> str:
    path = folder / "vectors.jsonl"
    rows = zip(vectors.tolist(), texts, strict=True)
    path.write_text(
        "".join(json.dumps({"embedding": v, "text": t}) + "\n" for v, t in rows)
    )
    return str(path)


def parquet(folder: Path, vectors: np.ndarray, texts: list[str]) -> str:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = arrow.table({"embedding": list(vectors), "text": texts})
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(table, folder / "vectors.parquet", row_group_size=3)
    return str(folder / "vectors.parquet")


def faiss(folder: Path, vectors: np.ndarray, texts: list[str]) -> str:
    library = _faiss()
    index = library.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    library.write_index(index, str(folder / "vectors.faiss"))
    return str(folder / "vectors.faiss")


def faiss_inverted(folder: Path, vectors: np.ndarray, texts: list[str]) -> str:
    """Write an inverted file: vectors in lists around centres, with ids of their own."""
    library = _faiss()
    width = vectors.shape[1]
    index = library.IndexIDMap2(
        library.IndexIVFFlat(library.IndexFlatL2(width), width, 2)
    )
    index.train(np.random.default_rng(0).normal(size=(100, width)).astype(np.float32))
    index.add_with_ids(vectors, 1000 + 7 * np.arange(len(vectors)))
    library.write_index(index, str(folder / "inverted.faiss"))
    return str(folder / "inverted.faiss")


def qdrant(folder: Path, vectors: np.ndarray, texts: list[str]) -> str:
    library = pytest.importorskip(
        "qdrant_client", reason="qdrant-client is not installed"
    )
    models = library.models
    client = library.QdrantClient(path=str(folder / "qdrant"))
    shape = models.VectorParams(size=vectors.shape[1], distance=models.Distance.DOT)
    client.create_collection("letters", vectors_config=shape)
    rows = enumerate(zip(vectors.tolist(), texts, strict=True))
    client.upsert(
        "letters",
        [
            models.PointStruct(id=n, vector=v, payload={"text": t, "n": n})
            for n, (v, t) in rows
        ],
    )
    client.close()
    return f"qdrant:{folder / 'qdrant'}"


def chroma(folder: Path, vectors: np.ndarray, texts: list[str]) -> str:
    library = pytest.importorskip("chromadb", reason="chromadb is not installed")
    settings = library.Settings(anonymized_telemetry=False)
    client = library.PersistentClient(str(folder / "chroma"), settings)
    collection = client.create_collection("letters")
    ids = [f"{number:03}" for number in range(len(texts))]
    collection.add(ids=ids, embeddings=vectors, documents=texts)
    client.close()
    return f"chroma:{folder / 'chroma'}"


def lancedb(folder: Path, vectors: np.ndarray, texts: list[str]) -> str:
    library = pytest.importorskip("lancedb", reason="lancedb is not installed")
    rows = [{"vector": v, "text": t} for v, t in zip(vectors, texts, strict=True)]
    library.connect(str(folder / "lance")).create_table("letters", rows)
    return f"lancedb:{folder / 'lance'}"


def milvus(folder: Path, vectors: np.ndarray, texts: list[str]) -> str:
    library = pytest.importorskip("pymilvus", reason="pymilvus is not installed")
    manager = pytest.importorskip("milvus_lite.server_manager", reason="no milvus-lite")
    path = str(folder / "milvus.db")
    client = library.MilvusClient(path)
    client.create_collection("letters", dimension=vectors.shape[1])
    rows = enumerate(zip(vectors.tolist(), texts, strict=True))
    client.insert("letters", [{"id": n, "vector": v, "text": t} for n, (v, t) in rows])
    client.close()
    manager.server_manager_instance.release_server(path)
    return f"milvus:{path}"


def _faiss():
    pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    import faiss

    return faiss


MAKERS = (npy, jsonl, parquet, faiss, faiss_inverted, qdrant, chroma, lancedb, milvus)
WITH_TEXTS = (jsonl, parquet, qdrant, chroma, lancedb, milvus)


def fingerprint(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and the content of every file and folder in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            b"" if path.is_dir() else path.read_bytes(),
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }
