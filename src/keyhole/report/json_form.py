"""An audit as JSON: everything that was found, and what it means.

The file is what `Audit.load` reads, with `assessment` in it for pipelines that want a verdict
and not a computation. Whoever loads the file computes it again: nothing in it is trusted.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from keyhole.assess import Assessment, Card, Decision, Item
from keyhole.core import dump
from keyhole.report import words

SCHEMA = "urn:keyhole:schema:audit:2"
_FILE = "schemas/audit-2.schema.json"


def render(assessment: Assessment) -> str:
    return f"{dump(document(assessment))}\n"


def document(assessment: Assessment) -> dict[str, Any]:
    """The whole file; its schema is in `schemas/`, and a test holds one to the other."""
    return {
        "$schema": SCHEMA,
        **assessment.audit.to_dict(),
        "assessment": meaning(assessment),
    }


def schema() -> str:
    """The JSON Schema of the file (draft 2020-12)."""
    return resources.files("keyhole.report").joinpath(_FILE).read_text("utf-8")


def meaning(assessment: Assessment) -> dict[str, Any]:
    """Verdict, counts, cards, and of each finding what is not in the finding itself."""
    audit, decision = assessment.audit, assessment.decision
    return {
        "verdict": assessment.verdict,
        "severity": assessment.severity.value,
        "exit_code": assessment.exit_code,
        "counts": {
            "checked": len(assessment.items),
            "exposed": len(assessment.exposed),
            "open": sum(item.finding.open for item in assessment.items),
            "unchecked": assessment.unchecked,
            "controls": len(assessment.controls),
            "skipped": len(audit.skips),
        },
        "cards": [_card(card) for card in assessment.families],
        "findings": [_row(item) for item in assessment.items],
        "controls": [_row(item) for item in assessment.controls],
        "gone": [_row(item) for item in assessment.gone],
        "untried": [_row(item) for item in assessment.untried],
        "other": assessment.other,
        "hypothetical": [_row(item) for item in assessment.hypothetical],
        "returns": list(assessment.returns),
        "assumed": words.assumed(assessment),
        "decision": None if decision is None else decided(decision),
    }


def _card(card: Card) -> dict[str, Any]:
    return {
        "family": card.family.value,
        "level": card.level.value,
        "severity": card.severity.value,
        "exposed": card.exposed,
        "checked": card.checked,
        "unchecked": card.unchecked,
        "worst": None if card.worst is None else card.worst.id,
        "fix": card.fix,
        "fixes": card.fixes,
    }


def _row(item: Item) -> dict[str, Any]:
    ignored = item.ignored
    return {
        "id": item.id,
        "rule": item.rule.id,
        "standards": [standard.id for standard in item.rule.standards],
        "family": item.family.value,
        "exposure": words.exposure(item.finding.exposure),
        "part": item.finding.part,
        "outcome": item.finding.outcome.value,
        "severity": item.severity.value,
        "score": item.score,
        "why": item.why,
        "share": item.share,
        "exact": item.exact,
        "proved": item.proved,
        "state": None if item.state is None else item.state.value,
        "ignored": None
        if ignored is None
        else {
            "finding": ignored.finding,
            "reason": ignored.reason,
            "until": ignored.until.isoformat(),
        },
    }


def decided(decision: Decision) -> dict[str, Any]:
    return {
        "exit_code": decision.exit_code,
        "rule": decision.rule,
        "policy": decision.source,
        "rulings": [
            {"finding": ruled.name, "ruling": ruled.ruling.value, "rule": ruled.rule}
            for ruled in decision.rulings
        ],
    }
