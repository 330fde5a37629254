"""What a family of exposures gives an audit: findings, and what it could not check."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.results import Finding, Skip


@dataclass(frozen=True)
class Checked:
    findings: tuple[Finding, ...] = ()
    skips: tuple[Skip, ...] = ()
