"""What an attack costs beyond the oracle's own time, for the same batches, in the same run.

The attack's time without the judge's, over the time spent inside the oracle; the best of three.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import show
from keyhole import extract, oracle
from keyhole.extract import Method
from keyhole.oracle import Oracle
from show import Row, Stopwatch


def cases(d: int) -> dict[str, tuple[Method, Oracle]]:
    head = oracle.plant("head", dim=d, seed=1)
    low = oracle.plant("head", dim=d, rank=d // 8, seed=1)
    return {
        "SingleHead": (extract.SingleHead(), head),
        "LowRank": (extract.LowRank(), low),
        "Tolerant": (extract.Tolerant(5e-4), oracle.Rounded(head, 3)),
        "SignOnly": (extract.SignOnly(accuracy=1e-4), oracle.SignOnly(head)),
        "MultiHead, 8 heads": (
            extract.MultiHead(), oracle.plant("multi-head", dim=d, heads=8, seed=1)
        ),
        "MultiHead, 8 heads of rank d/8": (
            extract.MultiHead(), oracle.plant("multi-head", dim=d, heads=8, rank=d // 8, seed=1)
        ),
        "OneLayerTransformer, width d": (
            extract.OneLayerTransformer(), oracle.plant("one-layer", dim=d, width=d, seed=1)
        ),
        "FullOutput, last token": (extract.FullOutput(), oracle.plant("attention", dim=d, seed=1)),
        "FullOutput, every token": (
            extract.FullOutput(), oracle.plant("attention", dim=d, every_token=True, seed=1)
        ),
    }  # fmt: skip


def run(quick: bool) -> Iterator[Row]:
    for d in (16,) if quick else (64, 128):
        for name, (method, target) in cases(d).items():
            best = (float("inf"), 0.0)
            for _ in range(1 if quick else 3):
                watch = Stopwatch(target)
                result = method(watch)
                inside = watch.until(result.queries)
                best = min(best, (result.seconds / inside, inside))
            ratio, inside = best
            yield show.ratio(
                f"{name}, d={d}",
                f"{ratio:.2f}",
                "<= 1.5",
                None if quick else ratio <= 1.5,
                f"oracle {inside:.3f} s, {torch.get_num_threads()} threads",
            )


if __name__ == "__main__":
    show.main(run)
