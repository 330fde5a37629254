"""Threads by the size of the work: one, all, and what Keyhole chooses, alone and beside others.

Each part of the demo's audit, and an encoder of 22 million numbers, takes its turn with one thread,
with one for each core, and with what `keyhole.threads` chooses, first as the machine is, then with
one busy process beside it. Each figure is the best of several turns, over that of one thread in the
same circumstances and in the same run: below 1 is faster. `--encoder` is the folder of
all-MiniLM-L6-v2.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

import keyhole
import show
import texts
from keyhole.audit import open_target
from keyhole.models import Exposure, Loaded, capture, demo
from keyhole.threads import largest_matrix, threads_for
from show import Row

OPTIONS = texts.options(texts=64)
CHOSEN = texts.chosen(OPTIONS)
CORES = os.cpu_count() or 1
Work = Callable[[], object]


@contextmanager
def exactly(threads: int) -> Generator[None]:
    """So many threads, as somebody who has chosen has them: Keyhole leaves them alone."""
    before, torch_had = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(torch_had)
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def unchosen() -> Generator[None]:
    """As many threads as torch takes where nobody has chosen."""
    with exactly(CORES):
        del os.environ["OMP_NUM_THREADS"]
        try:
            yield
        finally:
            os.environ["OMP_NUM_THREADS"] = str(CORES)


@contextmanager
def busy_neighbour() -> Generator[None]:
    """Another process that never waits."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def parts() -> dict[str, Work]:
    """The demo's audit: its endpoints, and its classifier with few texts and reviews."""
    whole = open_target("demo", layers=[1, 2])
    (name, subject), *_ = whole.models.items()
    few = replace(subject, texts=subject.texts[:1], examples=subject.examples[:4], twin=None)
    targets = {
        "the demo's endpoints": keyhole.audit.Target("endpoints", whole.surfaces),
        "the demo's classifier": keyhole.audit.Target("classifier", models={name: few}),
    }
    return {part: lambda target=target: keyhole.audit(target) for part, target in targets.items()}


def encoding(loaded: Loaded, count: int) -> Work:
    """Passes of an encoder over batches of 64 texts of 32 tokens."""
    ids = torch.randint(1000, (64, 32), generator=torch.Generator().manual_seed(0))

    def work() -> None:
        with torch.no_grad(), threads_for(largest_matrix(loaded.model)):
            for _ in range(count):
                capture(loaded.model, Exposure("pooled"), ids=ids)

    return work


def seconds(work: Work, turns: int) -> dict[str, float]:
    """The best of several turns of each number of threads; they take turns with each other."""
    ways = {"one": lambda: exactly(1), "all": lambda: exactly(CORES), "chosen": unchosen}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for name, way in ways.items():
            with way():
                started = time.perf_counter()
                work()
                best[name] = min(best[name], time.perf_counter() - started)
    return best


def run(quick: bool) -> list[Row]:
    works: dict[str, Work] = {} if quick else parts()
    works["passes of the classifier that ships"] = encoding(demo.load_demo(), 1 if quick else 40)
    if not quick:
        works["passes of all-MiniLM-L6-v2"] = encoding(texts.minilm(CHOSEN), 4)
    rows: list[Row] = []
    for name, work in works.items():
        work()  # what is loaded on demand is loaded
        for circumstances, beside in (("", nullcontext), (", busy neighbour", busy_neighbour)):
            with beside():
                took = seconds(work, 1 if quick else 3)
            ratio = {way: took[way] / took["one"] for way in took}
            worst = ratio["chosen"] / min(ratio["one"], ratio["all"])
            rows.append(
                Row(
                    f"{name}{circumstances}",
                    f"all {ratio['all']:.2f}, chosen {ratio['chosen']:.2f}",
                    "" if quick else "chosen within 1.25 of the better",
                    None if quick else worst <= 1.25,
                    f"one thread {took['one']:.2f} s, {CORES} cores, load {os.getloadavg()[0]:.1f}",
                    promise=False,
                )
            )
    return rows


if __name__ == "__main__":
    show.main(run, __doc__)
