"""How bad a finding is: a score from 0 to 10, in points that anybody can count, and its name.

    what is lost       text or inputs 4, weights 3, a prediction, or a vector behind a text, 2
    how much of it     all 3, at least half 2, some 1; less than a quarter, none of it proved, 0
    at what cost       up to 10,000 queries 2, up to a million 1, more 0
    proved             1 where the secret was checked against the target and agreed

    9 and 10 critical, 7 and 8 high, 5 and 6 medium, 1 to 4 low

A finding that gave nothing away, and a control, score 0: none. Of a text, nothing was given away
where guesses without the leak would have as much of it right (audit/texts.py). What could not be
checked has no score: unknown, which is never none. Where a way is open and was not tried, what may
be lost counts, and the cost: for text that is medium. A policy may give a rule or a finding its
severity outright (assess/policy.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from keyhole.core import Finding, Outcome, Status
from keyhole.core.exposure import Family, rule_of
from keyhole.core.text import percent


class Severity(StrEnum):
    """From nothing to the worst; `unknown` stands between none and low: nobody knows."""

    NONE = "none"
    UNKNOWN = "unknown"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


_LOST = {  # its points, and what it is called
    Family.TEXT: (4, "text"), Family.INPUTS: (4, "the input"), Family.WEIGHTS: (3, "weights"),
    Family.PREDICTIONS: (2, "the prediction"),
}  # fmt: skip
_VECTOR = (2, "a vector (the last state)")
_NAMES = {Severity.CRITICAL: 9, Severity.HIGH: 7, Severity.MEDIUM: 5, Severity.LOW: 1}  # at least
ALL, MOST, MUCH = 0.99, 0.5, 0.25  # shares of the secret
_CHEAP, _AFFORDABLE = 10_000, 1_000_000  # queries


@dataclass(frozen=True)
class Score:
    """The points of a finding, and the words for each of them."""

    points: int
    severity: Severity
    why: str


def score(finding: Finding) -> Score:
    """What is lost, how exactly, at what cost, whether proved."""
    if finding.control:
        return Score(0, Severity.NONE, "a control: an attack without choice, for comparison")
    if finding.outcome is Outcome.UNCHECKED:
        return Score(0, Severity.UNKNOWN, "could not be checked")
    if not finding.exposed:
        return Score(0, Severity.NONE, f"nothing was given away{_guessed(finding)}")
    lost, what = _VECTOR if is_vector(finding) else _LOST[finding.exposure.family]
    cheap = 2 if finding.queries <= _CHEAP else 1 if finding.queries <= _AFFORDABLE else 0
    if finding.open:
        return _scored(lost + cheap, f"a way to {what} is open, {cost(finding)}")
    proved = is_proved(finding)
    much, how_much = _much(1.0 if is_vector(finding) else share(finding), proved)
    how_much += _chance(finding)
    words = (what, how_much, cost(finding), "proved" if proved else "not proved")
    return _scored(lost + much + cheap + proved, ", ".join(words))


def _scored(points: int, why: str) -> Score:
    severity = next((name for name, least in _NAMES.items() if points >= least), Severity.NONE)
    return Score(points, severity, why)


def is_vector(finding: Finding) -> bool:
    """Is it a vector that came back, behind which there is a text, and not the text?"""
    return finding.sought == "last state"


def share(finding: Finding) -> float:
    """How much of the secret is known: of texts read whole, of tokens, of unknowns, of flips."""
    if finding.open or is_vector(finding):
        return 0.0
    if finding.status in (Status.RECOVERED, Status.WITHIN):
        return 1.0
    if finding.estimate is not None:
        return max(finding.known, finding.estimate.least / finding.estimate.population)
    return finding.known


def exact(finding: Finding) -> float | None:
    """The share that came back exactly and verified: of texts, or all or nothing of the rest.

    None of what was not tried, and of a vector: no text of it is known.
    """
    if finding.open or is_vector(finding):
        return None
    if finding.texts:
        cell = finding.texts[0]
        return cell.exact / max(1, len(cell.readings))
    if finding.exposure.family is Family.PREDICTIONS:
        return finding.known if finding.exposed else 0.0
    return float(finding.status in (Status.RECOVERED, Status.WITHIN))


def is_proved(finding: Finding) -> bool:
    """Was the secret compared with the target, and did it agree?

    Flips are: the model itself gave the other answer. Text is where any whole text was verified.
    """
    if finding.exposure.family is Family.PREDICTIONS:
        return finding.exposed
    if finding.texts:
        return any(cell.exact for cell in finding.texts)
    return finding.status in (Status.RECOVERED, Status.WITHIN)


def cost(finding: Finding) -> str:
    """What was spent, in the unit that is counted: questions asked, texts seen, passes made."""
    single, several = rule_of(finding.exposure).units
    return f"{finding.queries:,} {single if finding.queries == 1 else several}"


def _chance(finding: Finding) -> str:
    """What guesses without the leak would have right, where little is known."""
    chance = finding.texts[0].chance if finding.texts else None
    if chance is None or share(finding) >= MOST or exact(finding):
        return ""
    return f" (guesses without the leak have {percent(chance)} right)"


def _guessed(finding: Finding) -> str:
    """Why tokens that are right are not given away."""
    chance = finding.texts[0].chance if finding.texts else None
    if chance is None or not finding.known:
        return ""
    return (
        f": {percent(finding.known)} of the tokens are right, which chance explains: guesses "
        f"without the leak have {percent(chance)} right"
    )


def _much(known: float, proved: bool) -> tuple[int, str]:
    """Points for how much is known; little is nearly nothing, unless it is proved."""
    if known >= ALL:
        return 3, "all of it"
    little = 0 < known < MUCH and not proved
    points = 2 if known >= MOST else 0 if little else 1
    return points, f"{percent(known)} of it" if known > 0 else "some of it"
