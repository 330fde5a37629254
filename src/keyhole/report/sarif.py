"""An audit as SARIF 2.1.0, the format of code scanning.

`render` takes an assessment and returns the file; `run` is the same for one target of a
fleet.

`render` is complete, as the standard intends. It also has what was kept (kind `pass`),
what could not be checked (`open`), what was not tried (`notApplicable`), what a policy
ignores (suppressions) and what is gone since a baseline (baselineState `absent`).
GitHub takes every result for an open alert, whatever its kind, suppression or state.
`render_alerts` therefore keeps only what somebody has to look at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from keyhole.assess import RULES, Assessment, Item, Rule, Severity, State
from keyhole.core import Outcome, Skip, dump
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.standards import CWE, Standard
from keyhole.core.text import inert
from keyhole.report import words

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {
    Severity.CRITICAL: "error",
    Severity.HIGH: "error",
    Severity.MEDIUM: "warning",
    Severity.LOW: "note",
}
# The security-severities for which GitHub shows each severity; a score is moved into
# its interval.
_SPANS = {
    Severity.CRITICAL: (9.1, 10.0),
    Severity.HIGH: (7.0, 8.9),
    Severity.MEDIUM: (4.0, 6.9),
    Severity.LOW: (0.1, 3.9),
}
_STATES = {
    State.NEW: "new",
    State.WORSE: "updated",
    State.BETTER: "updated",
    State.SAME: "unchanged",
    State.GONE: "absent",
    State.UNTRIED: "unchanged",
}
_KINDS = {
    Outcome.GIVEN_AWAY: "fail",
    Outcome.EXPOSED: "fail",
    Outcome.UNCHECKED: "open",
    Outcome.KEPT: "pass",
}
_HYPOTHETICAL = {"kind": "informational", "level": "none"}
_UNTRIED = {
    "id": NOT_CHECKED,
    "shortDescription": {"text": "A check that was not made"},
    "fullDescription": {"text": "What was not tried is neither given away nor kept."},
    "help": {
        "text": "The result says why it was not tried, and what would change that."
    },
    "defaultConfiguration": {"level": "none"},
    "properties": {"tags": ["security"]},
}


def render(assessment: Assessment) -> str:
    """Return a file with everything that was looked at."""
    return written([run(assessment, assessment.audit.target)])


def render_alerts(assessment: Assessment) -> str:
    """Return a file with what is given away or could not be checked, and not ignored or gone."""
    return written([run(assessment, assessment.audit.target, needs_somebody)])


def written(runs: Sequence[dict[str, Any]]) -> str:
    return f"{dump({'$schema': _SCHEMA, 'version': '2.1.0', 'runs': runs})}\n"


def run(
    assessment: Assessment,
    name: str,
    keep: Callable[[dict[str, Any]], bool] = bool,
) -> dict[str, Any]:
    """Return the run of an audit, with a name of its own; `keep` chooses the results."""
    items = (*assessment.items, *assessment.gone, *assessment.untried)
    results = [_result(item, assessment) for item in items]
    hypothetical = [_result(item, assessment) for item in assessment.hypothetical]
    results += [{**each, **_HYPOTHETICAL} for each in hypothetical]
    results += [_skipped(skip, assessment) for skip in assessment.audit.skips]
    warnings = [
        {"level": "warning", "message": _message(f"could not check {what}")}
        for what in words.unchecked(assessment)
    ]
    return {
        "tool": {
            "driver": {
                "name": "Keyhole",
                "version": words.version(assessment.audit),
                "rules": [*(_rule(rule, assessment) for rule in RULES), _UNTRIED],
            }
        },
        "automationDetails": {"id": f"keyhole/{words.slug(inert(name))}/"},
        "invocations": [
            {
                "executionSuccessful": True,
                "exitCode": assessment.exit_code,
                "toolExecutionNotifications": warnings,
            }
        ],
        "results": [result for result in results if keep(result)],
        "properties": {"verdict": assessment.verdict},
    }


def needs_somebody(result: dict[str, Any]) -> bool:
    """Return whether a result is an open alert: GitHub takes whatever is in the file for one."""
    active = not result.get("suppressions") and result.get("baselineState") != "absent"
    return active and result["kind"] in ("fail", "open")


def _rule(rule: Rule, assessment: Assessment) -> dict[str, Any]:
    """Describe a rule, with the severity of its worst finding.

    GitHub only reads severities of rules, not of results. `none` and `unknown` have no
    number.
    """
    tags = ["security", f"keyhole/{rule.family}", *map(_tag, rule.standards)]
    properties: dict[str, Any] = {"tags": tags}
    level = "warning"
    worst = next((item for item in assessment.exposed if item.rule is rule), None)
    if worst is not None and worst.severity in _SPANS:
        level = _LEVELS[worst.severity]
        low, high = _SPANS[worst.severity]
        properties["security-severity"] = f"{min(max(worst.score, low), high):.1f}"
    about = f"{rule.about} {rule.family.question}"
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.name},
        "fullDescription": {"text": rule.about},
        "help": {"text": f"{about} Keyhole's documentation: {rule.guide}."},
        "defaultConfiguration": {"level": level},
        "properties": properties,
    }


def _tag(standard: Standard) -> str:
    """Return an entry as a tag of a rule; GitHub recognises those of CWE."""
    if standard.framework is CWE:
        return f"external/cwe/{standard.id.lower()}"
    return f"{standard.framework.key}/{standard.id}"


def _result(item: Item, assessment: Assessment) -> dict[str, Any]:
    finding = item.finding
    result: dict[str, Any] = {
        "ruleId": item.rule.id,
        "kind": _KINDS[finding.outcome],
        "level": "none",
        "message": _message(words.sentence(item)),
        "locations": [location(finding.exposure, assessment.audit.target)],
        "partialFingerprints": _fingerprint(item.id),
        "properties": {
            "id": inert(item.id),
            "severity": item.severity.value,
            "score": item.score,
            "share": item.share,
            "exact": item.exact,
            "proved": item.proved,
            "status": finding.status.value,
        },
    }
    if finding.exposed:
        result["level"] = _LEVELS.get(item.severity, "none")
    if item.state is not None:
        result["baselineState"] = _STATES[item.state]
    return {**result, **_suppressed(item.id, assessment)}


def _skipped(skip: Skip, assessment: Assessment) -> dict[str, Any]:
    end = "could not check" if skip.unchecked else "not tried"
    identity = f"skip {skip.exposure} {skip.layers} {skip.attack}"
    result: dict[str, Any] = {
        "ruleId": skip.exposure.rule,
        "kind": "notApplicable",
        "level": "none",
        "message": _message(f"{words.skip(skip)}: {end}. {skip.reason}"),
        "locations": [location(skip.exposure, assessment.audit.target)],
        "partialFingerprints": _fingerprint(identity),
    }
    if skip in assessment.audit.unchecked_skips:
        result["kind"] = "open"
    # Either all results of a run have a state, or none.
    if any(item.state is not None for item in assessment.items):
        result["baselineState"] = "unchanged"
    return {**result, **_suppressed(skip.exposure.id, assessment)}


def _suppressed(name: str, assessment: Assessment) -> dict[str, Any]:
    """Return the suppressions of a result that a policy excuses."""
    why = assessment.excused(name)
    if not why:
        return {}
    excuse = {"kind": "external", "status": "accepted"}
    return {"suppressions": [{**excuse, "justification": _message(why)["text"]}]}


def _fingerprint(name: str) -> dict[str, str]:
    """Identify a result in every run; GitHub uses this, the path and the rule."""
    digest = sha256(name.encode("utf-8", "replace")).hexdigest()
    return {"primaryLocationLineHash": f"{digest[:16]}:1"}


_ESCAPES = str.maketrans({"\\": "\\\\", "[": "\\[", "]": "\\]", "{": "{{", "}": "}}"})


def _message(text: str) -> dict[str, str]:
    """Return plain text as a message, in which brackets are links and braces are placeholders."""
    return {"text": inert(text, 4000).translate(_ESCAPES)}


# Locations. A model has no file and no line, so the location of a finding is logical:
# the target, its endpoint, the layer, the exposure. But code scanning shows nothing
# without a physical location. That is the target if its name is a path inside the
# repository, and otherwise `keyhole/` with the target's name, which is no file but the
# same in every run.

_PATH = re.compile(r"(?:\./)?((?:[\w-][\w.-]*/)*[\w-][\w.-]*)/?", re.ASCII)


def location(exposure: Exposure, target: str) -> dict[str, Any]:
    target = inert(target)
    uri = f"keyhole/{words.slug(target)}"
    path = _PATH.fullmatch(target)
    if path is not None and ("/" in target or "." in target):
        uri = quote(path[1])
    name = inert(words.exposure(exposure))
    places = filter(None, (target, inert(exposure.part), name))
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": uri},
            "region": {"startLine": 1},
        },
        "logicalLocations": [
            {"name": name, "fullyQualifiedName": " / ".join(places), "kind": "exposure"}
        ],
    }
