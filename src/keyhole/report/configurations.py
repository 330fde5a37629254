"""The report of `keyhole check-config`, for people and as SARIF.

As with an audit, formats and exit code agree, and a file that could not be read never
counts as clean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keyhole.assess import Severity
from keyhole.configs import Checked, Finding, Level, Rule, Skipped, Unread
from keyhole.configs.registry import RULES
from keyhole.core import dump
from keyhole.core.exposure import NOT_CHECKED
from keyhole.core.text import inert
from keyhole.report import sarif
from keyhole.report.sarif import in_file
from keyhole.report.words import number
from keyhole.version import __version__

_SEVERITIES = {
    Level.LOW: Severity.LOW,
    Level.MEDIUM: Severity.MEDIUM,
    Level.HIGH: Severity.HIGH,
}
_ENDS = {
    0: "no setting of the level that fails opens what attacks need",
    1: "settings open what attacks need",
    3: "a file could not be read",
}


_SHOWN = 20  # files of each kind that the terminal lists; the JSON file has all


def as_text(checked: Checked) -> str:
    """Return a report for the terminal: findings in the form of compilers, then other files."""
    lines = list[str]()
    for finding in checked.findings:
        rule = finding.rule
        lines += [
            f"{finding.path}:{finding.line}: {rule.id} ({rule.level}) {finding.message}",
            f"    fix: {rule.fix}",
            f"    try: {rule.attack}",
        ]
    names = dict[str, dict[str, None]]()
    for known in checked.recognised:
        names.setdefault(known.path, {})[known.name] = None
    lines += _listed(
        [f"{path}: recognised {', '.join(found)}" for path, found in names.items()]
    )
    lines += _listed([f"{file.path}: {_why_skipped(file)}" for file in checked.skipped])
    lines += [
        f"{file.path}: could not be read: {file.reason}" for file in checked.unread
    ]
    if checked.others:
        kinds = ", ".join(f"{end} {count}" for end, count in checked.others.items())
        count = number(sum(checked.others.values()), "other file is", "other files are")
        lines.append(f"{count} no configuration by the name: {kinds}")
    return "\n".join([*lines, f"{summary(checked)}; {_findings(checked)}"])


def summary(checked: Checked) -> str:
    """Say how much was read and recognised: "read 8 files, 2 servers, 6 not recognised"."""
    found = Counter(known.what for known in checked.recognised)
    words = [f"read {number(checked.files, 'file', 'files')}"]
    words += [
        number(found[what], what, f"{what}s") for what in _RECOGNISED if found[what]
    ]
    words.append(f"{len(checked.skipped)} not recognised")
    if checked.unread:
        words.append(f"{len(checked.unread)} could not be read")
    return ", ".join(words)


_RECOGNISED = ("server", "store", "model", "saved file")


def _findings(checked: Checked) -> str:
    return number(len(checked.findings), "finding", "findings")


def _listed(lines: list[str]) -> list[str]:
    rest = len(lines) - _SHOWN
    if rest <= 0:
        return lines
    return [*lines[:_SHOWN], f"and {rest} more, which --json names"]


def _why_skipped(file: Skipped) -> str:
    if not file.mentions:
        return "not recognised: it starts or sets nothing that Keyhole knows"
    unknown = "has no form that Keyhole reads"
    why = "is not valid YAML, as templates are not" if file.broken else unknown
    return f"not recognised: it names {', '.join(file.mentions)}, and {why}"


def as_sarif(checked: Checked, least: Level) -> str:
    """Return a run with a result for each finding, at the line of its setting."""
    places = list(RULES)
    rules = [
        *map(_rule, RULES.values()),
        sarif.not_checked("A file that was not looked at."),
    ]
    results = [
        {
            "ruleId": finding.rule.id,
            "ruleIndex": places.index(finding.rule.id),
            "kind": "fail",
            "level": sarif.LEVELS[_SEVERITIES[finding.rule.level]],
            "message": {
                "text": sarif.message(f"{finding.message}. Fix: {finding.rule.fix}")
            },
            "locations": [in_file(finding.path, finding.line)],
            "partialFingerprints": sarif.fingerprints(name),
            "properties": {
                "level": str(finding.rule.level),
                "setting": inert(finding.what),
                "remedy": finding.rule.fix,
                "attack": finding.rule.attack,
            },
        }
        for name, finding in _named(checked)
    ]
    results += [_unread_result(file, len(places)) for file in checked.unread]
    code = checked.exit_code(least)
    unread = [file.path for file in checked.unread]
    run = {
        "tool": {"driver": sarif.driver(__version__, rules)},
        "taxonomies": sarif.taxonomies(rule.standards for rule in RULES.values()),
        "automationDetails": {"id": "keyhole/check-config/"},
        "invocations": [sarif.invocation(code, _ENDS, unread, None)],
        "results": results,
        "properties": {
            "verdict": f"{summary(checked)}; {_findings(checked)}",
            "fail_on": str(least),
            "files": checked.files,
            "notRecognised": [file.path for file in checked.skipped],
        },
    }
    return sarif.written([run])


CONFIG_FORMATS: Mapping[str, Callable[[Checked, Level], str]] = {
    "json": lambda checked, least: f"{dump(checked.to_dict(least))}\n",
    "sarif": as_sarif,
    "sarif-github": as_sarif,  # all results are alerts
}


def _named(checked: Checked) -> Iterator[tuple[str, Finding]]:
    """Name each finding by rule, file and setting, which stay the same if lines move."""
    seen = Counter[str]()
    for finding in checked.findings:
        name = f"{finding.rule.id} {finding.path} {finding.what}"
        seen[name] += 1
        yield f"{name} {seen[name]}", finding


def _rule(rule: Rule) -> dict[str, Any]:
    """Describe a rule; its score is the least of its level, because a setting proves nothing."""
    guide = (
        f"It opens: {rule.opens}. Fix: {rule.fix}. Try: {rule.attack}",
        f"It opens: {rule.opens}.\n\nFix: {rule.fix}.\n\nTry: `{rule.attack}`",
    )
    about = f"{rule.opens[0].upper()}{rule.opens[1:]}."
    return sarif.described(
        rule.id,
        rule.name,
        about,
        guide,
        "configuration",
        _SEVERITIES[rule.level],
        standards=rule.standards,
    )


def _unread_result(file: Unread, place: int) -> dict[str, Any]:
    return {
        "ruleId": NOT_CHECKED,
        "ruleIndex": place,
        "kind": "open",
        "level": "none",
        "message": {
            "text": sarif.message(f"{file.path}: could not be read. {file.reason}")
        },
        "locations": [in_file(file.path, 1)],
        "partialFingerprints": sarif.fingerprints(f"unread {file.path}"),
    }
