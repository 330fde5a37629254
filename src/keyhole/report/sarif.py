"""An audit as SARIF 2.1.0, the format of code scanning.

Two forms. `render` is complete, as the standard has it: also what was kept (kind `pass`), what
could not be checked (`open`), what was not tried (`notApplicable`), what a policy ignores
(suppressions) and what is gone since a baseline (baselineState `absent`). GitHub takes every result
for an open alert, whatever its kind, suppression or state: `render_alerts` leaves only what needs
somebody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keyhole.assess import RULES, Assessment, Item, Rule, Severity, State
from keyhole.assess.severity import cost
from keyhole.core import Outcome, Skip
from keyhole.core.exposure import NOT_CHECKED, rule_of
from keyhole.report import provenance, words
from keyhole.report.inert import inert
from keyhole.report.sarif_log import (
    LEVELS,
    described,
    driver,
    fingerprints,
    invocation,
    not_checked,
    said,
    written,
)
from keyhole.report.sarif_places import Places

_NOT_CHECKED = not_checked("What was not tried is neither given away nor kept.")
_STATES = {
    State.NEW: "new", State.WORSE: "updated", State.BETTER: "updated", State.SAME: "unchanged",
    State.GONE: "absent",
}  # fmt: skip
_ENDS = {
    0: "nothing was given away, or nothing that fails the policy",
    1: "something was given away",
    3: "something could not be checked",
}


def render(assessment: Assessment) -> str:
    """Everything that was looked at."""
    return written([run(assessment, assessment.audit.target)])


def render_alerts(assessment: Assessment) -> str:
    """What is given away or could not be checked, and neither ignored nor gone."""
    return written([run(assessment, assessment.audit.target, needs_somebody)])


def run(
    assessment: Assessment, name: str, keep: Callable[[dict[str, Any]], bool] = bool
) -> dict[str, Any]:
    """One audit; `name` tells it from other runs of a file, `keep` says which results are in it."""
    places = Places(inert(assessment.audit.target))
    results = [_result(item, places) for item in (*assessment.items, *assessment.gone)]
    compared = any(item.state is not None for item in assessment.items)
    results += [_skipped(skip, places, compared) for skip in assessment.audit.skips]
    return {
        "tool": {"driver": _driver(assessment)},
        "automationDetails": {"id": f"keyhole/{provenance.slug(inert(name))}/"},
        "invocations": [_invocation(assessment)],
        "logicalLocations": places.all,
        "results": [result for result in results if keep(result)],
        "properties": {
            "verdict": assessment.verdict,
            "severity": assessment.severity.value,
            "target": inert(assessment.audit.target),
        },
    }


def needs_somebody(result: dict[str, Any]) -> bool:
    """Is it an open alert? GitHub takes whatever is in the file for one."""
    active = not result.get("suppressions") and result.get("baselineState") != "absent"
    return active and result["kind"] in ("fail", "open")


def _driver(assessment: Assessment) -> dict[str, Any]:
    rules = [*(_rule(rule, assessment) for rule in RULES), _NOT_CHECKED]
    return driver(provenance.version(assessment.audit), rules)


def _rule(rule: Rule, assessment: Assessment) -> dict[str, Any]:
    """A rule has the severity of its worst finding."""
    worst = next((item for item in assessment.exposed if item.rule is rule), None)
    about = f"{rule.about} {rule.family.question}"
    guide = (
        f"{about} Keyhole's documentation: {rule.guide}.",
        f"{about}\n\nKeyhole's documentation: `{rule.guide}`.",
    )
    severity, score = (Severity.UNKNOWN, 0) if worst is None else (worst.severity, worst.score)
    return described(rule.id, rule.name, rule.about, guide, rule.family.value, severity, score)


def _invocation(assessment: Assessment) -> dict[str, Any]:
    unchecked = [
        *(
            words.in_full(item.finding.exposure)
            for item in assessment.items
            if item.finding.outcome is Outcome.UNCHECKED
        ),
        *(words.skip(skip) for skip in assessment.audit.skips if skip.unchecked),
    ]
    finished = provenance.finished(assessment.audit)
    return invocation(assessment.exit_code, _ENDS, unchecked, finished)


def _result(item: Item, places: Places) -> dict[str, Any]:
    finding = item.finding
    result: dict[str, Any] = {
        "ruleId": item.rule.id,
        "ruleIndex": RULES.index(item.rule),
        "kind": _kind(item),
        "level": LEVELS.get(item.severity, "none") if finding.exposed else "none",
        "message": {"text": said(_sentence(item))},
        "locations": [places.of(finding.exposure)],
        "partialFingerprints": fingerprints(item.id),
        "properties": {
            "id": inert(item.id),
            "tags": [item.family.value, item.severity.value],
            "severity": item.severity.value,
            "score": item.score,
            "why": item.why,
            "cost": cost(finding),
            "share": item.share,
            "exact": item.exact,
            "proved": item.proved,
            "attack": inert(finding.attack),
            "status": finding.status.value,
            "remedy": inert(finding.remedy),
            "seconds": finding.seconds,
        },
    }
    if finding.exposed:
        result["rank"] = 10.0 * item.score
    if item.state is not None:
        result["baselineState"] = _STATES[item.state]
    if item.ignored is not None:
        why = said(f"{item.ignored.reason} (until {item.ignored.until})")
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": why}]
    return result


def _kind(item: Item) -> str:
    if item.finding.exposed:
        return "fail"
    return "open" if item.finding.outcome is Outcome.UNCHECKED else "pass"


def _sentence(item: Item) -> str:
    finding = item.finding
    name = words.in_full(finding.exposure)
    parts = [f"{name}: {words.outcome(finding)} ({finding.attack}, {cost(finding)})."]
    if finding.exposed:
        parts.append(f"Severity {item.severity}, score {item.score} of 10: {item.why}.")
    parts += [finding.reason] if finding.reason else []
    parts += [f"Fix: {finding.remedy}"] if finding.exposed and finding.remedy else []
    return " ".join(parts)


def _skipped(skip: Skip, places: Places, compared: bool) -> dict[str, Any]:
    known = skip.exposure.rule != NOT_CHECKED
    end = "could not check" if skip.unchecked else "not tried"
    return {
        "ruleId": skip.exposure.rule,
        "ruleIndex": RULES.index(rule_of(skip.exposure)) if known else len(RULES),
        "kind": "open" if skip.unchecked else "notApplicable",
        "level": "none",
        "message": {"text": said(f"{words.skip(skip)}: {end}. {skip.reason}")},
        "locations": [places.of(skip.exposure)],
        "partialFingerprints": fingerprints(f"skip {skip.exposure} {skip.layers} {skip.attack}"),
        # All results of a run have a state or none has; of checks that were not made none changed.
        **({"baselineState": "unchanged"} if compared else {}),
        "properties": {"attack": inert(skip.attack)},
    }
