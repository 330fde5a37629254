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
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from keyhole.assess import RULES, Assessment, Item, Rule, Severity, State
from keyhole.assess.severity import cost
from keyhole.core import Outcome, Skip, dump
from keyhole.core.exposure import NOT_CHECKED, Exposure, rule_of
from keyhole.core.standards import CWE, FRAMEWORKS, Standard, frameworks
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


def written(runs: Sequence[Mapping[str, Any]]) -> str:
    return f"{dump({'$schema': _SCHEMA, 'version': '2.1.0', 'runs': list(runs)})}\n"


def _driver(version: str, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe Keyhole as a tool, with all rules in the order of their indices."""
    return {
        "name": "Keyhole",
        "version": version,
        "shortDescription": {"text": "What a Transformer's attention gives away."},
        "rules": list(rules),
        "supportedTaxonomies": [
            {"name": framework.name, "index": place}
            for place, framework in enumerate(FRAMEWORKS)
        ],
    }


def _taxonomies() -> list[dict[str, Any]]:
    """Describe the frameworks, each with the entries that rules refer to."""
    named = frameworks(rule.standards for rule in RULES)
    return [
        {
            "name": framework.name,
            "version": framework.version,
            "organization": framework.organization,
            "informationUri": framework.uri,
            "shortDescription": {
                "text": f"{framework.name}, edition {framework.version}."
            },
            "isComprehensive": False,
            "taxa": [
                {
                    "id": entry.id,
                    "name": entry.name,
                    "helpUri": entry.uri,
                    "shortDescription": {"text": entry.name},
                }
                for entry in entries
            ],
        }
        for framework, entries in named.items()
    ]


def _tag(standard: Standard) -> str:
    """Return an entry as a tag of a rule; GitHub recognises those of CWE."""
    if standard.framework is CWE:
        return f"external/cwe/{standard.id.lower()}"
    return f"{standard.framework.key}/{standard.id}"


def _described(
    identity: str,
    name: str,
    about: str,
    guide: tuple[str, str],
    tag: str,
    severity: Severity,
    score: float = 0.0,
    standards: tuple[Standard, ...] = (),
) -> dict[str, Any]:
    """Describe a rule; `guide` is its help as text and as Markdown.

    GitHub only reads severities of rules, not of results. `none` and `unknown` have no
    number.
    """
    tags = ["security", f"keyhole/{tag}", *map(_tag, standards)]
    properties: dict[str, Any] = {"tags": tags}
    if severity in _SPANS:
        least, most = _SPANS[severity]
        properties["security-severity"] = f"{min(max(score, least), most):.1f}"
    text, markdown = guide
    return {
        "id": identity,
        "name": _pascal(name),
        "shortDescription": {"text": name},
        "fullDescription": {"text": about},
        "help": {"text": text, "markdown": markdown},
        "defaultConfiguration": {"level": _LEVELS.get(severity, "warning")},
        "relationships": [
            {
                "target": {
                    "id": standard.id,
                    "toolComponent": {
                        "name": standard.framework.name,
                        "index": FRAMEWORKS.index(standard.framework),
                    },
                },
                "kinds": ["relevant"],
            }
            for standard in standards
        ],
        "properties": properties,
    }


def _not_tried() -> dict[str, Any]:
    """Describe the rule of checks that were not made, for those that no other rule is about."""
    why = "The result says why it was not tried, and what would change that."
    rule = _described(
        NOT_CHECKED,
        "A check that was not made",
        "What was not tried is neither given away nor kept.",
        (why, why),
        "not-checked",
        Severity.UNKNOWN,
    )
    return {**rule, "name": "NotChecked", "defaultConfiguration": {"level": "none"}}


def _invocation(assessment: Assessment) -> dict[str, Any]:
    """Describe how a run ended; what it could not check becomes warnings."""
    finished = words.finished(assessment.audit)
    warnings = [
        {"level": "warning", "message": {"text": _message(f"could not check {what}")}}
        for what in words.unchecked(assessment)
    ]
    return {
        "executionSuccessful": True,
        "exitCode": assessment.exit_code,
        "exitCodeDescription": _ENDS[assessment.exit_code],
        "toolExecutionNotifications": warnings,
        **({} if finished is None else {"endTimeUtc": finished}),
    }


def _fingerprints(name: str) -> dict[str, str]:
    """Identify a result in every run; GitHub uses the first of these, the path and the rule."""
    digest = sha256(name.encode("utf-8", "replace")).hexdigest()
    return {"primaryLocationLineHash": f"{digest[:16]}:1", "keyholeFinding/v1": digest}


def _message(text: str) -> str:
    """Escape plain text for a message, in which brackets are links and braces are placeholders."""
    line = inert(text, 4000)
    for sign, spelled in (
        ("\\", "\\\\"),
        ("[", "\\["),
        ("]", "\\]"),
        ("{", "{{"),
        ("}", "}}"),
    ):
        line = line.replace(sign, spelled)
    return line


def _pascal(name: str) -> str:
    parts = "".join(
        letter if letter.isalnum() else " " for letter in name.replace("'s", "s")
    )
    return "".join(part[0].upper() + part[1:] for part in parts.split())


# Locations. A model has no file and no line, so the location of a finding is logical:
# the target, its endpoint, the layer, the exposure. But code scanning shows nothing
# without a physical location. That is the target if its name is a path inside the
# repository, and otherwise `keyhole/` with the target's name, which is no file but the
# same in every run.

_PATH = re.compile(r"(?:\./)?((?:[\w-][\w.-]*/)*[\w-][\w.-]*)/?", re.ASCII)


class Places:
    """The logical locations of a run, to which results refer by index."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.all: list[dict[str, Any]] = []
        self._indices: dict[tuple[str, str], int] = {}

    def of(self, exposure: Exposure) -> dict[str, Any]:
        steps = [("target", self.target)]
        steps += [("endpoint", inert(exposure.part))] if exposure.part else []
        steps += (
            [] if exposure.layer is None else [("layer", f"layer {exposure.layer}")]
        )
        steps.append(("exposure", inert(words.exposure(exposure))))
        path: list[str] = []
        parent: int | None = None
        logical: list[dict[str, Any]] = []
        for kind, name in steps:
            path.append(name)
            full = " / ".join(path)
            in_parent = {} if parent is None else {"parentIndex": parent}
            place = {
                "name": name,
                "fullyQualifiedName": full,
                "kind": kind,
                **in_parent,
            }
            parent = self._indices.setdefault((kind, full), len(self.all))
            if parent == len(self.all):
                self.all.append(place)
            logical.append({**place, "index": parent})
        return {
            "physicalLocation": {
                "artifactLocation": {"uri": self.uri},
                "region": {"startLine": 1},
            },
            "logicalLocations": logical,
        }

    @property
    def uri(self) -> str:
        path = _PATH.fullmatch(self.target)
        if path is not None and ("/" in self.target or "." in self.target):
            return quote(path[1])
        return f"keyhole/{words.slug(self.target)}"


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
_ENDS = {
    0: "nothing was given away, or nothing that fails the policy",
    1: "something was given away",
    3: "something could not be checked",
}


def render(assessment: Assessment) -> str:
    """Return a file with everything that was looked at."""
    return written([run(assessment, assessment.audit.target)])


def render_alerts(assessment: Assessment) -> str:
    """Return a file with what is given away or could not be checked, and not ignored or gone."""
    return written([run(assessment, assessment.audit.target, needs_somebody)])


def run(
    assessment: Assessment, name: str, keep: Callable[[dict[str, Any]], bool] = bool
) -> dict[str, Any]:
    """Return the run of an audit, with a name of its own; `keep` chooses the results."""
    places = Places(inert(assessment.audit.target))
    items = (*assessment.items, *assessment.gone, *assessment.untried)
    results = [_result(item, places, assessment) for item in items]
    hypothetical = [
        _result(item, places, assessment) for item in assessment.hypothetical
    ]
    results += [{**each, **_HYPOTHETICAL} for each in hypothetical]
    results += [_skipped(skip, places, assessment) for skip in assessment.audit.skips]
    rules = [*(_rule(rule, assessment) for rule in RULES), _not_tried()]
    return {
        "tool": {"driver": _driver(words.version(assessment.audit), rules)},
        "taxonomies": _taxonomies(),
        "automationDetails": {"id": f"keyhole/{words.slug(inert(name))}/"},
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
    """Return whether a result is an open alert: GitHub takes whatever is in the file for one."""
    active = not result.get("suppressions") and result.get("baselineState") != "absent"
    return active and result["kind"] in ("fail", "open")


def _rule(rule: Rule, assessment: Assessment) -> dict[str, Any]:
    """Describe a rule, with the severity of its worst finding."""
    worst = next((item for item in assessment.exposed if item.rule is rule), None)
    about = f"{rule.about} {rule.family.question}"
    guide = (
        f"{about} Keyhole's documentation: {rule.guide}.",
        f"{about}\n\nKeyhole's documentation: `{rule.guide}`.",
    )
    if worst is None:
        severity = Severity.UNKNOWN
        score = 0
    else:
        severity = worst.severity
        score = worst.score
    return _described(
        rule.id,
        rule.name,
        rule.about,
        guide,
        rule.family.value,
        severity,
        score,
        rule.standards,
    )


def _result(item: Item, places: Places, assessment: Assessment) -> dict[str, Any]:
    finding = item.finding
    result: dict[str, Any] = {
        "ruleId": item.rule.id,
        "ruleIndex": RULES.index(item.rule),
        "kind": _KINDS[finding.outcome],
        "level": _LEVELS.get(item.severity, "none") if finding.exposed else "none",
        "message": {"text": _message(_sentence(item))},
        "locations": [places.of(finding.exposure)],
        "partialFingerprints": _fingerprints(item.id),
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
    return {**result, **_suppressed(item.id, assessment)}


def _suppressed(name: str, assessment: Assessment) -> dict[str, Any]:
    """Return the suppressions of a result that a policy excuses."""
    why = _message(assessment.excused(name))
    excuse = {"kind": "external", "status": "accepted", "justification": why}
    return {"suppressions": [excuse]} if why else {}


def _sentence(item: Item) -> str:
    finding = item.finding
    name = words.in_full(finding.exposure)
    parts = [f"{name}: {words.outcome(finding)} ({finding.attack}, {cost(finding)})."]
    if finding.exposed:
        parts.append(f"Severity {item.severity}, score {item.score} of 10: {item.why}.")
    parts += ["Not tried this time; this is what the baseline has."] * (
        item.state is State.UNTRIED
    )
    parts += [finding.reason] if finding.reason else []
    parts += [f"Try it: {finding.command}"] if finding.command else []
    parts += [f"Fix: {finding.remedy}"] if finding.exposed and finding.remedy else []
    return " ".join(parts)


def _skipped(skip: Skip, places: Places, assessment: Assessment) -> dict[str, Any]:
    has_rule = skip.exposure.rule != NOT_CHECKED
    compared = any(item.state is not None for item in assessment.items)
    end = "could not check" if skip.unchecked else "not tried"
    return {
        "ruleId": skip.exposure.rule,
        "ruleIndex": RULES.index(rule_of(skip.exposure)) if has_rule else len(RULES),
        "kind": "open" if skip in assessment.audit.unchecked_skips else "notApplicable",
        "level": "none",
        "message": {"text": _message(f"{words.skip(skip)}: {end}. {skip.reason}")},
        "locations": [places.of(skip.exposure)],
        "partialFingerprints": _fingerprints(
            f"skip {skip.exposure} {skip.layers} {skip.attack}"
        ),
        # Either all results of a run have a state, or none.
        **({"baselineState": "unchanged"} if compared else {}),
        "properties": {"attack": inert(skip.attack)},
        **_suppressed(skip.exposure.id, assessment),
    }
