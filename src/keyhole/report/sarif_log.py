"""What every SARIF 2.1.0 file of Keyhole has in common, whatever its results are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from keyhole.assess import Severity
from keyhole.core import dump
from keyhole.core.exposure import NOT_CHECKED
from keyhole.report.inert import inert

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
LEVELS = {
    Severity.CRITICAL: "error", Severity.HIGH: "error", Severity.MEDIUM: "warning",
    Severity.LOW: "note",
}  # fmt: skip
# What GitHub calls a security-severity from a number on; a score moves into its severity's span.
SPANS = {
    Severity.CRITICAL: (9.1, 10.0), Severity.HIGH: (7.0, 8.9), Severity.MEDIUM: (4.0, 6.9),
    Severity.LOW: (0.1, 3.9),
}  # fmt: skip


def written(runs: Sequence[Mapping[str, Any]]) -> str:
    """The log file of some runs."""
    return f"{dump({'$schema': SCHEMA, 'version': '2.1.0', 'runs': list(runs)})}\n"


def driver(version: str, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keyhole as a tool, with every rule that a result may name by its place."""
    return {
        "name": "Keyhole",
        "version": version,
        "shortDescription": {"text": "What a Transformer's attention gives away."},
        "rules": list(rules),
    }


def described(
    identity: str, name: str, about: str, guide: tuple[str, str], tag: str, severity: Severity,
    score: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """A rule in full; `guide` is its help as text and as Markdown.

    GitHub reads severities of rules alone. A rule of a severity that has no span has no number.
    """
    properties: dict[str, Any] = {"tags": ["security", f"keyhole/{tag}"]}
    if severity in SPANS:
        least, most = SPANS[severity]
        properties["security-severity"] = f"{min(max(score, least), most):.1f}"
    text, markdown = guide
    return {
        "id": identity,
        "name": _pascal(name),
        "shortDescription": {"text": name},
        "fullDescription": {"text": about},
        "help": {"text": text, "markdown": markdown},
        "defaultConfiguration": {"level": LEVELS.get(severity, "warning")},
        "properties": properties,
    }


def not_checked(about: str) -> dict[str, Any]:
    """The rule of a check that was not made, where no other applies: a result needs one."""
    why = "The result says why it was not tried, and what would change that."
    rule = described(
        NOT_CHECKED, "A check that was not made", about, (why, why), "not-checked",
        Severity.UNKNOWN,
    )  # fmt: skip
    return {**rule, "name": "NotChecked", "defaultConfiguration": {"level": "none"}}


def invocation(
    code: int, ends: Mapping[int, str], unchecked: Sequence[str], finished: str | None
) -> dict[str, Any]:
    """How a run ended; what it could not check is a warning of the tool."""
    warnings = [
        {"level": "warning", "message": {"text": said(f"could not check {what}")}}
        for what in unchecked
    ]
    return {
        "executionSuccessful": True,
        "exitCode": code,
        "exitCodeDescription": ends[code],
        "toolExecutionNotifications": warnings,
        **({} if finished is None else {"endTimeUtc": finished}),
    }


def fingerprints(name: str) -> dict[str, str]:
    """What stays the same from run to run; GitHub reads the first, with the path and the rule."""
    digest = sha256(name.encode("utf-8", "replace")).hexdigest()
    return {"primaryLocationLineHash": f"{digest[:16]}:1", "keyholeFinding/v1": digest}


def said(text: str) -> str:
    """A message: plain text, in which brackets make no link and braces hold no argument's place."""
    line = inert(text, 4000)
    for sign, spelled in (("\\", "\\\\"), ("[", "\\["), ("]", "\\]"), ("{", "{{"), ("}", "}}")):
        line = line.replace(sign, spelled)
    return line


def _pascal(words: str) -> str:
    parts = "".join(letter if letter.isalnum() else " " for letter in words.replace("'s", "s"))
    return "".join(part[0].upper() + part[1:] for part in parts.split())
