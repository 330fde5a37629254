"""Killed with SIGKILL and started again, until it is done: how many questions are asked twice?

The attacker is a process of its own; the target writes down every question put to it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

import show
from keyhole import extract, oracle
from show import Row


class Diary:
    """A target that writes down every question, and kills its process after so many calls."""

    def __init__(self, folder: str, dim: int, life: int) -> None:
        self.target = oracle.plant(dim=dim, seed=5)
        self.dim, self.identity = self.target.dim, self.target.identity
        self.path, self.left = Path(folder, "diary"), life

    def __call__(self, sequences: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.path.open("a") as file:
            for question in sequences:
                file.write(hashlib.sha256(question.numpy().tobytes()).hexdigest() + "\n")
        return self.target(sequences)


def attack(folder: str, dim: int, life: int) -> None:
    with oracle.Ledger(Diary(folder, dim, life), f"{folder}/run.db") as ledger:
        Path(folder, "status").write_text(extract.SingleHead()(ledger).status.value)


def run(quick: bool) -> Iterator[Row]:
    dim = 24 if quick else 64
    forked = multiprocessing.get_context("fork")  # torch is loaded once
    with tempfile.TemporaryDirectory() as folder:
        for kills in range(57):
            process = forked.Process(target=attack, args=(folder, dim, kills + 3))
            process.start()
            process.join()
            if process.exitcode != -signal.SIGKILL:
                break
        status = Path(folder, "status").read_text()
        asked = Counter(Path(folder, "diary").read_text().split())
    yield show.exactly(f"d={dim}: outcome after {kills} kills", status, "recovered")
    twice = asked.total() - len(asked)
    yield show.exactly(f"questions asked twice, of {len(asked):,}", twice, 0)


if __name__ == "__main__":
    show.main(run)
