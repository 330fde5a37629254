"""An audit as JSON: the file that `Audit.load` reads, with its meaning under `assessment`.

The meaning is there for pipelines that only want a verdict. `Audit.load` does not trust
it: Keyhole always computes it again.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from keyhole.assess import Assessment, Decision, Item
from keyhole.core import dump
from keyhole.report import words

SCHEMA = "urn:keyhole:schema:audit:2"
_FILE = "schemas/audit-2.schema.json"


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
    decision = assessment.decision
    return {
        "verdict": assessment.verdict,
        "severity": assessment.severity,
        "exit_code": assessment.exit_code,
        "counts": {
            "checked": len(assessment.items),
            "exposed": len(assessment.exposed),
            "open": sum(item.finding.open for item in assessment.items),
            "unchecked": assessment.audit.unchecked,
            "controls": len(assessment.controls),
            "skipped": len(audit.skips),
        },
        "cards": [
            {**vars(card), "worst": None if card.worst is None else card.worst.id}
            for card in assessment.families
        ],
        "findings": [_row(item) for item in assessment.items],
        "controls": [_row(item) for item in assessment.controls],
        "gone": [_row(item) for item in assessment.gone],
        "untried": [_row(item) for item in assessment.untried],
        "other": assessment.other,
        "hypothetical": [_row(item) for item in assessment.hypothetical],
        "returns": list(assessment.audit.returns),
        "assumed": words.assumed(assessment),
        "decision": None if decision is None else decided(decision),
    }


def _row(item: Item) -> dict[str, Any]:
    ignored = item.ignored
    return {
        "id": item.id,
        "rule": item.rule.id,
        "standards": [standard.id for standard in item.rule.standards],
        "family": item.family,
        "exposure": words.exposure(item.finding.exposure),
        "part": item.finding.part,
        "outcome": item.finding.outcome,
        "severity": item.severity,
        "score": item.score,
        "why": item.why,
        "share": item.share,
        "exact": item.exact,
        "proved": item.proved,
        "state": item.state,
        "ignored": ignored and {**vars(ignored), "until": ignored.until.isoformat()},
    }


def decided(decision: Decision) -> dict[str, Any]:
    return {
        "exit_code": decision.exit_code,
        "rule": decision.rule,
        "policy": decision.source,
        "rulings": [
            {"finding": ruled.name, "ruling": ruled.ruling, "rule": ruled.rule}
            for ruled in decision.rulings
        ],
    }
