"""A head behind MLServer, stolen over HTTP: how exactly, with how many queries, how fast?

`keyhole lab serve` is a process of its own. The loop of single requests asks the same one by
one on one connection that stays open; both are timed in the same run, one after the other.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.oracle import OpenInference, Oracle
from show import Row, relative


class Noting:
    """An oracle that keeps its questions and how long they took."""

    def __init__(self, inner: Oracle) -> None:
        self.inner, self.dim = inner, inner.dim
        self.batches: list[tuple[Tensor, float]] = []

    def __call__(self, sequences: Tensor) -> Tensor:
        started = time.perf_counter()
        answers = self.inner(sequences)
        self.batches.append((sequences, time.perf_counter() - started))
        return answers

    def first(self, queries: int) -> tuple[list[Tensor], float]:
        """The batches of the first so many queries, and the seconds they took."""
        batches: list[Tensor] = []
        seconds = 0.0
        for sequences, took in self.batches:
            if sum(map(len, batches)) >= queries:
                break
            batches.append(sequences)
            seconds += took
        return batches, seconds


@contextmanager
def served(target: oracle.Planted, folder: Path) -> Iterator[str]:
    oracle.save(target, folder / "target.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "keyhole", "serve", str(folder / "target.safetensors")]
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    with (
        log.open("w") as lines,
        subprocess.Popen([*command, "--port", str(port)], stdout=lines, stderr=lines) as process,
    ):
        try:
            for _ in range(600):
                with suppress(httpx.TransportError):
                    if httpx.get(f"{url}/v2/models/target/ready").is_success:
                        break
                time.sleep(0.1)
            else:
                raise SystemExit(f"expected a server, got {log.read_text()[-500:]}")
            yield url
        finally:
            process.kill()


def run(quick: bool) -> list[Row]:
    if importlib.util.find_spec("mlserver") is None:
        return [Row("extraction from MLServer", "MLServer is not installed: keyhole[serve]")]
    torch.set_num_threads(1)
    dim = 8 if quick else 32
    target = oracle.plant(dim=dim, seed=3)
    with (
        tempfile.TemporaryDirectory() as name,
        served(target, Path(name)) as url,
        closing(OpenInference(url, "target")) as remote,
    ):
        noting = Noting(remote)
        result = extract.SingleHead()(noting)
        batches, together = noting.first(result.queries)
        started = time.perf_counter()
        for sequences in batches:
            for question in sequences:
                remote(question.unsqueeze(0))
        single = time.perf_counter() - started
    floor, paid = dim**2 + dim, sum(map(len, batches))
    error = relative(result.model.W, target.W) if result.model else float("inf")
    what = f"MLServer, d={dim}"
    return [
        Row(f"{what}: error of W", f"{error:.0e}", "<= 1e-10", error <= 1e-10, str(result.status)),
        Row(f"{what}: queries paid for", f"{paid:,}", f"d² + d = {floor:,}", paid == floor),
        Row(
            f"{what}: faster than a loop of single requests by",
            f"{single / together:.1f}",
            ">= 5",
            single / together >= 5,
            f"{together:.2f} s in {len(batches)} batches, {single:.2f} s one by one",
            promise=False,
        ),
    ]


if __name__ == "__main__":
    show.main(run, __doc__)
