"""A finding in one line: what leaked, how much came back, of which text, and what stops it."""

from __future__ import annotations

from keyhole.core import Audit, Finding, Outcome, Skip
from keyhole.core.text import percent, visible
from keyhole.report import words

_LONGEST = 60  # letters of a text that a line quotes
UNCHECKED = str(Outcome.UNCHECKED)


def lines(audit: Audit) -> list[str]:
    """Every finding that counts, then what could not be checked; what was given away first."""
    findings = sorted(audit.attacks, key=lambda finding: not finding.exposed)
    target = f"{_plain(audit.target)}: "
    made = [
        f"{finding.outcome}: {'' if finding.part == audit.target else target}{line(finding)}"
        for finding in findings
    ]
    skips = [skip for skip in audit.skips if skip.unchecked]
    return made + [f"{UNCHECKED}: {target}{skipped(skip)}" for skip in skips]


def line(finding: Finding) -> str:
    """What an attack made of one exposure; the fix only where there is something to fix."""
    what = words.exposure(finding.exposure)
    if finding.attack:
        part = f"{finding.part}, " if finding.part else ""
        what = f"{part}{what} ({finding.attack})"
    if came_back(finding):
        return _plain(f"{what}: {_came_back(finding)}. Fix: {finding.remedy}")
    kept = finding.outcome is not Outcome.UNCHECKED
    return _plain(f"{what}: {_came_back(finding) if kept else finding.reason}")


def skipped(skip: Skip) -> str:
    return _plain(f"{words.skip(skip)}: {skip.reason}")


def came_back(finding: Finding) -> float:
    """The share of the secret that the attacker has: of tokens, of right answers; or all of it."""
    if finding.sought in ("text", "prediction"):
        return finding.known
    return float(finding.outcome is Outcome.GIVEN_AWAY)


def _came_back(finding: Finding) -> str:
    if finding.sought == "text":
        return f"{percent(finding.known)} of tokens came back{_text(finding)}"
    if finding.sought == "prediction":
        return f"{finding.reason.split(';')[0]}{_cut(finding)}"
    outcome = words.outcome(finding) if came_back(finding) else "not recovered"
    parts = [f"the {finding.sought}: {outcome}"]
    if finding.error is not None:
        parts.append(f"error {finding.error:.1e}")
    return ", ".join([*parts, f"{finding.queries:,} queries"])


def _text(finding: Finding) -> str:
    """How many texts, and the one of which most came back, as it came back."""
    readings = finding.texts[0].readings if finding.texts else ()
    if not readings:
        return ""
    exact = finding.texts[0].exact
    worst = max(readings, key=lambda reading: reading.known)
    count = f" ({exact} of {len(readings)} texts exactly"
    if not worst.known:
        return f"{count})"
    read = _quoted("".join(piece.text for piece in worst.pieces))
    return (
        f"{count}; {_quoted(worst.original)} as {read})" if worst.original else f"{count}; {read})"
    )


def _cut(finding: Finding) -> str:
    if not finding.cuts:
        return ""
    cut = finding.cuts[0]
    text = _quoted(" ".join(cut.tokens))
    return f" ({text} from {cut.before} to {cut.after})"


def _quoted(text: str) -> str:
    text = " ".join(text.split())
    return f"“{text if len(text) <= _LONGEST else f'{text[: _LONGEST - 1]}…'}”"


def _plain(text: str) -> str:
    """One line, control characters spelled out: recovered text must not steer a terminal."""
    return visible(" ".join(text.split()))
