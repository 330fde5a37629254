"""What an attack costs beyond the oracle's own time, for the same batches, in the same run.

The attack's time without the judge's, over the time spent inside the oracle.
"""

from __future__ import annotations

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


def ratio(method: Method, target: Oracle, repeats: int) -> tuple[float, float]:
    """The best of several runs: the attack's seconds over the oracle's, and the oracle's."""
    best = (float("inf"), 0.0)
    for _ in range(repeats):
        watch = Stopwatch(target)
        result = method(watch)
        inside = watch.until(result.queries)
        best = min(best, (result.seconds / inside, inside))
    return best


def run(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for d in (16,) if quick else (64, 128):
        for name, (method, target) in cases(d).items():
            measured, inside = ratio(method, target, 1 if quick else 3)
            rows.append(
                Row(
                    f"{name}, d={d}",
                    f"{measured:.2f}",
                    "" if quick else "<= 1.5",
                    None if quick else measured <= 1.5,
                    f"oracle {inside:.3f} s, {torch.get_num_threads()} threads",
                    promise=False,
                )
            )
    return rows


if __name__ == "__main__":
    show.main(run, __doc__)
