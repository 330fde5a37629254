"""Theorems 5.1, 6.1 and B.1 as published: stated, guaranteed and measured, side by side with ours.

Stated is what the theorem says before anything is asked (‖Ŵ − W‖_F and ‖v̂ − v‖), guaranteed what
the answers prove of every entry, measured the error against the planted truth. In Theorem 6.1
every answer is wrong by exactly ±τ, τ being the theorem's own; bound and margin are those of the
target. A draw without a guarantee counts as a violation.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

import show
from keyhole import extract, oracle
from keyhole.extract.extraction import Extraction
from keyhole.extract.tolerant_as_published import tolerance_for
from show import Row


def run(quick: bool) -> list[Row]:
    draws = range(3 if quick else 100)
    rows = []
    sizes = ((4, 0.5), (4, 0.1), (8, 0.1), (16, 0.1), (8, 1e-4))
    for dim, accuracy in sizes[1:2] if quick else sizes:
        rows += within_tolerance(dim, accuracy, draws)
    for dim, margin, accuracy in ((2, 0.5, 0.9),) if quick else ((2, 0.5, 0.2), (3, 0.3, 0.5)):
        rows += from_signs(dim, margin, accuracy, draws)
    for dim, rank in ((8, 1),) if quick else ((8, 1), (12, 1), (12, 2), (16, 2)):
        rows += gaussian_measurements(dim, rank, range(2 if quick else 20))
    return rows


class Extreme:
    """Errors of exactly ±τ, by the question: the worst that Theorem 6.1 allows."""

    def __init__(self, head: oracle.Head, tau: float, seed: int) -> None:
        self.inner, self.dim, self._tau = head, head.dim, tau
        self._noisy = oracle.Noisy(head, 1.0, seed=seed)

    def __call__(self, sequences: Tensor) -> Tensor:
        truth = self.inner(sequences)
        return truth + self._tau * (self._noisy(sequences) - truth).sign()


@dataclass(frozen=True)
class Outcome:
    """One draw: what was stated, guaranteed and measured, per entry and in norm."""

    stated: float
    guaranteed: float
    entry: float
    norm: float
    violated: bool

    @classmethod
    def of(cls, result: Extraction, target: oracle.Head) -> Outcome:
        error, error_v = result.model.W - target.W, result.model.v - target.v
        entry, norm = float(error.abs().max()), float(torch.linalg.matrix_norm(error))
        norm_v = float(torch.linalg.vector_norm(error_v))
        guaranteed, stated = result.guarantee or float("nan"), result.stated.accuracy
        kept = (
            max(norm, norm_v) <= stated
            and entry <= guaranteed <= stated / target.dim * (1 + 1e-6)
            and result.queries <= result.stated.queries
        )
        return cls(stated, guaranteed, entry, norm, not kept)


def _row(what: str, outcomes: list[Outcome], dim: int, counts: str) -> Row:
    violations = sum(each.violated for each in outcomes)

    def middle(name: str) -> float:
        return median(getattr(each, name) for each in outcomes)

    return Row(
        what,
        f"{violations} violations in {len(outcomes)} draws",
        "0",
        violations == 0,
        f"in norm: stated {middle('stated'):.1e}, measured {middle('norm'):.1e} (largest "
        f"{max(each.norm / each.stated for each in outcomes):.1%} of stated); of an entry: stated "
        f"{middle('stated') / dim:.1e}, guaranteed {middle('guaranteed'):.1e}, measured "
        f"{middle('entry'):.1e} (largest "
        f"{max(each.entry / each.guaranteed for each in outcomes):.1%} of guaranteed); {counts}; "
        "medians",
    )


def within_tolerance(dim: int, accuracy: float, draws: range) -> list[Row]:
    outcomes, errors, proved, taus, queries = [], [], [], [], set[int]()
    for seed in draws:
        target, bound = _planted(dim, seed, zeros=seed % 3)
        margin = float(target.v[target.v != 0].abs().min())
        tau = tolerance_for(accuracy, bound, margin, dim)
        blurred = Extreme(target, tau, seed)
        result = extract.TolerantAsPublished(tau, bound, margin, accuracy)(blurred)
        outcomes.append(Outcome.of(result, target))
        queries.add(result.queries)
        taus.append(tau)
        ours = extract.Tolerant(tau, max_norm=0.5 + 1 / bound)(blurred)
        errors.append(float((ours.model.W - target.W).abs().max()))
        proved.append(ours.guarantee or float("inf"))
    case = f"d={dim}, accuracy {accuracy:g}"
    inside = sum(error <= bound for error, bound in zip(errors, proved, strict=True))
    (count,) = queries
    counts = f"tau {median(taus):.1e}, {count} queries = d² + d"
    return [
        _row(f"Theorem 6.1, {case}", outcomes, dim, counts),
        Row(
            f"Theorem 6.1, {case}: ours, tokens no longer than its",
            f"{len(draws) - inside} violations in {len(draws)} draws",
            "0",
            inside == len(draws),
            f"of an entry: guaranteed {median(proved):.1e}, measured {median(errors):.1e}; medians",
        ),
    ]


def from_signs(dim: int, margin: float, accuracy: float, draws: range) -> list[Row]:
    outcomes, asked, stated, queries, errors = [], [], [], [], []
    for seed in draws:
        target, bound = _planted(dim, seed, margin=margin)
        signs = oracle.SignOnly(target)
        result = extract.SignOnlyAsPublished(bound, margin, accuracy, seed=seed)(signs)
        outcomes.append(Outcome.of(result, target))
        asked.append(result.queries)
        stated.append(result.stated.queries)
        ours = extract.SignOnly(accuracy=accuracy / dim, seed=seed)(signs)
        queries.append(ours.queries)
        errors.append(float((ours.model.W - target.W).abs().max()) * dim / accuracy)
    case = f"d={dim}, margin {margin:g}, accuracy {accuracy:g}"
    counts = f"{median(asked):,.0f} queries of {median(stated):,.0f} stated"
    return [
        _row(f"Theorem B.1, {case}", outcomes, dim, counts),
        Row(
            f"Theorem B.1, {case}: ours to the same accuracy",
            f"{median(queries):,.0f} queries, largest error {max(errors):.1%} of promised",
            "<= 100%",
            max(errors) <= 1,
        ),
    ]


def gaussian_measurements(dim: int, rank: int, draws: range) -> list[Row]:
    """How many independent Gaussian pairs the convex program of Theorem 5.1 takes."""
    parts: list[str] = []
    for factor in (3, 4, 5, 6, 8):
        good = 0
        for seed in draws:
            target = oracle.plant(dim=dim, rank=rank, seed=seed)
            method = extract.NuclearNorm(rank=rank, oversampling=factor, seed=seed)
            good += show.relative(method(target).model.W, target.W) <= 1e-5
        parts.append(f"{factor}rd: {good} of {len(draws)}")
    return [Row(f"Theorem 5.1, d={dim}, r={rank}, W within 1e-5", ", ".join(parts))]


def _planted(
    dim: int, seed: int, zeros: int = 0, margin: float | None = None
) -> tuple[oracle.Head, float]:
    """A head with ‖v‖ = 1, with zeros in v or with every |v_i| beyond a margin, and its ‖W‖."""
    head = oracle.plant(dim=dim, seed=seed, scale=0.5)
    stream = torch.Generator().manual_seed(seed)
    v = head.v.clone()
    v[:zeros] = 0.0
    v = v / v.norm()
    while margin is not None and float(v.abs().min()) < margin:
        v = torch.randn(dim, generator=stream, dtype=torch.float64)
        v = v / v.norm()
    return oracle.Head(head.W, v), float(torch.linalg.matrix_norm(head.W, 2))


if __name__ == "__main__":
    show.main(run, __doc__)
