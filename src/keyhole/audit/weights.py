"""The weights from answers: every kind of answer an endpoint gives, and the attack it invites.

Which exposures are tried with which method stands in extract/registry.py.
"""

from __future__ import annotations

from dataclasses import replace

from keyhole.audit.check import Checked
from keyhole.extract.auto import choose
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method, judge
from keyhole.extract.registry import METHODS, Line
from keyhole.oracle import Counted, Oracle, OracleError
from keyhole.progress import Track
from keyhole.results import Finding, Skip, Status


def check(surface: str, oracle: Oracle, seed: int, track: Track) -> Checked:
    """Every attack that reads what this endpoint gives; the others are skipped."""
    try:
        choice = choose(oracle, seed)
    except OracleError as error:
        return Checked((_unanswered(surface, str(error)),))
    kind, view = choice.kind, choice.view(oracle)
    findings: list[Finding] = []
    skips: list[Skip] = []
    for entry, line in METHODS.lines():
        method = METHODS.make(entry.name, seed=seed, **line.settings)
        if line.reads is kind:
            findings.append(_run(line, method, surface, view, track))
        else:
            reason = f"it reads {line.reads}; this target gives {kind}"
            skips.append(Skip(line.exposure, type(method).__name__, reason))
    return Checked(tuple(findings), tuple(skips))


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
    floor = oracle.dim**2 + oracle.dim
    budget = None if line.budget is None else int(line.budget * floor)
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
