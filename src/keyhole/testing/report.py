"""All audits of a session as one, and the files that it is written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keyhole import report
from keyhole.files import write_text
from keyhole.results import Audit, Finding, Skip


def write(audits: Sequence[dict[str, Any]], files: Sequence[Path]) -> None:
    """FILE.json as `keyhole audit` writes it, every other as its page."""
    audit = together([Audit.from_dict(data) for data in audits])
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".json":
            audit.save(file)
        else:
            write_text(file, report.render(audit))


def together(audits: Sequence[Audit]) -> Audit:
    """One audit of several targets; what two tests found alike is there once."""
    targets = list(dict.fromkeys(audit.target for audit in audits))
    findings: dict[Finding, Finding] = {}
    skips: dict[Skip, None] = {}
    for audit in audits:
        for finding in audit.findings:
            named = finding if len(targets) == 1 else _named(finding, audit.target)
            findings.setdefault(replace(named, seconds=0.0), named)
        skips |= dict.fromkeys(audit.skips)
    return Audit(
        target=targets[0] if len(targets) == 1 else f"{len(targets)} targets of a test session",
        identity="; ".join(dict.fromkeys(audit.identity for audit in audits)),
        findings=tuple(findings.values()),
        skips=tuple(skips),
        seed=audits[0].seed if audits else 0,
        seconds=sum(audit.seconds for audit in audits),
    )


def _named(finding: Finding, target: str) -> Finding:
    """The part of a target under the target's name."""
    parts = [target, finding.surface] if finding.surface not in ("", target) else [target]
    return replace(finding, surface=", ".join(parts))
