"""Threads by the size of the work: one, all, and what Keyhole chooses, alone and next to others.

Encoders whose largest matrix is around the limit (`LARGE` in `core/machine.py`) take turns with one
thread, with one for each core, and with what Keyhole chooses, first as the machine is, then with a
busy process next to them. Each figure is the best of several turns, over that of one thread in the
same circumstances and in the same run: below 1 is faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import BertConfig, BertModel

import show
from keyhole.core.machine import LARGE, largest_matrix, threads_for
from show import Row

# Two layers of each width; the largest matrix has four times its square.
WIDTHS = (64, 128, 192, 256, 384, 512)
BATCHES = {"one text": 1, "64 texts": 64}
TURN = 0.05  # seconds of one turn of such passes with one thread, about
PATIENCE = 2.0  # seconds after which a row takes no further turn
NEAR = 1.25  # how much slower than the better of one and all what is chosen may be
CORES = os.cpu_count() or 1
Work = Callable[[], object]


@contextmanager
def threads(count: int, chosen: bool) -> Generator[None]:
    """So many threads; where somebody has chosen them, Keyhole leaves them alone."""
    before, torch_had = os.environ.pop("OMP_NUM_THREADS", None), torch.get_num_threads()
    if chosen:
        os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(torch_had)
        os.environ.pop("OMP_NUM_THREADS", None)
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def busy_neighbour() -> Generator[None]:
    """Another process that never waits."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def drawn(batch: int) -> Tensor:
    return torch.randint(1000, (batch, 32), generator=torch.Generator().manual_seed(0))


def random_encoder(width: int) -> BertModel:
    """Two layers of that width: their weights do not matter here."""
    config = BertConfig(
        vocab_size=1000, hidden_size=width, num_hidden_layers=2, num_attention_heads=width // 64,
        intermediate_size=4 * width, max_position_embeddings=32,
    )  # fmt: skip
    return BertModel(config).eval()


def passing(model: BertModel, batch: int) -> Work:
    """Passes of a model that take about a turn with one thread."""
    ids = drawn(batch)

    def passes(count: int) -> None:
        with torch.no_grad(), threads_for(largest_matrix(model)):
            for _ in range(count):
                model(ids)

    with threads(1, chosen=True):
        passes(2)
        _, took = show.timed(lambda: passes(2))
        count = max(1, round(2 * TURN / took))
    return lambda: passes(count)


def seconds(work: Work, turns: int) -> dict[str, float]:
    """The best of several turns of each number of threads; they take turns with each other."""
    ways = {"one": (1, True), "all": (CORES, True), "chosen": (CORES, False)}
    best = dict.fromkeys(ways, float("inf"))
    began = time.perf_counter()
    for turn in range(turns):
        if turn and time.perf_counter() - began > PATIENCE:
            break  # on a crowded machine threads that wait for each other take ten times as long
        for name, way in ways.items():
            with threads(*way):
                best[name] = min(best[name], show.timed(work)[1])
    return best


def measured(name: str, work: Work, turns: int, quick: bool) -> Iterator[Row]:
    """One work alone and next to a busy process."""
    work()  # what is loaded on demand is loaded
    for circumstances, neighbour in (("", nullcontext), (", busy neighbour", busy_neighbour)):
        with neighbour():
            took = seconds(work, turns)
        ratio = {way: took[way] / took["one"] for way in took}
        worst = ratio["chosen"] / min(ratio["one"], ratio["all"])
        yield show.ratio(
            f"{name}{circumstances}",
            f"all {ratio['all']:.2f}, chosen {ratio['chosen']:.2f}",
            f"chosen within {NEAR} of the better",
            None if quick else worst <= NEAR,
            f"one thread {took['one']:.2f} s, {CORES} cores, load {os.getloadavg()[0]:.1f}",
        )


def run(quick: bool) -> Iterator[Row]:
    for width in (64,) if quick else WIDTHS:
        model = random_encoder(width)
        side = "below the limit" if largest_matrix(model) < LARGE else "from the limit on"
        for name, batch in BATCHES.items():
            what = f"matrices of {width} × {4 * width}, {side}, {name}"
            yield from measured(what, passing(model, batch), 1 if quick else 3, quick)


if __name__ == "__main__":
    show.main(run)
