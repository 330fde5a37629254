"""One head from answers within ±τ: what is guaranteed, what is measured, what length buys.

Errors are the largest of any entry of W, against the planted truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

import show
from keyhole import extract, oracle
from keyhole.extract.extraction import Extraction
from keyhole.oracle import Oracle
from show import Row

D, NORM = 8, 10.0
SOUND = "measured <= guaranteed"


def run(quick: bool) -> Iterator[Row]:
    few = range(3 if quick else 10)
    yield from guarantees(1e-3, range(3 if quick else 100))
    for decimals in (2, 4) if quick else (2, 4, 6):
        for norm in (1.0, NORM, None):
            yield rounding(decimals, norm, few)
    for repeats in (1, 4) if quick else (1, 4, 16, 64):
        yield random_errors(1e-2, repeats, range(3 if quick else 5))
    yield server(few)


def guarantees(tau: float, seeds: range) -> Iterator[Row]:
    errors: dict[float | None, list[float]] = {NORM: [], None: []}
    for norm, found in errors.items():
        inside, shares, queries = 0, [], []
        for seed in seeds:
            target = oracle.plant(dim=D, seed=seed)
            noisy = oracle.Noisy(target, tau, seed=seed)
            result = _limited(extract.Tolerant(tolerance=tau, max_norm=norm, seed=seed), noisy)
            error, guarantee = _error(result, target), result.guarantee or math.nan
            error_v = float((result.model.v - target.v).abs().max())
            inside += error <= guarantee and error_v <= (result.guarantee_v or math.nan)
            found.append(error)
            shares.append(guarantee / error)
            queries.append(result.queries)
        case = f"d={D}, tau={tau:.0e}, {_named(norm)}"
        yield show.every(f"{SOUND}, {case}", inside, len(seeds))
        yield Row(
            f"measured error, {case}",
            f"median {median(found):.1e}, largest {max(found):.1e}; guaranteed "
            f"{median(shares):.0f} x (median); at most {max(queries)} queries",
        )
    gain = min(short / long for short, long in zip(*errors.values(), strict=True))
    yield Row("what unbounded tokens gain", f"{gain:.0e} x", ">= 100 x", gain >= 100)


def rounding(decimals: int, norm: float | None, seeds: range) -> Row:
    method = extract.Tolerant(tolerance=0.5 * 10.0**-decimals, max_norm=norm)
    errors, known, sound = [], [], True
    for seed in seeds:
        target = oracle.plant(dim=D, seed=seed)
        result = _limited(method, oracle.Rounded(target, decimals))
        errors.append(_error(result, target))
        if result.guarantee is not None:
            known.append(result.guarantee)
            sound &= errors[-1] <= result.guarantee
    missing = f", none for {len(seeds) - len(known)}" if len(known) < len(seeds) else ""
    promised = f"{median(known):.1e}" if known else "nothing"
    what = f"{decimals} decimals, {_named(norm)}, d={D}"
    measured = f"measured {median(errors):.1e}, guaranteed {promised}{missing} (medians)"
    return Row(what, measured, SOUND, sound)


def random_errors(tau: float, repeats: int, seeds: range) -> Row:
    found: list[float] = []
    for refine in (False, True):
        method = extract.Tolerant(tau, max_norm=NORM, repeats=repeats, refine=refine)
        errors: list[float] = []
        for seed in seeds:
            target = oracle.plant(dim=D, seed=seed)
            noisy = oracle.Noisy(target, tau, seed=seed, fresh=True)
            errors.append(_error(_limited(method, noisy), target))
        found.append(median(errors))
    before, after = found
    # With a single round there is nothing to fit: as many answers as unknowns.
    return Row(
        f"random errors, tau={tau:g}, {_named(NORM)}, {repeats} repeats",
        f"averaged {before:.1e}, then least squares {after:.1e}",
        "" if repeats == 1 else "less",
        None if repeats == 1 else after < before,
    )


def server(seeds: range) -> Row:
    """A server that computes in float32 and rounds to three decimals."""
    errors, sound = [], True
    for seed in seeds:
        target = oracle.plant(dim=D, seed=seed)
        rounded = oracle.Rounded(_Float32(target), 3)
        result = extract.Tolerant(tolerance=5e-4, precision=2.0**-23)(rounded)
        errors.append(_error(result, target))
        sound &= result.guarantee is not None and errors[-1] <= result.guarantee
    what = f"float32 answers, 3 decimals, {_named(None)}, d={D}"
    return Row(what, f"measured {median(errors):.1e} (median)", SOUND, sound)


class _Float32:
    def __init__(self, inner: Oracle) -> None:
        self.inner, self.dim = inner, inner.dim

    def __call__(self, sequences):
        return self.inner(sequences).float().double()


def _limited(method: extract.Tolerant, target: Oracle) -> Extraction:
    return method(target if method.max_norm is None else oracle.Clipped(target, method.max_norm))


def _error(result: Extraction, target: oracle.Head) -> float:
    return math.inf if result.model is None else float((result.model.W - target.W).abs().max())


def _named(norm: float | None) -> str:
    return "any length" if norm is None else f"norm <= {norm:g}"


if __name__ == "__main__":
    show.main(run)
