"""One head from answers within ±τ: what is guaranteed, what is measured, what length buys.

Errors are the largest of any entry of W, against the planted truth.
"""

from __future__ import annotations

import math
from statistics import median

import show
from keyhole import extract, oracle
from keyhole.extract.extraction import Extraction
from keyhole.oracle import Oracle
from show import Row

NORM = 10.0


def run(quick: bool) -> list[Row]:
    seeds = range(3 if quick else 100)
    few = range(3 if quick else 10)
    return [
        *guarantees(8, 1e-3, seeds),
        *rounding(8, (2, 4) if quick else (2, 4, 6), few),
        *random_errors(8, 1e-2, (1, 4) if quick else (1, 4, 16, 64), range(3 if quick else 5)),
        *server(8, few),
    ]


def guarantees(d: int, tau: float, seeds: range) -> list[Row]:
    rows: list[Row] = []
    worst: list[list[float]] = []
    for norm in (NORM, None):
        inside, errors, shares, queries = 0, [], [], 0
        for seed in seeds:
            target = oracle.plant(dim=d, seed=seed)
            noisy = oracle.Noisy(target, tau, seed=seed)
            result = _limited(extract.Tolerant(tolerance=tau, max_norm=norm, seed=seed), noisy)
            error, guarantee = _error(result, target), result.guarantee or math.nan
            error_v = float((result.model.v - target.v).abs().max())
            inside += error <= guarantee and error_v <= (result.guarantee_v or math.nan)
            errors.append(error)
            shares.append(guarantee / error)
            queries = max(queries, result.queries)
        worst.append(errors)
        case = f"d={d}, tau={tau:.0e}, {_named(norm)}"
        rows += [
            Row(
                f"measured <= guaranteed, {case}",
                f"{inside} of {len(seeds)}",
                "all",
                inside == len(seeds),
            ),
            Row(
                f"measured error, {case}",
                f"median {median(errors):.1e}, largest {max(errors):.1e}; guaranteed "
                f"{median(shares):.0f} x (median); at most {queries} queries",
            ),
        ]
    gains = [short / long for short, long in zip(*worst, strict=True)]
    rows.append(
        Row("what unbounded tokens gain", f"{min(gains):.0e} x", ">= 100 x", min(gains) >= 100)
    )
    return rows


def rounding(d: int, decimals: tuple[int, ...], seeds: range) -> list[Row]:
    rows: list[Row] = []
    for k in decimals:
        for norm in (1.0, NORM, None):
            method = extract.Tolerant(tolerance=0.5 * 10.0**-k, max_norm=norm)
            pairs = [(oracle.plant(dim=d, seed=s), s) for s in seeds]
            results = [(_limited(method, oracle.Rounded(t, k)), t) for t, _ in pairs]
            errors = [_error(result, target) for result, target in results]
            proved = [result.guarantee for result, _ in results]
            known = [each for each in proved if each is not None]
            sound = all(
                each is None or error <= each for error, each in zip(errors, proved, strict=True)
            )
            missing = f", none for {len(proved) - len(known)}" if len(known) < len(proved) else ""
            promised = f"{median(known):.1e}" if known else "nothing"
            rows.append(
                Row(
                    f"{k} decimals, {_named(norm)}, d={d}",
                    f"measured {median(errors):.1e}, guaranteed {promised}{missing} (medians)",
                    "measured <= guaranteed",
                    sound,
                )
            )
    return rows


def random_errors(d: int, tau: float, repeats: tuple[int, ...], seeds: range) -> list[Row]:
    rows: list[Row] = []
    for count in repeats:
        found: list[float] = []
        for refine in (False, True):
            errors: list[float] = []
            for seed in seeds:
                target = oracle.plant(dim=d, seed=seed)
                noisy = oracle.Noisy(target, tau, seed=seed, fresh=True)
                method = extract.Tolerant(tau, max_norm=NORM, repeats=count, refine=refine)
                errors.append(_error(_limited(method, noisy), target))
            found.append(median(errors))
        before, after = found
        # With a single round there is nothing to fit: as many answers as unknowns.
        better = None if count == 1 else after < before
        rows.append(
            Row(
                f"random errors, tau={tau:g}, {_named(NORM)}, {count} repeats",
                f"averaged {before:.1e}, then least squares {after:.1e}",
                "" if count == 1 else "less",
                better,
            )
        )
    return rows


def server(d: int, seeds: range) -> list[Row]:
    """A server that computes in float32 and rounds to three decimals."""
    errors, sound = [], True
    for seed in seeds:
        target = oracle.plant(dim=d, seed=seed)
        rounded = oracle.Rounded(_Single(target), 3)
        result = extract.Tolerant(tolerance=5e-4, precision=2.0**-23)(rounded)
        errors.append(_error(result, target))
        sound &= result.guarantee is not None and errors[-1] <= result.guarantee
    what = f"float32 answers, 3 decimals, {_named(None)}, d={d}"
    return [Row(what, f"measured {median(errors):.1e} (median)", "measured <= guaranteed", sound)]


class _Single:
    def __init__(self, inner: Oracle) -> None:
        self.inner = inner
        self.dim = inner.dim

    def __call__(self, sequences):
        return self.inner(sequences).float().double()


def _limited(method: extract.Tolerant, target: Oracle) -> Extraction:
    return method(target if method.max_norm is None else oracle.Clipped(target, method.max_norm))


def _error(result: Extraction, target: oracle.Head) -> float:
    if result.model is None:
        return math.inf
    return float((result.model.W - target.W).abs().max())


def _named(norm: float | None) -> str:
    return "any length" if norm is None else f"norm <= {norm:g}"


if __name__ == "__main__":
    show.main(run, __doc__)
