"""A stand-in for Weaviate's server, which no package contains, as its own client reads it.

It answers GET /v1/meta and /v1/schema over HTTP, and `Search` over gRPC in the messages
that the client contains: objects sorted by id, those after an id, or those of a filter
by id. It answers no request that changes anything. The fields are those that the client
reads and the server's source fills; the answers were not compared with a real server.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from uuid import UUID

import grpc
from weaviate.proto.v1 import base_pb2, search_get_pb2, weaviate_pb2_grpc

_DEFAULT_LIMIT = 10  # objects in an answer if a request states no limit
_FLAT = {"distance": "cosine", "vectorCacheMaxObjects": 1}


@dataclass
class Collection:
    """Objects by id, each with vectors by name (or one without a name) and properties."""

    objects: Mapping[UUID, tuple[Any, Mapping[str, Any]]]
    tenant: str = ""
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        vectors = next(iter(self.objects.values()), ([], {}))[0]
        self.names = tuple(vectors) if isinstance(vectors, dict) else ()

    def schema(self, name: str) -> dict[str, Any]:
        index = {"vectorIndexType": "flat", "vectorIndexConfig": _FLAT}
        named = {each: {"vectorizer": {"none": {}}, **index} for each in self.names}
        kinds = {"vectorConfig": named} if named else {"vectorizer": "none", **index}
        return {"class": name, "properties": [], **kinds}


class _Service(weaviate_pb2_grpc.WeaviateServicer):
    def __init__(self, collections: Mapping[str, Collection], key: str) -> None:
        self.collections = collections
        self.key = key

    def Search(self, request: Any, context: Any) -> Any:  # noqa: N802
        sent = dict(context.invocation_metadata()).get("authorization")
        if self.key and sent != f"Bearer {self.key}":
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "unauthorized: invalid api key"
            )
        collection = self.collections[request.collection]
        if request.tenant != collection.tenant:
            context.abort(
                grpc.StatusCode.UNKNOWN, f"{request.tenant!r} is not the tenant"
            )
        ids = sorted(collection.objects)
        if request.HasField("filters"):
            wanted = {UUID(text) for text in _ids(request.filters)}
            ids = [each for each in ids if each in wanted]
        if request.after:
            ids = [each for each in ids if each > UUID(request.after)]
        results = [
            _result(request, each, *collection.objects[each])
            for each in ids[: request.limit or _DEFAULT_LIMIT]
        ]
        return search_get_pb2.SearchReply(results=results)


def _ids(filters: Any) -> list[str]:
    if filters.operator == base_pb2.Filters.OPERATOR_OR:
        return [text for each in filters.filters for text in _ids(each)]
    assert filters.operator == base_pb2.Filters.OPERATOR_EQUAL
    assert filters.target.property == "_id"
    return [filters.value_text]


def _result(
    request: Any, key: UUID, vectors: Any, properties: Mapping[str, Any]
) -> Any:
    metadata = search_get_pb2.MetadataResult(id=str(key), id_as_bytes=key.bytes)
    if request.metadata.vector and isinstance(vectors, dict):
        for name, values in vectors.items():
            metadata.vectors.add(
                name=name, vector_bytes=_bytes(values), type="VECTOR_TYPE_SINGLE_FP32"
            )
    elif request.metadata.vector:
        metadata.vector_bytes = _bytes(vectors)
    result = search_get_pb2.SearchResult(metadata=metadata)
    whole = not request.HasField("properties")
    named = request.properties.non_ref_properties
    for name, value in properties.items():
        if whole or name in named:
            kind = "text_value" if isinstance(value, str) else "int_value"
            setattr(result.properties.non_ref_props.fields[name], kind, value)
    return result


def _bytes(values: Any) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _handler(
    collections: Mapping[str, Collection], key: str
) -> type[BaseHTTPRequestHandler]:
    answers = {
        "/v1/meta": {"version": "1.34.0", "grpcMaxMessageSize": 104858000},
        "/v1/schema": {
            "classes": [each.schema(name) for name, each in collections.items()]
        },
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = 200
            body = answers.get(self.path)
            if body is None:
                status = 404
                body = {"code": 404}
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                status = 401
                body = {"code": 401, "message": "anonymous access not enabled"}
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def served(
    collections: Mapping[str, Collection], key: str = ""
) -> Generator[tuple[str, int]]:
    """Yield the address of the stand-in and its gRPC port."""
    calls = grpc.server(ThreadPoolExecutor(2))
    weaviate_pb2_grpc.add_WeaviateServicer_to_server(_Service(collections, key), calls)
    port = calls.add_insecure_port("127.0.0.1:0")
    calls.start()
    pages = ThreadingHTTPServer(("127.0.0.1", 0), _handler(collections, key))
    thread = Thread(target=pages.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{pages.server_port}", port
    finally:
        pages.shutdown()
        pages.server_close()
        thread.join()
        calls.stop(grace=0).wait()
