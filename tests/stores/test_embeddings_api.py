"""A server of embeddings in OpenAI's form, on the loopback address, with an encoder behind it."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

import tiny_models as tiny
from keyhole.audit.stores import StoreTarget
from keyhole.core.errors import InputError
from keyhole.models.capture import Exposure
from keyhole.oracle.protocol import OracleError
from keyhole.recover.embeddings.pooling import embeddings
from keyhole.stores import open_store

TEXTS = [f"w{number} w{number + 1}" for number in range(40)]
MODEL = tiny.model("bert", num_hidden_layers=1)
WORDS = tiny.tokenizer()
WAY = Exposure("pooled", 0, "cls", normalised=True)


@contextmanager
def serving(models=("tiny",), answer=None):
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": name} for name in models]})

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(
                (self.path, request["model"], len(request["input"]), dict(self.headers))
            )
            given = embeddings(MODEL, WORDS, request["input"], WAY).tolist()
            entries = [
                {"index": n, "embedding": vector} for n, vector in enumerate(given)
            ]
            self.reply({"data": entries[::-1]} if answer is None else answer)

        def reply(self, content):
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/embeddings", asked
        finally:
            server.shutdown()
            thread.join()


def test_the_server_embeds_known_texts(monkeypatch):
    monkeypatch.setenv("KEYHOLE_API_KEY", "a key")
    with serving() as (url, asked), open_store(url, TEXTS) as store:
        assert (store.count, store.dim) == (40, 32)
        expected = embeddings(MODEL, WORDS, TEXTS, WAY)
        assert torch.equal(store.read(range(40)), expected)
        assert [count for _, _, count, _ in asked] == [1, 32, 8]
        assert {(path, model) for path, model, _, _ in asked} == {
            ("/v1/embeddings", "tiny")
        }
        assert all(headers["Authorization"] == "Bearer a key" for *_, headers in asked)
        loaded = tiny.loaded(MODEL, name="a tiny encoder")
        target = StoreTarget.of(store, loaded, texts=3)
    way = target.pooling.exposure
    assert (way.pooling, way.normalised, target.pooling.sure) == ("cls", True, True)


def test_one_of_several_models_must_be_named():
    with serving(models=("a", "b")) as (url, asked):
        with pytest.raises(
            InputError, match=r"several models \(a, b\): add \?model=NAME"
        ):
            open_store(url, TEXTS).__enter__()
        with open_store(f"{url}?model=b", TEXTS):
            assert asked[0][1] == "b"


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"data": []},
        {"data": [{"index": 0}]},
        {"data": 3},
        {"data": [{"index": 0, "embedding": ["a"]}]},
    ],
)
def test_a_wrong_answer_is_a_one_line_error(answer):
    with (
        serving(answer=answer) as (url, _),
        pytest.raises(OracleError, match=r"http.* answer(ed)? with .*embeddings"),
    ):
        open_store(url, TEXTS).__enter__()


def test_known_texts_are_required():
    with pytest.raises(InputError, match="give --known with texts"):
        open_store("http://127.0.0.1:9/v1/embeddings").__enter__()
