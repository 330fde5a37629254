"""A head behind MLServer, stolen over HTTP: how exactly, with how many queries, how fast?

`keyhole lab serve` is a process of its own. The loop of single requests asks the same one by
one on one connection that stays open; both are timed in the same run, one after the other.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.oracle import OpenInference
from servers import free_port, serving
from show import Row, relative


class Noting:
    """Keeps the questions, and how long it took until so many were answered."""

    def __init__(self, inner: oracle.Oracle) -> None:
        self.inner, self.dim = inner, inner.dim
        self.batches: list[Tensor] = []
        self._log: list[tuple[int, float]] = [(0, 0.0)]

    def until(self, queries: int) -> float:
        """The seconds of the first so many queries: an attack's, without the judge's."""
        return max(seconds for count, seconds in self._log if count <= queries)

    def __call__(self, sequences: Tensor) -> Tensor:
        self.batches.append(sequences)
        answers, took = show.timed(lambda: self.inner(sequences))
        count, seconds = self._log[-1]
        self._log.append((count + len(sequences), seconds + took))
        return answers


def run(quick: bool) -> Iterator[Row]:
    if importlib.util.find_spec("mlserver") is None:
        yield Row("extraction from MLServer", "MLServer is not installed: keyhole[serve]")
        return
    torch.set_num_threads(1)
    dim = 8 if quick else 32
    target = oracle.plant(dim=dim, seed=3)
    url = f"http://127.0.0.1:{(port := free_port())}"
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "target.safetensors")
        oracle.save(target, file)
        command = [sys.executable, "-m", "keyhole", "lab", "serve", str(file), "--port", str(port)]
        with (
            serving(command, f"{url}/v2/models/target/ready", Path(name)),
            closing(OpenInference(url, "target")) as remote,
        ):
            noting = Noting(remote)
            result = extract.SingleHead()(noting)
            batched, paid = noting.until(result.queries), list[Tensor]()
            while len(paid) < result.queries:
                paid += noting.batches.pop(0)
            _, single = show.timed(lambda: [remote(each.unsqueeze(0)) for each in paid])
    error = relative(result.model.W, target.W) if result.model else float("inf")
    what = f"MLServer, d={dim}"
    yield show.at_most(f"{what}: error of W", error, 1e-10, str(result.status))
    unknowns = dim**2 + dim
    yield Row(f"{what}: queries paid for", f"{len(paid):,}", f"d² + d = {unknowns:,}",
              len(paid) == unknowns)  # fmt: skip
    yield show.ratio(
        f"{what}: faster than a loop of single requests by",
        f"{single / batched:.1f}",
        ">= 5",
        single / batched >= 5,
        f"{batched:.2f} s in batches, {single:.2f} s one by one",
    )


if __name__ == "__main__":
    show.main(run)
