"""OrthogonalHeads: exact with known bases; where the conjectured way works, and where it fails.

An error is the largest of any W or v, relative to its largest entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import show
from keyhole.extract import Extraction, OrthogonalHeads, Status
from keyhole.extract.bilinear import random_orthogonal
from keyhole.oracle.planted import MultiHead
from planted import fresh_error, worst_error
from show import Row

Attempt = Callable[[int], tuple[Extraction, MultiHead]]


def run(quick: bool) -> Iterator[Row]:
    seeds = 3 if quick else 10
    for sizes in [[2, 2], [1, 2, 3]] if quick else [[8] * 4, [1, 2, 4, 9], [16] * 4]:
        count = sum(k * k + k for k in sizes)
        what = f"known bases {_name(sizes)}"
        target = f"{count} queries, 1e-10"
        entry = row(what, target, 1e-10, seeds, attempt(sizes, known=True))
        exact = f" {count}..{count} queries" in entry.measured
        yield replace(entry, met=bool(entry.met) and exact)
    unknown = [[4, 4], [1, 1, 1], [1, 2, 3]]
    if not quick:
        unknown = [
            [8, 8],
            [4] * 4,
            [8] * 4,
            [16, 16],
            [1] * 8,
            [1] * 16,
            [2] * 8,
            [1, 2, 3, 4, 6],
            [1, 15],
            [8] * 8,
        ]
    for sizes in unknown:
        for levels in (1, 2):
            what = f"unknown bases {_name(sizes)}, levels={levels}"
            wanted = True if levels == 2 else None  # two are the default
            target = f"{'all' if wanted else 'reported'} within 1e-06"
            yield row(what, target, 1e-6, seeds, attempt(sizes, levels=levels), wanted)
    yield from limits([3, 3] if quick else [4] * 4, seeds)


def limits(sizes: list[int], seeds: int) -> Iterator[Row]:
    """Report where it fails; it must only never call a wrong model recovered."""

    def report(what: str, accuracy: float, made: Attempt, honest: float = 1e-6) -> Row:
        target = f"reported (within {accuracy:.0e})"
        return row(what, target, accuracy, seeds, made, None, honest)

    for error in (1e-14, 1e-12, 1e-10, 1e-8, 1e-6):
        what = f"{_name(sizes)}, answers with relative error {error:.0e}"
        noisy = attempt(sizes, blur=error, precision=error, tolerance=1e-3)
        yield report(what, 1e-2, noisy, 1e-2)
    for weak in (1e-2, 1e-4, 1e-6):
        yield report(
            f"{_name(sizes)}, one W weaker by {weak:.0e}",
            1e-4,
            attempt(sizes, weak=weak),
        )
    for few in ([1] * 4, [1] * 16, [3] * 4):
        what = f"{_name(few)}, equal weights in every subspace"
        yield report(what, 1e-6, attempt(few, alike=True))
    for few in ([1] * 4, [2] * 4, [4] * 4):
        yield report(
            f"{_name(few)}, Hessian at a single x", 1e-6, attempt(few, points=1)
        )


def plant(
    sizes: Sequence[int], seed: int, weak: float = 1.0, alike: bool = False
) -> tuple[MultiHead, list[Tensor]]:
    """Return heads in random orthogonal subspaces of these sizes, and their bases.

    `weak` scales the last head's W; `alike` gives heads of equal size equal weights.
    """
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    Q = random_orthogonal(sum(sizes), stream)
    bases = [basis.contiguous() for basis in Q.split(list(sizes), dim=1)]
    inner = [(normal(k, k) / math.sqrt(k), normal(k)) for k in sizes]
    if alike:
        by_size = dict(zip(sizes, inner, strict=True))
        inner = [by_size[k] for k in sizes]
    inner[-1] = weak * inner[-1][0], inner[-1][1]
    parts = [(B @ W @ B.mT, B @ v) for B, (W, v) in zip(bases, inner, strict=True)]
    return MultiHead([W for W, _ in parts], [v for _, v in parts]), bases


class Blurred:
    """Answers with a relative error, like those of a server with fewer digits."""

    def __init__(self, inner: MultiHead, error: float, seed: int) -> None:
        self.inner = inner
        self.dim = inner.dim
        self.error = error
        self.stream = torch.Generator().manual_seed(seed)

    def __call__(self, sequences: Tensor) -> Tensor:
        answers = self.inner(sequences)
        noise = torch.rand(answers.shape, generator=self.stream, dtype=torch.float64)
        return answers * (1 + self.error * (2 * noise - 1))


def attempt(
    sizes: Sequence[int],
    *,
    known: bool = False,
    weak: float = 1.0,
    alike: bool = False,
    blur: float = 0.0,
    **options: float,
) -> Attempt:
    """Return an extraction from planted heads, by their seed, with or without their bases."""

    def extract(seed: int) -> tuple[Extraction, MultiHead]:
        truth, bases = plant(sizes, seed, weak, alike)
        method = OrthogonalHeads(bases if known else None, seed=seed, **options)
        return method(Blurred(truth, blur, seed) if blur else truth), truth

    return extract


def row(
    what: str,
    target: str,
    accuracy: float,
    seeds: int,
    made: Attempt,
    wanted: bool | None = True,
    honest: float = 1e-6,
) -> Row:
    """Count the seeds whose model is within `accuracy` of the planted one.

    With `wanted` None the count is only reported. A model that is called recovered must
    be within `honest` of the answers to fresh queries.
    """
    runs = [made(seed) for seed in range(seeds)]
    queries = [result.queries for result, _ in runs]
    errors = [worst_error(result.model, truth) for result, truth in runs]
    wrong = sum(
        result.status is Status.RECOVERED
        and fresh_error(truth, result.model, [5], 20) > honest
        for result, truth in runs
    )
    right = [error for error in errors if error <= accuracy]
    worst = f"{max(right):.0e}" if right else "none"
    return Row(
        what,
        f"{len(right)}/{seeds}, {min(queries)}..{max(queries)} queries, error {worst}",
        target,
        not wrong and (wanted is None or (len(right) == seeds) == wanted),
        f"wrong but called recovered: {wrong}",
    )


def _name(sizes: Sequence[int]) -> str:
    if len(set(sizes)) == 1:
        return f"{len(sizes)}×{sizes[0]}"
    return "+".join(str(k) for k in sizes)


if __name__ == "__main__":
    show.main(run)
