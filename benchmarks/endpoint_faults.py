"""An endpoint that fails, is killed, or is hostile: is the result the same, what is paid twice?

The server is a process of its own: its diary gets a line for each question that is answered, before
the answer is sent, and one more when it has been sent whole. Each kind of fault hits 10% of the
requests; then clients and servers are killed with SIGKILL, and two clients share one ledger. A
question may be asked again only if its answer never arrived whole, or was in the one batch that a
killed client had not stored yet; those by which a ledger finds out whether the same model still
answers are counted apart. Hostile servers must end in one line, in bounded memory.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import re
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

import show
from keyhole import extract, oracle
from keyhole.extract.extraction import Extraction
from keyhole.oracle import EndpointOptions
from keyhole.oracle.ledger import witnesses
from servers import free_port, wait_for
from show import Row, relative

sys.path.append(str(Path(__file__).parent.parent / "tests" / "oracle"))
from hostile_attack import attack
from hostile_cases import Case, cases

SHARE, BATCH = 0.1, 16  # small batches: many requests, many faults
HOSTILE = (
    "5 GB by length, 200", "endless by chunks, 200", "gzip bomb by end, 200", "a dripping body",
    "redirect to next door", "503, wait 31536000", "JSON: 100,000 lists deep", "outputs: shape NaN",
    "outputs: shape one answer",
)  # fmt: skip
_FORKED = multiprocessing.get_context("fork")  # torch is loaded once
FAULTS = ("delay", "cut", "duplicate", "429", "500", "garbage")
REFUSED = ("429", "500")  # nothing is computed, nothing is paid
SEED, PAUSE = 5, 0.01


def run(quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    dim, kills, restarts = (10, 2, 2) if quick else (32, 20, 3)
    for kind in () if quick else FAULTS:
        yield from measured(f"10% {kind}", dim, undisturbed, kind)
    yield from measured("10% of each of them", dim, undisturbed, *FAULTS)
    yield from measured(f"client killed {kills} times", dim, lambda at: kill_clients(at, kills))
    yield from measured(f"server killed {restarts} times", dim, lambda at: restart(at, restarts))
    yield from measured("two clients, one ledger", dim, two_clients)
    chosen = [case for case in cases() if case.name.startswith(HOSTILE) and case.where != "later"]
    for case in chosen[:2] if quick else chosen:
        yield hostile(case)


@dataclass
class Place:
    """A folder with a diary and a ledger, and the server that writes the first."""

    folder: Path
    dim: int
    shares: dict[str, float]
    port: int = field(default_factory=free_port)
    server: multiprocessing.process.BaseProcess | None = None
    in_flight: Counter[str] = field(default_factory=Counter[str])
    kills: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v2/models/head"

    def start(self) -> None:
        arguments = (self.port, self.folder / "diary", self.dim, self.shares)
        self.server = _FORKED.Process(target=serve, args=arguments)
        self.server.start()
        if not wait_for(self.url, self.server.is_alive):
            raise SystemExit(f"the server at {self.url} did not start")

    def stop(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.join()

    def noted(self, what: str) -> list[str]:
        """Digests of the questions that were asked, or whose answers were sent."""
        file = self.folder / "diary"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.split()[1] for line in lines if line.startswith(f"{what} ")]

    def stored(self) -> int:
        """Answers in the ledger."""
        with suppress(sqlite3.Error), closing(sqlite3.connect(self.folder / "run.db")) as db:
            return int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
        return 0

    @contextmanager
    def client(self, name: str = "result") -> Iterator[multiprocessing.process.BaseProcess]:
        """An extraction in a process of its own, which is killed if it has not ended."""
        process = _FORKED.Process(target=extraction, args=(self.url, self.folder, name))
        process.start()
        try:
            yield process
        finally:
            process.kill()
            process.join()


def extraction(url: str, folder: Path, name: str) -> None:
    options = EndpointOptions(batch=BATCH)
    result = extract.run(url, "single-head", ledger=str(folder / "run.db"), endpoint=options)
    result.save(str(folder / f"{name}.json"))


def undisturbed(place: Place) -> None:
    with place.client() as process:
        process.join(300)


def kill_clients(place: Place, times: int) -> None:
    """Clients that are killed on their way, one after the other, and a last one that is not."""
    chance = random.Random(7)
    for _ in range(times):
        with place.client() as process:
            before = len(place.noted("asked"))
            while process.is_alive() and len(place.noted("asked")) == before:
                time.sleep(0.002)
            process.join(chance.uniform(0.0, 0.15))
            place.kills += process.is_alive()
        time.sleep(0.05)  # what was under way is answered, to nobody
        sent = list(dict.fromkeys(place.noted("sent")))  # in the order of their turns
        place.in_flight += Counter(sent[place.stored() :])
    undisturbed(place)


def restart(place: Place, times: int) -> None:
    """A server that is killed under way and comes back at the same address."""
    with place.client() as process:
        for number in range(times):
            goal = (number + 1) * (place.dim**2 + place.dim) // (times + 1)
            while process.is_alive() and len(place.noted("asked")) < goal:
                time.sleep(0.002)
            place.kills += process.is_alive()
            place.stop()
            place.start()
        process.join(300)


def two_clients(place: Place) -> None:
    with place.client() as process, place.client("other") as other:
        process.join(300)
        other.join(300)


def measured(what: str, dim: int, disturb: Callable[[Place], None], *faults: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name), dim, dict.fromkeys(faults, SHARE))
        try:
            place.start()
            _, seconds = show.timed(lambda: disturb(place))
        finally:
            place.stop()
        results = [Extraction.load(file) for file in sorted(place.folder.glob("*.json"))]
        asked, sent = Counter(place.noted("asked")), Counter(place.noted("sent"))
        lost = len(asked) - place.stored()
        with closing(sqlite3.connect(place.folder / "run.db")) as db:
            watched = {digest(question[0]) for _, question in witnesses(db)}
    truth = oracle.plant(dim=dim, seed=SEED)
    plain = extract.SingleHead()(truth)  # the same attack without a network
    same = sum(
        result.status is plain.status
        and result.queries == plain.queries == dim**2 + dim
        and torch.equal(result.model.W, plain.model.W)
        for result in results
    )
    worst = max((relative(result.model.W, truth.W) for result in results), default=float("inf"))
    again = {name: count - 1 for name, count in asked.items() if count > 1}
    twice = {name: count for name, count in again.items() if name not in watched}
    excused = asked - sent + place.in_flight
    beyond = sum(max(0, count - excused[name]) for name, count in twice.items())
    yield Row(
        f"{what}: results the same bit for bit, error of W",
        f"{same} of {len(results)}, {worst:.0e}",
        "all, <= 1e-10",
        0 < same == len(results) and worst <= 1e-10,
        f"{dim**2 + dim:,} queries of the attack; asked again: {sum(twice.values())} whose answer "
        f"was spoiled or in flight, {sum(again.values()) - sum(twice.values())} checks of the "
        f"ledger{f'; {place.kills} kills' if place.kills else ''}; {seconds:.1f} s",
    )
    yield show.exactly(f"{what}: answers lost", lost, 0)
    yield show.exactly(f"{what}: paid twice beyond what was in flight", beyond, 0)


def hostile(case: Case) -> Row:
    error, seconds, memory = attack(case)
    line = str(error)
    return Row(
        f"hostile: {case}",
        f"{seconds:.1f} s, {max(0, memory) / 1e6:.0f} MB",
        "< 60 s, < 500 MB, one line",
        re.search(case.match, line) is not None and line.isprintable()
        and memory < 500e6 and seconds < 60,
        re.sub(r"http://127.0.0.1:\d+", "http://…", line)[:110],
    )  # fmt: skip


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
            "name": "y", "datatype": "FP64", "shape": [len(answers)], "data": answers.tolist(),
        }  # fmt: skip
        body = {"model_name": "head", "id": content.get("id"), "outputs": [output]}
        self._send(200, body, fault)
        if fault not in ("cut", "garbage") and not self.stale:
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
    Faulty.target, Faulty.diary, Faulty.shares = oracle.plant(dim=dim, seed=SEED), diary, shares
    Quiet(("127.0.0.1", port), Faulty).serve_forever()


if __name__ == "__main__":
    show.main(run)
