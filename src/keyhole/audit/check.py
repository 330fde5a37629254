"""What a family of exposures gives an audit: findings, and what it could not check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keyhole.results import Finding, Skip

Watch = Callable[[str, int, int | None], None]  # exposure, done so far, expected


@dataclass(frozen=True)
class Checked:
    findings: tuple[Finding, ...] = ()
    skips: tuple[Skip, ...] = ()
