"""A small server on the loopback address that speaks the Open Inference Protocol.

It answers with a function of the inputs of a request, states the metadata that it is
given, and records the requests. Unlike MLServer, behind examples/serve_target.py, it can
state any tensors.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

Inputs = dict[str, Any]  # tensors by name, as they were sent
Answer = Callable[[Inputs], list[dict[str, Any]]]


class Endpoint:
    """The metadata and the answers of the server, and the requests that it received."""

    def __init__(
        self, inputs: list[dict[str, Any]], answer: Answer, **stated: Any
    ) -> None:
        self.metadata = {"name": "m", "inputs": inputs, **stated}
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.token: str | None = (
            # without it requests are refused, by an error that quotes what was sent
            None
        )
        self.routes: dict[str, Any] = {}
        self.twice = False  # every answer is sent twice, without the id of its request
        self.url = ""

    @property
    def address(self) -> str:
        return f"{self.url}/v2/models/m"


def scores(
    target: Callable[[torch.Tensor], torch.Tensor], datatype: str = "FP64"
) -> Answer:
    """Answer with an oracle's answers to the first float input."""

    def answer(inputs: Inputs) -> list[dict[str, Any]]:
        tensor = next(
            item for item in inputs.values() if item["datatype"].startswith("FP")
        )
        X = torch.tensor(tensor["data"], dtype=torch.float64).reshape(tensor["shape"])
        y = target(X)
        data = y.float() if datatype == "FP32" else y
        return [output("answers", datatype, y.shape, data.reshape(-1).tolist())]

    return answer


def output(name: str, datatype: str, shape: Any, data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}


def vectors(
    dim: int, datatype: str = "FP64", name: str = "sequences"
) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [-1, -1, dim]}


@contextmanager
def serving(endpoint: Endpoint, certificate: Path | None = None) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = (
            -1
        )  # one packet for head and body: the second would wait for an acknowledgement

        def do_GET(self):
            if self._refused():
                return
            route = self.path.removeprefix("/v2/models/m")
            known = {"": endpoint.metadata, "/ready": {}, **endpoint.routes}
            self._reply(200 if route in known else 404, known.get(route, {}))

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._refused():
                return
            endpoint.requests.append(content)
            endpoint.headers.append(dict(self.headers))
            outputs = endpoint.answer(
                {tensor["name"]: tensor for tensor in content["inputs"]}
            )
            number = {} if endpoint.twice else {"id": content.get("id")}
            self._reply(200, {"model_name": "m", **number, "outputs": outputs})
            if endpoint.twice:
                self._reply(200, {"model_name": "m", "outputs": outputs})

        def _refused(self) -> bool:
            sent = self.headers.get("Authorization", "")
            if endpoint.token is None or sent == endpoint.token:
                return False
            self._reply(401, {"error": f"unknown token {sent}"})
            return True

        def _reply(self, status, content):
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(
            self, request, client_address
        ):  # of a client that closed its connection
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    endpoint.url = f"{scheme}://127.0.0.1:{server.server_port}"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def self_signed(folder: Path, address: str = "IP:127.0.0.1") -> Path:
    """Write a key and a self-signed certificate into one PEM file."""
    key = folder / "key.pem"
    certificate = folder / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
        "-days",
        "2",
        "-subj",
        "/CN=keyhole-test",
        "-addext",
        f"subjectAltName={address}",
    ]
    subprocess.run(command, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text(key.read_text() + certificate.read_text())
    return both
