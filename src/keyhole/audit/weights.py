"""Weights from answers: one check for each kind of answer, with the attack that reads it.

extract/registry.py lists the exposures and the methods that they are tried with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from keyhole.audit.check import Check, Checked
from keyhole.core import Finding, Skip, Status
from keyhole.core.exposure import Exposure
from keyhole.core.progress import Track
from keyhole.extract.auto import Choice, choose
from keyhole.extract.judge import Method, judge
from keyhole.extract.registry import METHODS, Row
from keyhole.oracle import Counted, Oracle, OracleError
from keyhole.report import words


def checks(
    part: str, oracle: Oracle, seed: int, *, as_given: bool = False, budget: int | None = None
) -> list[Check]:
    """Every exposure of the registry; those that this endpoint does not have are skipped.

    `as_given` leaves out rows that simulate a server's defences: coarser answers, query budgets.
    `budget` is how many queries an attacker may ask this endpoint.
    """
    rows = [
        (entry, row if budget is None else replace(row, budget=budget / _unknowns(oracle)))
        for entry, row in METHODS.rows()
        if not as_given or (row.view is None and row.budget is None)
    ]

    @cache  # a few dozen questions, asked once, by the first check that runs
    def choice() -> Choice | OracleError:
        try:
            return choose(oracle, seed)
        except OracleError as error:
            return error

    return [
        Check(
            exposure := replace(row.exposure, part=part),
            partial(_check, row, METHODS.make(entry.name, seed=seed, **row.settings), exposure,
                    oracle, choice),
            entry.name,
        )
        for entry, row in rows
    ]  # fmt: skip


def _check(
    row: Row,
    method: Method,
    exposure: Exposure,
    oracle: Oracle,
    choice: Callable[[], Choice | OracleError],
    track: Track,
) -> Checked:
    """Run the attack if it reads the kind of answer that this endpoint gives."""
    chosen = choice()
    if isinstance(chosen, OracleError):
        return Checked((_unanswered(exposure.part, str(chosen)),))
    if row.reads is not chosen.kind:
        reason = f"it reads {row.reads}; this target gives {chosen.kind}"
        return Checked(skips=(Skip(row.exposure, type(method).__name__, reason, absent=True),))
    try:
        return Checked((_run(row, method, exposure, chosen.view(oracle), track),))
    except OracleError as error:  # while the result was judged
        return Checked((_unanswered(exposure.part, str(error)),))


def _unanswered(part: str, reason: str) -> Finding:
    """The finding that the endpoint failed, so that nothing could be checked."""
    return Finding(
        exposure=Exposure("KH-WEIGHTS-SCORES", part=part),
        attack="Auto",
        status=Status.ORACLE_FAILED,
        reason=reason,
        remedy=Status.ORACLE_FAILED.advice,
        error=None,
        queries=0,
        seconds=0.0,
    )


def _run(row: Row, method: Method, exposure: Exposure, oracle: Oracle, track: Track) -> Finding:
    seen = oracle if row.view is None else row.view(oracle)
    # 1e-6, so that rounding does not lose a query: the share was made from a whole number.
    budget = None if row.budget is None else int(row.budget * _unknowns(oracle) + 1e-6)
    expected = budget if budget is not None else method.expected_queries(oracle.dim)
    extraction = method(Counted(seen, budget, track(words.exposure(exposure), expected)))
    if budget is not None and extraction.model is not None:
        # The budget binds the attacker, not the auditor: how good is what the attacker has?
        check = judge(oracle, extraction.model, method.seed)
        trace = ((extraction.queries, check.worst),)
        extraction = replace(extraction, check=check, trace=trace)
    if budget is not None and extraction.status is Status.BUDGET:
        extraction = replace(extraction, status=Status.UNSOLVED)  # the budget is the defence
    return Finding(
        exposure=exposure,
        attack=type(method).__name__,
        status=extraction.status,
        reason=extraction.reason,
        remedy=row.remedy,
        error=None if extraction.check is None else extraction.check.worst,
        queries=extraction.queries,
        seconds=extraction.seconds,
        lower_bound=extraction.lower_bound,
        known=extraction.known,
        trace=extraction.trace,
    )


def _unknowns(oracle: Oracle) -> int:
    """The unknowns of a head that answers with a score: W and v."""
    return oracle.dim**2 + oracle.dim
