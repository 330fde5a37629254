"""Several audits as one: of one target, each a part; or of several, each under its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keyhole.core import Audit, Finding, Skip


def together(audits: Sequence[Audit], of: str) -> Audit:
    """One audit, `of` what several targets belong to; what two found alike is there once."""
    targets = list(dict.fromkeys(audit.target for audit in audits))
    findings: dict[Finding, Finding] = {}
    skips: dict[Skip, None] = {}
    for audit in audits:
        for finding in audit.findings:
            named = finding if len(targets) == 1 else _named(finding, audit.target)
            findings.setdefault(replace(named, seconds=0.0), named)
        skips |= dict.fromkeys(audit.skips)
    return Audit(
        target=targets[0] if len(targets) == 1 else f"{len(targets)} targets of {of}",
        identity="; ".join(dict.fromkeys(audit.identity for audit in audits)),
        findings=tuple(findings.values()),
        skips=tuple(skips),
        seed=audits[0].seed if audits else 0,
        seconds=sum(audit.seconds for audit in audits),
    )


def _named(finding: Finding, target: str) -> Finding:
    """The part of a target under the target's name."""
    part = target if finding.part in ("", target) else f"{target}, {finding.part}"
    return replace(finding, exposure=replace(finding.exposure, part=part))
