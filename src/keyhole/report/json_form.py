"""An audit as JSON: the file that `Audit.load` reads, with its meaning under `assessment`.

The meaning is there for pipelines that only want a verdict. `Audit.load` does not trust
it: Keyhole always computes it again. docs/schemas.py generates the file's JSON Schema
from these types and those of `core`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from keyhole.assess import (
    Assessment,
    Card,
    Decision,
    Ignore,
    Item,
    Level,
    Severity,
    State,
)
from keyhole.core import Family, Outcome, dump
from keyhole.report import words

SCHEMA = "urn:keyhole:schema:audit:2"
_FILE = "schemas/audit-2.schema.json"


@dataclass(frozen=True)
class CountsForm:
    checked: int
    exposed: int
    open: int
    """Of the exposed, ways that are open and were not tried."""
    unchecked: int
    controls: int
    skipped: int


@dataclass(frozen=True)
class CardForm:
    """A summary of one family."""

    family: Family
    level: Level
    severity: Severity
    exposed: int
    checked: int
    unchecked: int
    worst: str | None
    """The id of a finding."""
    fix: str
    fixes: int


@dataclass(frozen=True)
class FindingForm:
    """What a finding does not say itself."""

    id: str
    """Stays the same from audit to audit of the same target."""
    rule: str
    standards: list[str]
    """Entries of OWASP, AISVS, ATLAS and CWE that the rule is about."""
    family: Family
    exposure: str
    part: str
    outcome: Outcome
    severity: Severity
    score: int
    """From 0 to 10."""
    why: str
    share: float
    exact: float | None
    """Null where nothing was tried, and of a vector: no text of it is known."""
    proved: bool
    state: State | None
    ignored: Ignore | None


@dataclass(frozen=True)
class AssessmentForm:
    """For pipelines: Keyhole computes it again from `findings` and never trusts it."""

    verdict: str
    severity: Severity
    exit_code: int
    counts: CountsForm
    cards: list[CardForm]
    findings: list[FindingForm]
    controls: list[FindingForm]
    gone: list[FindingForm]
    """Given away in the baseline, and not there any more."""
    untried: list[FindingForm]
    """Given away in the baseline, and not checked this time: as before."""
    other: str
    """The target of the baseline, where that is another one: then everything is new."""
    hypothetical: list[FindingForm]
    """Findings about what the service does not return: they decide nothing."""
    returns: list[str]
    """What the service returns, where that was said."""
    assumed: str
    """What was taken for granted of the service, where nobody said what it returns."""
    decision: Decision | None


def render(assessment: Assessment) -> str:
    return f"{dump(document(assessment))}\n"


def document(assessment: Assessment) -> dict[str, Any]:
    return {
        "$schema": SCHEMA,
        **assessment.audit.to_dict(),
        "assessment": meaning(assessment),
    }


def schema() -> str:
    """Return the JSON Schema of the file (draft 2020-12)."""
    return resources.files("keyhole.report").joinpath(_FILE).read_text("utf-8")


def meaning(assessment: Assessment) -> dict[str, Any]:
    """Return verdict, counts and cards, and for each finding what it does not say itself."""
    audit = assessment.audit
    counts = CountsForm(
        checked=len(assessment.items),
        exposed=len(assessment.exposed),
        open=sum(item.finding.open for item in assessment.items),
        unchecked=audit.unchecked,
        controls=len(assessment.controls),
        skipped=len(audit.skips),
    )
    form = AssessmentForm(
        verdict=assessment.verdict,
        severity=assessment.severity,
        exit_code=assessment.exit_code,
        counts=counts,
        cards=[_card(card) for card in assessment.families],
        findings=[_finding(item) for item in assessment.items],
        controls=[_finding(item) for item in assessment.controls],
        gone=[_finding(item) for item in assessment.gone],
        untried=[_finding(item) for item in assessment.untried],
        other=assessment.other,
        hypothetical=[_finding(item) for item in assessment.hypothetical],
        returns=list(audit.returns),
        assumed=words.assumed(assessment),
        decision=assessment.decision,
    )
    return asdict(form)


def _card(card: Card) -> CardForm:
    worst = card.worst and card.worst.id
    given: dict[str, Any] = {**vars(card), "worst": worst}
    return CardForm(**given)


def _finding(item: Item) -> FindingForm:
    return FindingForm(
        id=item.id,
        rule=item.rule.id,
        standards=[standard.id for standard in item.rule.standards],
        family=item.family,
        exposure=words.exposure(item.finding.exposure),
        part=item.finding.part,
        outcome=item.finding.outcome,
        severity=item.severity,
        score=item.score,
        why=item.why,
        share=item.share,
        exact=item.exact,
        proved=item.proved,
        state=item.state,
        ignored=item.ignored,
    )
