"""An audit as a CycloneDX 1.6 bill of materials for machine learning (ML-BOM).

Each endpoint or model of the target is a component of type `machine-learning-model`; what was tried
on it stands in its model card, as figures with what they were measured on, and what is given away
as risks with what would stop them. The same as vulnerabilities, for programs that read those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keyhole.assess import Assessment, Family, Item, State
from keyhole.assess.severity import cost
from keyhole.core import Audit, Outcome, dump
from keyhole.report import provenance, wording
from keyhole.report.inert import inert

SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
# Families whose attacks run the model's own attention: that they ran says what it is.
_SEEN_INSIDE = (Family.TEXT, Family.PREDICTIONS, Family.INPUTS)


def render(assessment: Assessment) -> str:
    return f"{dump(document(assessment))}\n"


def document(assessment: Assessment) -> dict[str, Any]:
    """The bill of materials; the same audit gives the same serial number."""
    audit, finished = assessment.audit, provenance.finished(assessment.audit)
    present, items = assessment.items, (*assessment.items, *assessment.gone)
    surfaces = list(dict.fromkeys(item.finding.surface for item in items)) or [""]
    tool = {"type": "application", "name": "keyhole", "version": provenance.version(audit)}
    return {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{provenance.serial(audit)}",
        "version": 1,
        "metadata": {
            **({} if finished is None else {"timestamp": finished}),
            "tools": {"components": [tool]},
            "component": {
                "type": "application", "bom-ref": "target", "name": _name(audit, ""),
                "properties": _properties(identity=audit.identity),
            },
            "properties": _properties(
                verdict=assessment.verdict, severity=assessment.severity, seed=str(audit.seed),
            ),
        },
        "components": [
            _model(audit, number, surface, [i for i in present if i.finding.surface == surface])
            for number, surface in enumerate(surfaces)
        ],
        "dependencies": [
            {"ref": "target", "dependsOn": [_ref(number) for number in range(len(surfaces))]}
        ],
        "vulnerabilities": [
            _vulnerability(item, _ref(surfaces.index(item.finding.surface)))
            for item in items
            if item.finding.outcome is not Outcome.KEPT or item.state is State.GONE
        ],
    }  # fmt: skip


def _ref(number: int) -> str:
    return f"model-{number + 1}"


def _name(audit: Audit, surface: str) -> str:
    return inert(surface or audit.target) or "a target without a name"


def _properties(**values: str) -> list[dict[str, str]]:
    return [
        {"name": f"keyhole:{name}", "value": inert(value)}
        for name, value in values.items()
        if value
    ]


def _model(audit: Audit, number: int, surface: str, items: Sequence[Item]) -> dict[str, Any]:
    exposed = [item for item in items if item.finding.exposed]
    known = any(
        item.finding.outcome is not Outcome.UNCHECKED and item.family in _SEEN_INSIDE
        for item in items
    )
    considerations = {
        "technicalLimitations": [_limit(item) for item in exposed],
        "ethicalConsiderations": [_risk(item) for item in exposed],
    }
    return {
        "type": "machine-learning-model",
        "bom-ref": _ref(number),
        "name": _name(audit, surface),
        "modelCard": {
            "bom-ref": f"{_ref(number)}-card",
            **({"modelParameters": {"architectureFamily": "transformer"}} if known else {}),
            "quantitativeAnalysis": {
                "performanceMetrics": [_metric(item) for item in items]
            },
            "considerations": considerations,
            "properties": _properties(
                checked=str(len(items)), exposed=str(len(exposed)),
                rules=", ".join(dict.fromkeys(item.rule.id for item in exposed)),
            ),
        },
    }  # fmt: skip


def _metric(item: Item) -> dict[str, Any]:
    """How much of the secret came back; of a store, with the interval for all of its texts."""
    estimate = item.finding.estimate
    interval = {} if estimate is None else {
        "confidenceInterval": {
            "lowerBound": f"{estimate.least / estimate.population:.6g}",
            "upperBound": f"{estimate.most / estimate.population:.6g}",
        }
    }  # fmt: skip
    value = "unknown" if item.finding.outcome is Outcome.UNCHECKED else f"{item.share:.6g}"
    return {
        "type": f"share of {item.family} known to an attacker ({item.rule.id})",
        "value": value,
        "slice": inert(f"{item.finding.exposure} ({item.finding.attack}, {cost(item.finding)})"),
        **interval,
    }


def _limit(item: Item) -> str:
    outcome = wording.outcome(item.finding)
    return inert(f"{item.severity}: {item.finding.exposure}: {outcome} ({item.why})")


def _risk(item: Item) -> dict[str, str]:
    remedy = inert(item.finding.remedy)
    return {
        "name": inert(f"{item.rule.name}: {item.finding.exposure}"),
        **({"mitigationStrategy": remedy} if remedy else {}),
    }


def _vulnerability(item: Item, affected: str) -> dict[str, Any]:
    finding, source = item.finding, {"name": "Keyhole"}
    remedy, reason = inert(finding.remedy), inert(finding.reason)
    rating = {
        "source": source, "score": item.score, "severity": item.severity.value, "method": "other",
        "justification": item.why,
    }  # fmt: skip
    return {
        "bom-ref": f"{'gone' if item.state is State.GONE else 'finding'}-{inert(item.id)}",
        "id": inert(item.id),
        "source": source,
        "ratings": [rating],
        "description": f"{item.rule.name}. {item.rule.about}",
        **({"detail": reason} if reason else {}),
        **({"recommendation": remedy} if remedy else {}),
        "analysis": _analysis(item),
        "affects": [{"ref": affected}],
        "properties": _properties(
            rule=item.rule.id, exposure=finding.exposure, attack=finding.attack,
            status=finding.status, cost=cost(finding), share=f"{item.share:.6g}",
            exact=f"{item.exact:.6g}", state=item.state or "",
        ),
    }  # fmt: skip


def _analysis(item: Item) -> dict[str, Any]:
    if item.state is State.GONE:
        return {"state": "resolved", "detail": "in the baseline, and no longer given away"}
    if item.finding.outcome is Outcome.UNCHECKED:
        return {"state": "in_triage", "detail": "could not be checked"}
    detail = "proved on the target" if item.proved else "measured, not proved"
    if item.ignored is None:
        return {"state": "exploitable", "detail": detail}
    reason = inert(f"{item.ignored.reason} (until {item.ignored.until})")
    return {"state": "exploitable", "response": ["will_not_fix"], "detail": f"{detail}; {reason}"}
