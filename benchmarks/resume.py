"""Killed with SIGKILL and started again, until it is done: how many questions are asked twice?

The attacker is a process of its own; the target writes down every question put to it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import show
from show import Row

ATTACKER = """
import hashlib, os, signal, sys
from keyhole import extract, oracle

folder, dim, life = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
target = oracle.plant(dim=dim, seed=5)

class Diary:
    dim, identity, calls = target.dim, target.identity, 0
    def __call__(self, sequences):
        self.calls += 1
        if self.calls > life:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(f"{folder}/diary", "a") as file:
            for question in sequences:
                file.write(hashlib.sha256(question.numpy().tobytes()).hexdigest() + "\\n")
        return target(sequences)

with oracle.Ledger(Diary(), f"{folder}/run.db") as ledger:
    print(extract.SingleHead()(ledger).status.value)
"""


def run(quick: bool) -> list[Row]:
    dim = 24 if quick else 64
    with tempfile.TemporaryDirectory() as folder:
        lives = 0
        for life in range(3, 60):
            command = [sys.executable, "-c", ATTACKER, folder, str(dim), str(life)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lives += 1
            if done.returncode != -signal.SIGKILL:
                break
        asked = Counter(Path(folder, "diary").read_text().split())
    status = done.stdout.strip()
    twice = sum(count - 1 for count in asked.values())
    return [
        Row(
            f"d={dim}: outcome after {lives - 1} kills", status, "recovered", status == "recovered"
        ),
        Row(f"questions asked twice, of {len(asked):,}", str(twice), "0", twice == 0),
    ]


if __name__ == "__main__":
    show.main(run, __doc__)
