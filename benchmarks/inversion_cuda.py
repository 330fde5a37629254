"""Many starts at once: 4,096 starts of an (8, 8) inversion on a GPU against two CPU cores.

The same starts, the same number of steps, every start to its end; both sides in the same run.
Without a GPU there is nothing to compare, and the row says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import show
from keyhole.invert import LevenbergMarquardt, plant
from show import Row


def starts_per_second(device: str, starts: int, steps: int) -> tuple[float, int]:
    problem, _ = plant(8, 8, seed=0)
    every = 10**9  # solutions: no start stops early because another one succeeded
    method = LevenbergMarquardt(starts=starts, steps=steps, solutions=every, device=device)
    LevenbergMarquardt(starts=8, steps=3, solutions=every, device=device)(problem)  # warm up
    result = method(problem)
    return starts / result.seconds, len(result.solutions)


def run(quick: bool) -> Iterator[Row]:
    many, few, steps = (64, 16, 20) if quick else (4096, 512, 300)
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    cpu, count = starts_per_second("cpu", few, steps)
    torch.set_num_threads(threads)
    yield Row(f"two CPU cores, {few} starts", f"{cpu:.1f} starts/s", details=f"{count} found")
    if not torch.cuda.is_available():
        yield Row("GPU", "no CUDA device here: not measured")
        return
    gpu, count = starts_per_second("cuda", many, steps)
    name = torch.cuda.get_device_name()
    yield Row(f"{name}, {many} starts", f"{gpu:.1f} starts/s", details=f"{count} found")
    yield Row("GPU against two CPU cores", f"{gpu / cpu:.1f} ×", "printed")


if __name__ == "__main__":
    show.main(run)
