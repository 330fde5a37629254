"""An endpoint that fails, is killed, or is hostile: is the result the same, what is paid twice?

The server is a process of its own that writes down every question it answers. Each kind of fault
hits 10% of the requests; then clients and servers are killed with SIGKILL, and two clients share
one ledger. A question may be asked again only if its answer never arrived whole, or was in the one
batch that a killed client had not stored yet; those by which a ledger finds out whether the same
model still answers are counted apart. Hostile servers must end in one line, in bounded memory.
"""

from __future__ import annotations

import multiprocessing
import random
import re
import socket
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

import show
from faulty_server import FAULTS, digest, serve, target_of
from keyhole import extract
from keyhole.extract.extraction import Extraction
from keyhole.oracle import EndpointOptions
from keyhole.oracle.ledger import witnesses
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


@dataclass
class Place:
    """A folder with a diary and a ledger, and the server that writes the one."""

    folder: Path
    dim: int
    shares: dict[str, float]
    port: int
    server: multiprocessing.process.BaseProcess | None = None
    in_flight: Counter[str] = field(default_factory=Counter[str])
    kills: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v2/models/head"

    @property
    def ledger(self) -> Path:
        return self.folder / "run.db"

    def start(self) -> None:
        arguments = (self.port, self.folder / "diary", self.dim, self.shares)
        self.server = _FORKED.Process(target=serve, args=arguments)
        self.server.start()
        for _ in range(600):
            with suppress(httpx.TransportError):
                if httpx.get(self.url).is_success:
                    return
            time.sleep(0.05)
        raise SystemExit(f"expected a server at {self.url}, got none")

    def stop(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.join()

    def noted(self, what: str) -> Counter[str]:
        file = self.folder / "diary"
        lines = file.read_text().splitlines() if file.exists() else []
        return Counter(line.split()[1] for line in lines if line.startswith(f"{what} "))

    def stored(self) -> int:
        with suppress(sqlite3.Error), closing(sqlite3.connect(self.ledger)) as db:
            return int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
        return 0


@contextmanager
def place(dim: int, shares: dict[str, float]) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        made = Place(Path(name), dim, shares, free.getsockname()[1])
        free.close()
        try:
            made.start()
            yield made
        finally:
            made.stop()


def client(url: str, ledger: str, out: str) -> None:
    options = EndpointOptions(batch=BATCH)
    extract.run(url, "single-head", ledger=ledger, endpoint=options).save(out)


@contextmanager
def running(place: Place, name: str = "result") -> Iterator[multiprocessing.process.BaseProcess]:
    """An extraction in a process of its own, which is killed if it has not ended."""
    out = str(place.folder / f"{name}.json")
    process = _FORKED.Process(target=client, args=(place.url, str(place.ledger), out))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def undisturbed(place: Place) -> None:
    with running(place) as process:
        process.join(300)


def killed(times: int) -> Callable[[Place], None]:
    """Clients that are killed on their way, one after the other, and a last one that is not."""

    def disturb(place: Place) -> None:
        chance = random.Random(7)
        for _ in range(times):
            with running(place) as process:
                before = sum(place.noted("asked").values())
                while process.is_alive() and sum(place.noted("asked").values()) == before:
                    time.sleep(0.002)
                process.join(chance.uniform(0.0, 0.15))
                place.kills += process.is_alive()
            time.sleep(0.05)  # what was under way is answered, to nobody
            place.in_flight += _unstored(place)
        undisturbed(place)

    return disturb


def _unstored(place: Place) -> Counter[str]:
    """What was sent to a client that is no more, and is not in the ledger."""
    with closing(sqlite3.connect(place.ledger)) as db:
        known = int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
    sent = list(dict.fromkeys(_lines(place, "sent")))  # in the order of their turns
    return Counter(sent[known:])


def _lines(place: Place, what: str) -> list[str]:
    lines = (place.folder / "diary").read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith(f"{what} ")]


def restarted(times: int) -> Callable[[Place], None]:
    """A server that is killed under way and comes back at the same address."""

    def disturb(place: Place) -> None:
        with running(place) as process:
            for number in range(times):
                goal = (number + 1) * (place.dim**2 + place.dim) // (times + 1)
                while process.is_alive() and sum(place.noted("asked").values()) < goal:
                    time.sleep(0.002)
                place.kills += process.is_alive()
                place.stop()
                place.start()
            process.join(300)

    return disturb


def together(place: Place) -> None:
    """Two clients with one ledger."""
    with running(place) as process, running(place, "other") as other:
        process.join(300)
        other.join(300)


def measured(what: str, dim: int, disturb: Callable[[Place], None], *faults: str) -> list[Row]:
    with place(dim, dict.fromkeys(faults, SHARE)) as there:
        started = time.perf_counter()
        disturb(there)
        seconds = time.perf_counter() - started
        files = sorted(there.folder.glob("*.json"))
        results = [Extraction.load(file) for file in files]
        asked, sent, kept = there.noted("asked"), there.noted("sent"), there.stored()
        with closing(sqlite3.connect(there.ledger)) as db:
            watched = {digest(question[0]) for _, question in witnesses(db)}
    truth = target_of(dim)
    plain = extract.SingleHead()(truth)  # the same attack without a network
    same = [
        result.status is plain.status
        and result.queries == plain.queries == dim**2 + dim
        and torch.equal(result.model.W, plain.model.W)
        for result in results
    ]
    worst = max((relative(result.model.W, truth.W) for result in results), default=float("inf"))
    checks = Counter({name: count - 1 for name, count in asked.items() if name in watched})
    twice = {name: count - 1 for name, count in asked.items() if count > 1 and name not in watched}
    spoiled = asked - sent
    beyond = sum(
        max(0, count - spoiled[name] - there.in_flight[name]) for name, count in twice.items()
    )
    lost = len(set(asked)) - kept
    details = (
        f"{dim**2 + dim:,} queries of the attack; asked again: {sum(twice.values())} whose answer "
        f"was spoiled or in flight, {sum(checks.values())} checks of the ledger"
        f"{f'; {there.kills} kills' if there.kills else ''}; {seconds:.1f} s"
    )
    return [
        Row(
            f"{what}: results the same bit for bit, error of W",
            f"{sum(same)} of {len(same)}, {worst:.0e}",
            "all, <= 1e-10",
            bool(same) and all(same) and worst <= 1e-10,
            details,
        ),
        Row(f"{what}: answers lost", str(lost), "0", lost == 0),
        Row(f"{what}: paid twice beyond what was in flight", str(beyond), "0", beyond == 0),
    ]


def hostile(case: Case) -> Row:
    error, seconds, memory = attack(case)
    line = str(error)
    fine = (
        line.startswith("expected ") and re.search(case.match, line) is not None
        and memory < 500e6 and seconds < 60 and line.isprintable()
    )  # fmt: skip
    shown = re.sub(r"http://127.0.0.1:\d+", "http://…", line)[:110]
    return Row(
        f"hostile: {case}", f"{seconds:.1f} s, {max(0, memory) / 1e6:.0f} MB",
        "< 60 s, < 500 MB, one line", fine, shown,
    )  # fmt: skip


def run(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    dim = 10 if quick else 32
    kinds = [*([] if quick else FAULTS), "all"]
    rows: list[Row] = []
    for kind in kinds:
        faults = FAULTS if kind == "all" else (kind,)
        what = f"10% {kind}" if kind != "all" else "10% of each of them"
        rows += measured(what, dim, undisturbed, *faults)
    times, restarts = (2, 2) if quick else (20, 3)
    rows += measured(f"client killed {times} times", dim, killed(times))
    rows += measured(f"server killed {restarts} times", dim, restarted(restarts))
    rows += measured("two clients, one ledger", dim, together)
    chosen = [case for case in cases() if case.name.startswith(HOSTILE) and case.where != "later"]
    if quick:
        chosen = chosen[:2]
    return [*rows, *(hostile(case) for case in chosen)]


if __name__ == "__main__":
    show.main(run, __doc__)
