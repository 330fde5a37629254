"""An audit as SARIF 2.1.0, the format of code scanning.

Two forms. `render` is complete, as the standard has it: also what was kept (kind `pass`), what
could not be checked (`open`), what was not tried (`notApplicable`), what a policy ignores
(suppressions) and what is gone since a baseline (baselineState `absent`). GitHub takes every result
for an open alert, whatever its kind, suppression or state: `render_alerts` leaves only what needs
somebody.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

from keyhole.assess import RULES, Assessment, Item, Rule, Severity, State
from keyhole.assess.rules import OTHERS, rule_of_skip
from keyhole.assess.severity import cost
from keyhole.report import provenance, wording
from keyhole.report.inert import inert
from keyhole.report.sarif_places import Places
from keyhole.results import Outcome, Skip, dump

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_ALL_RULES = (*RULES, *OTHERS.values())
# The rule of a check that was not made, where its words do not tell which: a result needs one.
_NOT_CHECKED = {
    "id": "KH-NOT-CHECKED",
    "name": "NotChecked",
    "shortDescription": {"text": "A check that was not made"},
    "fullDescription": {"text": "What was not tried is neither given away nor kept."},
    "help": {
        "text": "The result says why it was not tried, and what would change that.",
        "markdown": "The result says why it was not tried, and what would change that.",
    },
    "defaultConfiguration": {"level": "none"},
    "properties": {"tags": ["security", "keyhole/not-checked"]},
}
_LEVELS = {
    Severity.CRITICAL: "error", Severity.HIGH: "error", Severity.MEDIUM: "warning",
    Severity.LOW: "note",
}  # fmt: skip
# What GitHub calls a security-severity from a number on; the score moves into its severity's span.
_SPANS = {
    Severity.CRITICAL: (9.1, 10.0), Severity.HIGH: (7.0, 8.9), Severity.MEDIUM: (4.0, 6.9),
    Severity.LOW: (0.1, 3.9),
}  # fmt: skip
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
    return f"{dump(log(assessment))}\n"


def render_alerts(assessment: Assessment) -> str:
    """What is given away or could not be checked, and neither ignored nor gone."""
    return f"{dump(log(assessment, _needs_somebody))}\n"


def log(assessment: Assessment, keep: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
    """The log file; `keep` says which results are in it."""
    places = Places(inert(assessment.audit.target))
    results = [_result(item, places) for item in (*assessment.items, *assessment.gone)]
    compared = any(item.state is not None for item in assessment.items)
    results += [_skipped(skip, places, compared) for skip in assessment.audit.skips]
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver(assessment)},
                "automationDetails": {"id": f"keyhole/{places.slug}/"},
                "invocations": [_invocation(assessment)],
                "logicalLocations": places.all,
                "results": [result for result in results if keep(result)],
                "properties": {
                    "verdict": assessment.verdict,
                    "severity": assessment.severity.value,
                    "target": inert(assessment.audit.target),
                },
            }
        ],
    }


def _needs_somebody(result: dict[str, Any]) -> bool:
    active = not result.get("suppressions") and result.get("baselineState") != "absent"
    return active and result["kind"] in ("fail", "open")


def _driver(assessment: Assessment) -> dict[str, Any]:
    return {
        "name": "Keyhole",
        "version": provenance.version(assessment.audit),
        "shortDescription": {"text": "What a Transformer's attention gives away."},
        "rules": [*(_rule(rule, assessment) for rule in _ALL_RULES), _NOT_CHECKED],
    }


def _rule(rule: Rule, assessment: Assessment) -> dict[str, Any]:
    """A rule in full. GitHub reads severities of rules alone: a rule has that of its worst."""
    worst = next((item for item in assessment.exposed if item.rule is rule), None)
    about = f"{rule.about} {rule.family.question}"
    properties: dict[str, Any] = {"tags": ["security", f"keyhole/{rule.family}"]}
    level = "warning"
    if worst is not None and worst.severity in _SPANS:
        properties["security-severity"] = _security_severity(worst)
        level = _LEVELS[worst.severity]
    return {
        "id": rule.id,
        "name": _pascal(rule.name),
        "shortDescription": {"text": rule.name},
        "fullDescription": {"text": rule.about},
        "help": {
            "text": f"{about} Keyhole's documentation: {rule.guide}.",
            "markdown": f"{about}\n\nKeyhole's documentation: `{rule.guide}`.",
        },
        "defaultConfiguration": {"level": level},
        "properties": properties,
    }


def _security_severity(item: Item) -> str:
    least, most = _SPANS[item.severity]
    return f"{min(max(float(item.score), least), most):.1f}"


def _pascal(words: str) -> str:
    parts = "".join(letter if letter.isalnum() else " " for letter in words.replace("'s", "s"))
    return "".join(part[0].upper() + part[1:] for part in parts.split())


def _invocation(assessment: Assessment) -> dict[str, Any]:
    code, finished = assessment.exit_code, provenance.finished(assessment.audit)
    unchecked = [
        {"level": "warning", "message": {"text": _said(f"could not check {what}")}}
        for what in [
            *(item.of for item in assessment.items if item.finding.outcome is Outcome.UNCHECKED),
            *(skip.exposure for skip in assessment.audit.skips if skip.unchecked),
        ]
    ]
    return {
        "executionSuccessful": True,
        "exitCode": code,
        "exitCodeDescription": _ENDS[code],
        "toolExecutionNotifications": unchecked,
        **({} if finished is None else {"endTimeUtc": finished}),
    }


def _result(item: Item, places: Places) -> dict[str, Any]:
    finding = item.finding
    result: dict[str, Any] = {
        "ruleId": item.rule.id,
        "ruleIndex": _ALL_RULES.index(item.rule),
        "kind": _kind(item),
        "level": _LEVELS.get(item.severity, "none") if finding.exposed else "none",
        "message": {"text": _said(_sentence(item))},
        "locations": [places.of(finding.surface, finding.exposure)],
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
        why = _said(f"{item.ignored.reason} (until {item.ignored.until})")
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": why}]
    return result


def _kind(item: Item) -> str:
    if item.finding.exposed:
        return "fail"
    return "open" if item.finding.outcome is Outcome.UNCHECKED else "pass"


def _sentence(item: Item) -> str:
    finding = item.finding
    parts = [f"{item.of}: {wording.outcome(finding)} ({finding.attack}, {cost(finding)})."]
    if finding.exposed:
        parts.append(f"Severity {item.severity}, score {item.score} of 10: {item.why}.")
    parts += [finding.reason] if finding.reason else []
    parts += [f"Fix: {finding.remedy}"] if finding.exposed and finding.remedy else []
    return " ".join(parts)


def _skipped(skip: Skip, places: Places, compared: bool) -> dict[str, Any]:
    rule = rule_of_skip(skip)
    end = "could not check" if skip.unchecked else "not tried"
    return {
        "ruleId": _NOT_CHECKED["id"] if rule is None else rule.id,
        "ruleIndex": len(_ALL_RULES) if rule is None else _ALL_RULES.index(rule),
        "kind": "open" if skip.unchecked else "notApplicable",
        "level": "none",
        "message": {"text": _said(f"{skip.exposure}: {end}. {skip.reason}")},
        "locations": [places.of("", skip.exposure)],
        "partialFingerprints": fingerprints(f"skip {skip.exposure} {skip.attack}"),
        # All results of a run have a state or none has; of checks that were not made none changed.
        **({"baselineState": "unchanged"} if compared else {}),
        "properties": {"attack": inert(skip.attack)},
    }


def fingerprints(name: str) -> dict[str, str]:
    """What stays the same from run to run; GitHub reads the first, with the path and the rule."""
    digest = sha256(name.encode("utf-8", "replace")).hexdigest()
    return {"primaryLocationLineHash": f"{digest[:16]}:1", "keyholeFinding/v1": digest}


def _said(text: str) -> str:
    """A message: plain text, in which brackets make no link and braces hold no argument's place."""
    line = inert(text, 4000)
    for sign, written in (("\\", "\\\\"), ("[", "\\["), ("]", "\\]"), ("{", "{{"), ("}", "}}")):
        line = line.replace(sign, written)
    return line
