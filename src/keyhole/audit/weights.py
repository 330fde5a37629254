"""The weights from answers: every kind of answer an endpoint gives, and the attack it invites.

Which exposures are tried with which method stands in extract/registry.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from keyhole.audit.check import Check, Checked
from keyhole.core import Finding, Skip, Status
from keyhole.core.progress import Track
from keyhole.extract.auto import Choice, choose
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method, judge
from keyhole.extract.registry import METHODS, Line
from keyhole.oracle import Counted, Oracle, OracleError


def checks(
    surface: str, oracle: Oracle, seed: int, *, as_given: bool = False, budget: int | None = None
) -> list[Check]:
    """Every exposure of the registry; those that this endpoint does not have are skipped.

    `as_given` leaves out what a server might do about it: answers made coarser, and budgets.
    `budget` is how many queries an attacker may ask of this one.
    """
    lines = [
        (entry, line if budget is None else replace(line, budget=budget / _unknowns(oracle)))
        for entry, line in METHODS.lines()
        if not as_given or (line.view is None and line.budget is None)
    ]

    @cache  # a few dozen questions, asked when the first check is made
    def choice() -> Choice | OracleError:
        try:
            return choose(oracle, seed)
        except OracleError as error:
            return error

    return [
        Check(
            f"weights from {line.exposure}, {entry.name}",
            partial(_check, line, METHODS.make(entry.name, seed=seed, **line.settings), surface,
                    oracle, choice),
        )
        for entry, line in lines
    ]  # fmt: skip


def _check(
    line: Line,
    method: Method,
    surface: str,
    oracle: Oracle,
    choice: Callable[[], Choice | OracleError],
    track: Track,
) -> Checked:
    """The attack, if it reads what this endpoint gives."""
    chosen = choice()
    if isinstance(chosen, OracleError):
        return Checked((_unanswered(surface, str(chosen)),))
    if line.reads is not chosen.kind:
        reason = f"it reads {line.reads}; this target gives {chosen.kind}"
        return Checked(skips=(Skip(line.exposure, type(method).__name__, reason),))
    try:
        return Checked((_run(line, method, surface, chosen.view(oracle), track),))
    except OracleError as error:  # while the auditor judged what the attacker has
        return Checked((_unanswered(surface, str(error)),))


def _unanswered(surface: str, reason: str) -> Finding:
    """Could not check: that is a finding too."""
    return Finding(
        exposure="any answer",
        attack="Auto",
        status=Status.ORACLE_FAILED,
        reason=reason,
        remedy=Status.ORACLE_FAILED.advice,
        error=None,
        queries=0,
        seconds=0.0,
        surface=surface,
    )


def _run(line: Line, method: Method, surface: str, oracle: Oracle, track: Track) -> Finding:
    seen = oracle if line.view is None else line.view(oracle)
    # A hair more: a budget in queries comes back from its share as the same whole number.
    budget = None if line.budget is None else int(line.budget * _unknowns(oracle) + 1e-6)
    expected = budget if budget is not None else method.expected(oracle.dim)
    extraction = method(Counted(seen, budget, track(line.exposure, expected)))
    if budget is not None and extraction.model is not None:
        # The budget binds the attacker, not the auditor: how good is what the attacker has?
        check = judge(oracle, extraction.model, method.seed)
        trace = ((extraction.queries, check.worst),)
        extraction = replace(extraction, check=check, trace=trace)
    if budget is not None and extraction.status is Status.BUDGET:
        extraction = replace(extraction, status=Status.UNSOLVED)  # here the budget is the defence
    return _finding(line, surface, type(method).__name__, extraction)


def _unknowns(oracle: Oracle) -> int:
    """Of one head that scores: W and v."""
    return oracle.dim**2 + oracle.dim


def _finding(line: Line, surface: str, name: str, extraction: Extraction) -> Finding:
    return Finding(
        surface=surface,
        exposure=line.exposure,
        attack=name,
        status=extraction.status,
        reason=extraction.reason,
        remedy=line.remedy,
        error=None if extraction.check is None else extraction.check.worst,
        queries=extraction.queries,
        seconds=extraction.seconds,
        floor=extraction.floor,
        known=extraction.known,
        trace=extraction.trace,
    )
