"""A head behind HTTP that fails now and then, and writes down what it answers.

The diary gets a line for each question that is answered, before the answer is sent, and one more
when it has been sent whole.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from keyhole import oracle

FAULTS = ("delay", "cut", "duplicate", "429", "500", "garbage")
REFUSED = ("429", "500")  # nothing is computed, nothing is paid
SEED, PAUSE = 5, 0.01


def target_of(dim: int) -> oracle.Planted:
    return oracle.plant(dim=dim, seed=SEED)


def digest(question: torch.Tensor) -> str:
    return hashlib.sha256(question.numpy().tobytes()).hexdigest()


class Faulty(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    target: oracle.Planted
    diary: Path
    shares: dict[str, float]
    chance = random.Random(SEED)
    alone = threading.Lock()
    stale = False  # an answer that nobody asked for is on this connection

    def do_GET(self) -> None:
        shape = [-1, -1, self.target.dim]
        self._send(200, {
            "name": "head", "inputs": [{"name": "x", "datatype": "FP64", "shape": shape}],
        })  # fmt: skip

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self._fault()
        if fault in REFUSED:
            self._send(int(fault), {"error": "not now"})
            return
        tensor = content["inputs"][0]
        questions = torch.tensor(tensor["data"], dtype=torch.float64).reshape(tensor["shape"])
        answers = self.target(questions)
        self._note("asked", questions)
        time.sleep(0.2 if fault == "delay" else PAUSE)
        output = {
            "name": "y",
            "datatype": "FP64",
            "shape": [len(answers)],
            "data": answers.tolist(),
        }
        body = {"model_name": "head", "id": content.get("id"), "outputs": [output]}
        whole = fault not in ("cut", "garbage") and not self.stale
        self._send(200, body, fault)
        if whole:
            self._note("sent", questions)
        self.stale = self.stale or fault == "duplicate"

    def _fault(self) -> str | None:
        with self.alone:
            drawn = self.chance.random()
        for name, share in self.shares.items():
            drawn -= share
            if drawn < 0:
                return name
        return None

    def _send(self, status: int, content: object, fault: str | None = None) -> None:
        body = json.dumps(content).encode()
        if fault == "garbage":
            body = self.chance.randbytes(len(body))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body)
        if fault == "duplicate":
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            self.wfile.write(head + body)

    def _note(self, what: str, questions: torch.Tensor) -> None:
        lines = "".join(f"{what} {digest(question)}\n" for question in questions)
        with self.alone, self.diary.open("a") as file:
            file.write(lines)

    def log_message(self, *_: object) -> None:
        pass


class Quiet(ThreadingHTTPServer):
    allow_reuse_address = daemon_threads = True

    def handle_error(self, *_: object) -> None:  # a client that was killed
        pass


def serve(port: int, diary: Path, dim: int, shares: dict[str, float]) -> None:
    """For ever, on the loopback address; `shares` says how often each fault happens."""
    Faulty.target, Faulty.diary, Faulty.shares = target_of(dim), diary, shares
    Quiet(("127.0.0.1", port), Faulty).serve_forever()
