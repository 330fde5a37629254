"""The severity of a finding: a score from 0 to 10, as a sum of points, and a name for it.

    what is lost       text or inputs 4, weights 3, a prediction, or a vector behind a text, 2
    how much of it     all 3, at least half 2, some 1; less than a quarter, none of it proved, 0
    at what cost       up to 10,000 queries 2, up to a million 1, more 0
    proved             1 where the secret was checked against the target and agreed

    9 and 10 critical, 7 and 8 high, 5 and 6 medium, 1 to 4 low

A finding that gave nothing away has the score 0 and the severity none; so has a
control. A text counts as not given away if guesses without the leak would have as much
of it right (audit/texts.py). A check without a result has the severity unknown, which
is never none. If a way is open and was not tried, only what may be lost and the cost
count: for text that makes medium. A policy may set the severity of a rule or of a
finding (assess/policy.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from keyhole.core import Finding, Outcome, Status
from keyhole.core.exposure import Family, rule_of
from keyhole.core.text import number, percent


class Severity(StrEnum):
    """Severities in ascending order of `rank`."""

    NONE = "none"
    UNKNOWN = "unknown"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


_LOST = {  # the points of each family, and the name of what is lost
    Family.TEXT: (4, "text"),
    Family.INPUTS: (4, "the input"),
    Family.WEIGHTS: (3, "weights"),
    Family.PREDICTIONS: (2, "the prediction"),
}
_LOST_VECTOR = (2, "a vector (the last state)")
_LEAST_POINTS = {
    Severity.CRITICAL: 9,
    Severity.HIGH: 7,
    Severity.MEDIUM: 5,
    Severity.LOW: 1,
}
# shares of the secret
ALL = 0.99
MOST = 0.5
MUCH = 0.25
# queries
_CHEAP = 10_000
_AFFORDABLE = 1_000_000


@dataclass(frozen=True)
class Score:
    """The points of a finding, and the reasons for them in words."""

    points: int
    severity: Severity
    why: str


def score(finding: Finding) -> Score:
    if finding.control:
        why = "a control: an attack without choice, for comparison"
        return Score(0, Severity.NONE, why)
    if finding.outcome is Outcome.UNCHECKED:
        return Score(0, Severity.UNKNOWN, "could not be checked")
    if not finding.exposed:
        why = f"nothing was given away{_explained_by_chance(finding)}"
        return Score(0, Severity.NONE, why)
    points, what = _LOST[finding.exposure.family]
    known = share(finding)
    if is_vector(finding):
        points, what = _LOST_VECTOR
        known = 1.0
    # 2 points up to the first of these limits, 1 up to the second.
    points += sum(finding.queries <= limit for limit in (_CHEAP, _AFFORDABLE))
    why = f"a way to {what} is open, {cost(finding)}"
    if not finding.open:
        proved = is_proved(finding)
        much, how_much = _points_for_share(known, proved)
        points += much + proved
        how_much += _compared_with_chance(finding)
        verdict = "proved" if proved else "not proved"
        why = f"{what}, {how_much}, {cost(finding)}, {verdict}"
    severity = next(each for each, least in _LEAST_POINTS.items() if points >= least)
    return Score(points, severity, why)


def is_vector(finding: Finding) -> bool:
    """Return whether a vector was recovered that a text determines, but not the text."""
    return finding.sought == "last state"


def share(finding: Finding) -> float:
    """Return the share of the secret that is known: of texts, tokens, unknowns or predictions."""
    if finding.open or is_vector(finding):
        return 0.0
    if finding.status in (Status.RECOVERED, Status.WITHIN):
        return 1.0
    if finding.estimate is not None:
        return max(finding.known, finding.estimate.least / finding.estimate.population)
    return finding.known


def exact(finding: Finding) -> float | None:
    """Return the share that was recovered exactly and verified.

    It is a share of texts or predictions; of other secrets it is 0 or 1. None if
    nothing was tried, or if only a vector was recovered and not its text.
    """
    if finding.open or is_vector(finding):
        return None
    if finding.texts:
        cell = finding.texts[0]
        return cell.exact / max(1, len(cell.readings))
    if finding.exposure.family is Family.PREDICTIONS:
        return finding.known * finding.exposed
    return float(finding.status in (Status.RECOVERED, Status.WITHIN))


def is_proved(finding: Finding) -> bool:
    """Return whether the secret was compared with the target and agreed.

    A flipped prediction is proved because the model itself gave the other answer. Text
    is proved if at least one whole text was verified.
    """
    if finding.exposure.family is Family.PREDICTIONS:
        return finding.exposed
    if finding.texts:
        return any(cell.exact for cell in finding.texts)
    return finding.status in (Status.RECOVERED, Status.WITHIN)


def cost(finding: Finding) -> str:
    """Return what the attack cost, in the unit of its rule: queries, texts, passes, and so on."""
    return number(finding.queries, *rule_of(finding.exposure).units)


def _chance(finding: Finding) -> float | None:
    """Return the share of tokens that guesses without the leak have right, if measured."""
    return next((cell.chance for cell in finding.texts[:1]), None)


def _compared_with_chance(finding: Finding) -> str:
    """Return what guesses without the leak would have right, if little of the text is known."""
    chance = _chance(finding)
    if chance is None or share(finding) >= MOST or exact(finding):
        return ""
    return f" (guesses without the leak have {percent(chance)} right)"


def _explained_by_chance(finding: Finding) -> str:
    """Return why tokens that are right are not given away."""
    chance = _chance(finding)
    if chance is None or not finding.known:
        return ""
    return (
        f": {percent(finding.known)} of the tokens are right, which chance explains: guesses "
        f"without the leak have {percent(chance)} right"
    )


def _points_for_share(known: float, proved: bool) -> tuple[int, str]:
    """Return points for how much is known, and words for it; a little counts only if proved."""
    if known >= ALL:
        return 3, "all of it"
    if known <= 0:
        return 1, "some of it"
    words = f"{percent(known)} of it"
    if known >= MOST:
        return 2, words
    if known < MUCH and not proved:
        return 0, words
    return 1, words
