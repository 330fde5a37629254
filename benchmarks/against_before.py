"""The speed of this checkout beside an earlier one, case by case in turns, in the same run.

`--before` is a checkout of an earlier commit; without it, this one is compared with itself. Each
side is a process of its own with one thread, and CPU seconds count, because other programs may run
at the same time. The ratio is that of the least seconds, before over now.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import show
from show import Row

ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.95  # times the speed of before
CASES = {
    "extract, d=16, 4 heads": (
        "o = oracle.plant('multi-head', dim=16, heads=4, seed={seed}); r = extract.run(o)"
    ),
    "extract, d=64, 4 heads": (
        "o = oracle.plant('multi-head', dim=64, heads=4, seed={seed}); r = extract.run(o)"
    ),
    "extract, d=16, 2 heads, float32 answers": (
        "o = oracle.Rounded(oracle.plant('multi-head', dim=16, heads=2, seed={seed}), 6);"
        "r = extract.Fitted(heads=2, answer_error=5e-7, seed={seed})(o)"
    ),
    "extract, one-layer Transformer, d=16": (
        "o = oracle.plant('one-layer', dim=16, seed={seed}); r = extract.run(o)"
    ),
    "extract, block of GELU, d=16": (
        "o = planted.plant_block(seed={seed}); r = extract.TransformerBlock(seed={seed})(o)"
    ),
    "extract, block of SwiGLU behind RMSNorm, d=16": (
        "o = planted.plant_block(activation='silu', gated=True, norm='rms', seed={seed});"
        "r = extract.TransformerBlock(seed={seed})(o)"
    ),
    "extract, block of ReLU in front of a LayerNorm, d=16": (
        "o = planted.plant_block(activation='relu', norm='behind', seed={seed});"
        "r = extract.TransformerBlock(seed={seed})(o)"
    ),
    "extract, block of GELU in front of a LayerNorm, d=16": (
        "o = planted.plant_block(norm='behind', epsilon=1e-12, seed={seed});"
        "r = extract.TransformerBlock(seed={seed})(o)"
    ),
    "extract, block with scores, d=8": (
        "o = planted.plant_block("
        "dim=8, heads=2, score=True, width=8, norm='rms', seed={seed});"
        "r = extract.TransformerBlock(seed={seed})(o)"
    ),
    "extract, two layers of attention": (
        "o = oracle.plant('attention-layers', layers=2, heads=1, dim=8, seed={seed});"
        "r = extract.AttentionLayers(seed={seed})(o)"
    ),
    "invert, 6x8": "p, X = invert.plant(6, 8, seed={seed}); r = invert.Auto(starts=64)(p)",
    "invert, 16x16, residual": (
        "p, X = invert.plant(16, 16, residual=True, value_scale=0.1, seed={seed});"
        "r = invert.Auto(starts=16)(p)"
    ),
    "invert, 8x8, causal": (
        "p, X = invert.plant(8, 8, causal=True, seed={seed}); r = invert.Auto(starts=16)(p)"
    ),
    "invert, 6x6, LevenbergMarquardt": (
        "p, X = invert.plant(6, 6, seed={seed});"
        "r = invert.LevenbergMarquardt(starts=64, steps=200, solutions=64)(p)"
    ),
    "invert, 6x6, NewtonCG": (
        "p, X = invert.plant(6, 6, seed={seed}); r = invert.NewtonCG(starts=8, steps=60)(p)"
    ),
    "invert, 6x6, LBFGS": (
        "p, X = invert.plant(6, 6, seed={seed}); r = invert.LBFGS(starts=8, steps=300)(p)"
    ),
}
# Answers each line of code with the CPU seconds it took, the status and the cost.
WORKER = """
import sys, time, torch, planted
from keyhole import extract, invert, oracle
torch.set_num_threads(1)
for line in sys.stdin:
    names = globals().copy()
    began = time.process_time()
    exec(line, names)
    seconds, r = time.process_time() - began, names["r"]
    found = r.queries if hasattr(r, "queries") else len(r.solutions)
    print(seconds, r.status, found, sep=";", flush=True)
"""


class Side:
    """A checkout, as a process that times code."""

    def __init__(self, root: Path) -> None:
        path = os.pathsep.join(str(root / part) for part in ("src", "benchmarks"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def timed(self, code: str) -> tuple[float, str]:
        if self.process.stdin is None or self.process.stdout is None:
            raise AssertionError
        print(code, file=self.process.stdin, flush=True)
        seconds, *ended = self.process.stdout.readline().strip().split(";")
        return float(seconds), " ".join(ended)


def run(
    quick: bool, before: Path = ROOT, repeats: int = 5, seeds: int = 3, cases: str = ""
) -> Iterator[Row]:
    """`cases` are parts of names, separated by semicolons."""
    if quick:
        repeats, seeds, cases = 1, 1, "6x6, NewtonCG"
    sides = {"before": Side(before), "now": Side(ROOT)}
    chosen = [name for name in CASES if any(part in name for part in cases.split(";"))]
    for name in chosen:
        yield compared(name, sides, repeats, seeds)
    for side in sides.values():
        side.process.kill()


def compared(name: str, sides: dict[str, Side], repeats: int, seeds: int) -> Row:
    """Return the row of one case: the sum over seeds of the least seconds of each side."""
    items = list[dict[str, object]]()
    totals = dict.fromkeys(sides, 0.0)
    ends = {side: list[str]() for side in sides}
    for seed in range(seeds):
        seconds = {side: list[float]() for side in sides}
        for repeat in range(repeats):
            for side in sorted(sides, reverse=bool(repeat % 2)):
                spent, ended = sides[side].timed(CASES[name].format(seed=seed))
                seconds[side].append(spent)
                if not repeat:
                    ends[side].append(ended)
        for side in sides:
            totals[side] += min(seconds[side])
        items.append({"seed": seed, **seconds})
    ratio = totals["before"] / totals["now"]
    details = (
        f"{totals['before']:.2f} s before, {totals['now']:.2f} s now; now {ends['now']}"
    )
    if ends["before"] != ends["now"]:
        details += f", before {ends['before']}"
    return Row(
        name,
        f"{ratio:.2f} x",
        f">= {LEAST} x",
        ratio >= LEAST,
        details,
        promise=False,
        items=items,
    )


if __name__ == "__main__":
    show.main(run)
