"""The sentences and numbers that every form of the report shares."""

from __future__ import annotations

import re
from collections import Counter

from markupsafe import Markup

from keyhole.assess import Assessment, Policy
from keyhole.core import Finding, Outcome, Status
from keyhole.core.text import legible, percent

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_OPTION = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")


def counts(assessment: Assessment) -> str:
    """How many of the checks that count came to what."""
    total, exposed = len(assessment.items), len(assessment.exposed)
    unchecked = sum(item.finding.outcome is Outcome.UNCHECKED for item in assessment.items)
    kept = total - exposed - unchecked
    if not total:
        return "no check was made"
    parts = [f"{exposed} of {total} checks gave something away"]
    parts += [f"{kept} came back empty"] if kept else []
    parts += [f"{unchecked} had no result"] if unchecked else []
    return ", ".join(parts)


def apart(assessment: Assessment) -> str:
    """What is not in the counts: controls, and what was not tried."""
    parts = (
        (len(assessment.controls), "control", "controls"),
        (len(assessment.audit.skips), "check not made", "checks not made"),
    )
    words = ", ".join(number(*part) for part in parts if part[0])
    return f"not counted: {words}" if words else ""


def number(count: int, single: str, several: str) -> str:
    return f"{count:,} {single if count == 1 else several}"


def outcome(finding: Finding) -> str:
    """What became of the secret, in a word or two."""
    if finding.outcome is Outcome.UNCHECKED:
        return "could not check"
    if finding.sought == "prediction":
        return f"{percent(finding.known)} flipped"
    if finding.estimate is not None:
        return f"{finding.estimate.share} of texts"
    if finding.status is Status.RECOVERED:
        return "recovered"
    if finding.status is Status.WITHIN:
        return "recovered within a domain"
    if finding.sought == "text":
        cell = finding.texts[0] if finding.texts else None
        if cell is not None and cell.kind == "pooled" and cell.exact:  # one vector: all or nothing
            return f"{cell.exact} of {len(cell.readings)} texts"
        return f"{percent(finding.known)} of tokens"
    if finding.status is Status.INEXACT:
        return "nearly recovered"
    if finding.known and finding.sought == "weights":
        return f"{percent(finding.known)} known"
    return "not recovered"


def brief(remedy: str) -> str:
    """The first sentence of a remedy: a card has no room for the others."""
    return _SENTENCE.split(remedy, maxsplit=1)[0]


def error(finding: Finding) -> str:
    return "–" if finding.error is None else f"{finding.error:.1e}"


def floor(finding: Finding) -> str:
    return "–" if finding.floor is None else f"{finding.floor:,}"


def unbroken(text: str) -> Markup:
    """Escaped, with every option in one piece: a browser may end a line after its hyphens."""
    parts = _OPTION.split(legible(text))  # an option at every second place
    return Markup().join(
        Markup('<span class="option">{}</span>').format(part) if number % 2 else part
        for number, part in enumerate(parts)
    )


def ruling(assessment: Assessment) -> str:
    """What a policy or a baseline says of the audit; nothing where neither was given."""
    decision = assessment.decision
    states = Counter(item.state for item in assessment.items if item.state is not None)
    if decision is None or (decision.source == Policy().source and not states):
        return ""
    ends = {0: "passes", 1: "fails", 3: "cannot be judged"}
    changes = [f"{count} {state}" for state, count in states.items()]
    changes += [f"{len(assessment.gone)} gone"] if assessment.gone else []
    since = f" Since the baseline: {', '.join(changes)}." if changes else ""
    return f"It {ends[decision.exit_code]}: {decision.rule} ({decision.source}).{since}"
