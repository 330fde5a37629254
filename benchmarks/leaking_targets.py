"""200 targets whose answers are rounded and pass through a link function: does `auto` read them?

Eight kinds of target, five links and five precisions, each combination once. The seed
of a target is its number, and `auto` knows nothing but the answers. `--blurred`
measures another table: one to four heads whose answers have noise or are labels.

A target is *read* if the judge says so and the copy is as exact as the answers allow:
on fresh sequences it differs from the function before rounding by at most four times
the answers' own error, or by 1e-6 of the largest answer; from labels, by 1e-4 after the
best scaling. A copy that the judge accepts and that is further off is *read wrongly*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.core.status import OUTCOMES, Outcome
from keyhole.oracle import Oracle
from keyhole.oracle.planted import BiasedHeads
from planted import normals
from show import Row

LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "offset": lambda y: 2.5 * y - 0.7,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda y: torch.stack([torch.zeros_like(y), y + 0.3], -1).softmax(-1),
}
PRECISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda y: y,
    "float32": lambda y: y.float().double(),
    "float16": lambda y: y.half().double(),
    "bfloat16": lambda y: y.bfloat16().double(),
    "3 decimals": lambda y: y.round(decimals=3),
}
LABELS = "labels"
BLURS: dict[str, Callable[[Oracle], Oracle]] = {
    "noise of 0.000001": lambda inner: oracle.Noisy(inner, 1e-6),
    "noise of 0.01": lambda inner: oracle.Noisy(inner, 1e-2),
    "fresh noise of 0.01": lambda inner: oracle.Noisy(inner, 1e-2, fresh=True),
    LABELS: oracle.SignOnly,
}


def biased(seed: int, dim: int, heads: int) -> BiasedHeads:
    """Return heads with biases of queries and output, all standard normal."""
    plain = oracle.plant("multi-head", dim=dim, heads=heads, seed=seed).tensors()
    draw = normals(seed + 1000)
    return BiasedHeads(plain["W"], plain["v"], draw(heads, dim), draw(1))


KINDS: dict[str, Callable[[int], oracle.Planted]] = {
    "one head": lambda seed: oracle.plant("head", dim=8, seed=seed),
    "two heads": lambda seed: oracle.plant("multi-head", dim=6, heads=2, seed=seed),
    "three heads": lambda seed: oracle.plant("multi-head", dim=4, heads=3, seed=seed),
    "one head of rank 2": lambda seed: oracle.plant("head", dim=8, rank=2, seed=seed),
    "two heads of rank 2": lambda seed: oracle.plant(
        "multi-head", dim=6, heads=2, rank=2, seed=seed
    ),
    "one head with biases": lambda seed: biased(seed, 6, 1),
    "two heads with biases": lambda seed: biased(seed, 4, 2),
    "one layer": lambda seed: oracle.plant("one-layer", dim=6, width=5, seed=seed),
}
BLURRED: dict[str, Callable[[int], oracle.Planted]] = {
    **dict(list(KINDS.items())[:5]),
    "four heads": lambda seed: oracle.plant("multi-head", dim=4, heads=4, seed=seed),
}
READ, UNCHECKED, MISMATCH, CLEAN, WRONG = SHOWN = (
    "read",
    "not checked",
    "called a mismatch",
    "called clean",
    "read wrongly",
)
ADMITTED = 4.0  # times the largest error of the answers themselves
LABELLED = 1e-4  # of the largest answer, where there are none


@dataclass(frozen=True)
class Case:
    kind: str
    link: str
    precision: str
    seed: int


class Answering:
    """A target as its server answers it; `exactly` is the function before rounding."""

    def __init__(self, inner: Oracle, case: Case) -> None:
        self.inner = inner
        self.dim = inner.dim
        self.link, self.rounded = LINKS[case.link], PRECISIONS.get(case.precision)
        self.blurred = inner if self.rounded else BLURS[case.precision](inner)
        self.labels = case.precision == LABELS

    def exactly(self, sequences: Tensor) -> Tensor:
        return self.link(self.inner(sequences))

    def __call__(self, sequences: Tensor) -> Tensor:
        if self.rounded is None:
            return oracle.ask(self.blurred, sequences)
        return self.rounded(self.exactly(sequences))


def run(quick: bool, processes: int = 1, blurred: bool = False) -> Iterator[Row]:
    grid = product(KINDS, LINKS, PRECISIONS)
    if blurred:  # three seeds each
        grid = product(BLURRED, ["none"], [blur for blur in BLURS for _ in range(3)])
    cases = [Case(*each, seed) for seed, each in enumerate(grid)]
    cases = cases[4::41] if quick else cases
    total = Counter[str]()
    ends = show.spread_out(attacked, cases, processes)
    for kind, some in groupby(cases, lambda case: case.kind):
        row, counts = _row(kind, [next(ends) for _ in some])
        total += counts
        yield row
    for wrong in (MISMATCH, CLEAN, WRONG):
        yield show.exactly(f"leaking targets that are {wrong}", total[wrong], 0)
    least = math.ceil(0.9 * len(cases))
    yield Row(
        f"leaking targets that are {READ}, of {len(cases)}",
        str(total[READ]),
        f">= {least}",
        total[READ] >= least,
        f"{total[UNCHECKED]} {UNCHECKED}",
    )


def attacked(case: Case) -> dict[str, Any]:
    """Extract a target without knowing its kind, and compare the copy with the truth.

    `error` is that of the copy, `own` that of the answers, relative to the largest
    answer.
    """
    target = Answering({**KINDS, **BLURRED}[case.kind](case.seed), case)
    result, seconds = show.timed(lambda: extract.Auto(seed=case.seed)(target))
    status = result.status
    outcome = OUTCOMES[result.status]
    error = own = None
    shown = CLEAN if outcome is Outcome.KEPT else UNCHECKED
    if status is extract.Status.MISMATCH:
        shown = MISMATCH
    if result.model is not None:
        error, own = errors(target, result.model)
        if outcome is Outcome.GIVEN_AWAY:
            shown = READ if error <= max(1e-6, ADMITTED * own) else WRONG
    return {
        **vars(case),
        "outcome": shown,
        "status": str(status),
        "reason": result.reason,
        "error": error,
        "own": own,
        "queries": result.queries,
        "seconds": seconds,
    }


def errors(target: Answering, model: Oracle) -> tuple[float, float]:
    """Return the errors of a copy and of the answers, relative to the largest answer."""
    draw = normals(987_654_321)
    lengths = (1, 2, 3, 5)
    asked = [draw(64, length, target.dim) / math.sqrt(target.dim) for length in lengths]
    exact, given, answers = (
        torch.cat([each(X) for X in asked]) for each in (target.exactly, model, target)
    )
    largest = float(exact.abs().max())
    if target.labels:
        given = given * (given @ exact) / (given @ given)
        return float((given - exact).abs().max()) / largest, LABELLED / ADMITTED
    worst, own = ((each - exact).abs().max() for each in (given, answers))
    return float(worst) / largest, float(own) / largest


def _row(what: str, items: list[dict[str, Any]]) -> tuple[Row, Counter[str]]:
    counts = Counter(item["outcome"] for item in items)
    failed = [
        f"{item['link']}, {item['precision']}: {item['outcome']} ({item['status']})"
        for item in items
        if item["outcome"] != READ
    ]
    queries, seconds = (
        max(item[name] for item in items) for name in ("queries", "seconds")
    )
    measured = ", ".join(f"{counts[each]} {each}" for each in SHOWN if counts[each])
    details = f"{queries:,} queries and {seconds:.1f} s at most"
    return Row(
        what, measured, details="; ".join([details, *failed]), items=items
    ), counts


if __name__ == "__main__":
    show.main(run)
