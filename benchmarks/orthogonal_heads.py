"""OrthogonalHeads: exact with known bases; where the conjectured route works and where it breaks.

Errors are the largest of any W or v, relative to its largest entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

import show
from keyhole.extract import Extraction, OrthogonalHeads, Status
from keyhole.extract.bilinear import random_orthogonal
from keyhole.oracle.planted import MultiHead
from show import Row

Planted = tuple[MultiHead, list[torch.Tensor]]


def plant(sizes: Sequence[int], seed: int, weak: float = 1.0, alike: bool = False) -> Planted:
    """Heads in random orthogonal subspaces of these sizes, and their bases.

    `weak` is the strength of the last head's W beside the others; `alike` gives heads of equal
    size equal weights.
    """
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
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
    """Answers with a relative error: what a server with fewer digits would give."""

    def __init__(self, inner: MultiHead, error: float, seed: int) -> None:
        self.inner = inner
        self.error = error
        self.stream = torch.Generator().manual_seed(seed)

    @property
    def dim(self) -> int:
        return self.inner.dim

    def __call__(self, sequences: torch.Tensor) -> torch.Tensor:
        answers = self.inner(sequences)
        noise = torch.rand(answers.shape, generator=self.stream, dtype=torch.float64)
        return answers * (1 + self.error * (2 * noise - 1))


def worst_error(found: object, truth: MultiHead) -> float:
    """Of any W_h or v_h, relative to its largest entry; heads in any order."""
    if not isinstance(found, MultiHead) or len(found.W) != len(truth.W):
        return math.inf
    return max(
        min(
            max(
                float((A - W).abs().max() / W.abs().max()),
                float((a - v).abs().max() / v.abs().max()),
            )
            for A, a in zip(found.W, found.v, strict=True)
        )
        for W, v in zip(truth.W, truth.v, strict=True)
    )


def row(
    what: str,
    target: str,
    accuracy: float,
    seeds: int,
    attempt: Callable[[int], tuple[Extraction, MultiHead]],
    wanted: bool | None = True,
    honest: float = 1e-6,
) -> Row:
    """Success is a model within `accuracy` of the planted one; `wanted` None only reports.

    A model called recovered that is further than `honest` off on fresh queries is a lie.
    """
    queries: list[int] = []
    errors: list[float] = []
    lied = 0
    for seed in range(seeds):
        result, truth = attempt(seed)
        queries.append(result.queries)
        errors.append(worst_error(result.model, truth))
        fresh = torch.randn(20, 5, truth.dim, dtype=torch.float64)
        if result.status is Status.RECOVERED and result.model is not None:
            answers = truth(fresh)
            apart = (result.model(fresh) - answers).abs().max() / answers.abs().max()
            lied += float(apart) > honest
    right = [error for error in errors if error <= accuracy]
    worst = f"{max(right):.0e}" if right else "none"
    met = not lied and (wanted is None or (len(right) == seeds) == wanted)
    return Row(
        what,
        f"{len(right)}/{seeds}, {min(queries)}..{max(queries)} queries, error {worst}",
        target,
        met,
        f"wrong but called right: {lied}",
    )


def run(quick: bool) -> list[Row]:
    seeds = 3 if quick else 10
    known = [[2, 2], [1, 2, 3]] if quick else [[8] * 4, [1, 2, 4, 9], [16] * 4]
    unknown = [[4, 4], [1, 1, 1], [1, 2, 3]]
    if not quick:
        unknown = [[8, 8], [4] * 4, [8] * 4, [16, 16], [1] * 8, [1] * 16, [2] * 8, [1, 2, 3, 4, 6],
                   [1, 15], [8] * 8]  # fmt: skip
    rows: list[Row] = []
    for sizes in known:
        count = sum(k * k + k for k in sizes)

        def with_bases(seed: int, sizes: list[int] = sizes) -> tuple[Extraction, MultiHead]:
            truth, bases = plant(sizes, seed)
            return OrthogonalHeads(bases, seed=seed)(truth), truth

        entry = row(
            f"known bases {_name(sizes)}", f"{count} queries, 1e-10", 1e-10, seeds, with_bases
        )
        exact = f" {count}..{count} queries" in entry.measured
        rows.append(replace(entry, met=bool(entry.met) and exact))
    for sizes in unknown:
        for levels in (1, 2):
            accuracy = 1e-6

            def without(
                seed: int, sizes: list[int] = sizes, levels: int = levels
            ) -> tuple[Extraction, MultiHead]:
                truth, _ = plant(sizes, seed)
                return OrthogonalHeads(seed=seed, levels=levels)(truth), truth

            what = f"unknown bases {_name(sizes)}, levels={levels}"
            wanted = True if levels == 2 else None  # two are the default
            target = f"{'all' if wanted else 'reported'} within {accuracy:.0e}"
            rows.append(row(what, target, accuracy, seeds, without, wanted))
    return rows + _limits(quick, seeds)


def _limits(quick: bool, seeds: int) -> list[Row]:
    """Where it breaks: reported, and required only never to call a wrong model right."""
    rows: list[Row] = []
    sizes = [3, 3] if quick else [4] * 4

    def report(
        what: str,
        accuracy: float,
        attempt: Callable[[int], tuple[Extraction, MultiHead]],
        honest: float = 1e-6,
    ) -> None:
        target = f"reported (within {accuracy:.0e})"
        rows.append(row(what, target, accuracy, seeds, attempt, None, honest))

    for error in (1e-14, 1e-12, 1e-10, 1e-8, 1e-6):

        def noisy(seed: int, error: float = error) -> tuple[Extraction, MultiHead]:
            truth, _ = plant(sizes, seed)
            method = OrthogonalHeads(seed=seed, precision=error, tolerance=1e-3)
            return method(Blurred(truth, error, seed)), truth

        report(f"{_name(sizes)}, answers with relative error {error:.0e}", 1e-2, noisy, 1e-2)
    for weak in (1e-2, 1e-4, 1e-6):

        def faint(seed: int, weak: float = weak) -> tuple[Extraction, MultiHead]:
            truth, _ = plant(sizes, seed, weak=weak)
            return OrthogonalHeads(seed=seed)(truth), truth

        report(f"{_name(sizes)}, one W weaker by {weak:.0e}", 1e-4, faint)
    for alike in ([1] * 4, [1] * 16, [3] * 4):

        def equal(seed: int, alike: list[int] = alike) -> tuple[Extraction, MultiHead]:
            truth, _ = plant(alike, seed, alike=True)
            return OrthogonalHeads(seed=seed)(truth), truth

        report(f"{_name(alike)}, equal weights in every subspace", 1e-6, equal)
    for single in ([1] * 4, [2] * 4, [4] * 4):

        def one_point(seed: int, single: list[int] = single) -> tuple[Extraction, MultiHead]:
            truth, _ = plant(single, seed)
            return OrthogonalHeads(seed=seed, points=1)(truth), truth

        report(f"{_name(single)}, Hessian at a single x", 1e-6, one_point)
    return rows


def _name(sizes: Sequence[int]) -> str:
    if len(set(sizes)) == 1:
        return f"{len(sizes)}×{sizes[0]}"
    return "+".join(str(k) for k in sizes)


if __name__ == "__main__":
    show.main(run, __doc__)
