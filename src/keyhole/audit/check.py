"""A check: one attack on one exposure of one part of a target, and what it finds.

An audit is a list of checks. No check needs the result of another, so an audit that was
stopped resumes with the checks that are left (core/journal.py).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from keyhole.audit.options import AuditOptions
from keyhole.core import Finding, Skip, Status
from keyhole.core.exposure import Exposure
from keyhole.core.journal import stopping_on_ctrl_c
from keyhole.core.machine import largest_matrix
from keyhole.core.progress import Track


@dataclass(frozen=True)
class Checked:
    """The findings of a check, what it skipped, and how long it took."""

    findings: tuple[Finding, ...]
    skips: tuple[Skip, ...] = ()
    seconds: float = 0.0

    @property
    def answered(self) -> bool:
        """Whether the target answered; if it did not, the check is worth another try."""
        failed = any(
            finding.status is Status.ORACLE_FAILED for finding in self.findings
        )
        return not failed and not any(skip.unchecked for skip in self.skips)


@dataclass(frozen=True)
class Check:
    """One attack on one exposure, still to be run.

    `attack` is its name if several attacks are tried on the exposure. `weight` is about
    how many seconds the check takes on a small model; the time left is estimated from
    it, and from how long other checks took. `queries` is the largest number of queries
    to a server, if that is large.
    """

    exposure: Exposure
    run: Callable[[Track], Checked]
    attack: str = ""
    weight: float = 0.02
    queries: int = 0

    @property
    def name(self) -> str:
        """What distinguishes it from the other checks of its target, in a journal for example."""
        return ", ".join(filter(None, (self.exposure.id, self.attack)))


class Part(ABC):
    """A part of a target, which makes its own checks.

    `name` is empty if it is the only part. `loaded` is the model, if its weights are
    known. `observed` says whether the target itself gives away what is checked, as a
    server does, or the auditor runs the model to see what it would give.
    """

    name: str
    loaded: Any
    observed: bool = False

    @property
    @abstractmethod
    def identity(self) -> str:
        """A string that two parts share only if they are the same."""

    @property
    def size(self) -> int:
        """The number of entries of its largest matrix, which decides how many threads are used."""
        if self.loaded is None:
            return 0
        return largest_matrix(self.loaded.model)

    @property
    def settings(self) -> dict[str, Any]:
        """What its findings depend on besides its identity."""
        return {}

    @abstractmethod
    def checks(self, options: AuditOptions) -> list[Check]: ...


def run_check(check: Check, track: Track) -> Checked:
    """Run a check; a finding that does not say how long its attack took gets the check's time."""
    started = time.perf_counter()
    with stopping_on_ctrl_c():
        checked = check.run(track)
    checked = replace(checked, seconds=time.perf_counter() - started)
    if not checked.answered:  # what all checks of a failed endpoint say is said once
        return checked
    findings = tuple(
        replace(each, seconds=each.seconds or checked.seconds)
        for each in checked.findings
    )
    return replace(checked, findings=findings)


def one_finding(
    exposure: Exposure,
    attack: str,
    status: Status,
    reason: str,
    remedy: str,
    *,
    queries: int = 1,
    **more: Any,
) -> Checked:
    """Return the single finding of an attack."""
    finding = Finding(exposure, attack, status, reason, remedy, queries=queries, **more)
    return Checked((finding,))


def one_skip(
    exposure: Exposure,
    attack: str,
    reason: str,
    **more: Any,
) -> Checked:
    """Return a single skip: the attack was not tried on the exposure, for this reason."""
    return Checked((), (Skip(exposure, attack, reason, **more),))


def skipped_check(skip: Skip, exposure: Exposure | None = None) -> Check:
    """Return a check that does nothing but report `skip`.

    `exposure` is the check's own, if that of the skip is wider.
    """
    return Check(exposure or skip.exposure, lambda _: Checked((), (skip,)), weight=0.0)


def joined(parts: Iterable[Checked]) -> Checked:
    """Return the findings and skips of several checks, each once."""
    parts = list(parts)
    findings = dict.fromkeys(finding for part in parts for finding in part.findings)
    skips = dict.fromkeys(skip for part in parts for skip in part.skips)
    return Checked(tuple(findings), tuple(skips))
