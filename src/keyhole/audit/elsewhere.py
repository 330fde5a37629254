"""What a worker does for an audit: open the target itself, say what is to be checked, and check.

A worker keeps what it opened last, and nothing else: memory is not for two models. It is sent
names and options, and sends back findings; neither weights nor texts of a model travel.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from keyhole.audit.check import Check, Checked
from keyhole.audit.journal import what_determines
from keyhole.audit.opening import Opening
from keyhole.audit.plan import Plan, checks_of, numbered
from keyhole.core.errors import InputError
from keyhole.core.journal import stopping_on_ctrl_c
from keyhole.core.progress import Track, untracked
from keyhole.models.loading import kept_open
from keyhole.oracle.connection import without_password
from keyhole.oracle.ledger import session


@dataclass(frozen=True)
class _Open:
    """A target that is open, with its checks."""

    plan: Plan
    checks: dict[str, Check]


def plan_of(opening: Opening, worker: int = 0) -> Plan:
    """What is to be checked of a target, which is opened for it."""
    with kept_open((opening, worker), partial(_open, opening, worker)) as target:
        return target.plan


def make(
    opening: Opening, identity: str, key: str, worker: int = 0, track: Track = untracked
) -> Checked:
    """One check of a target, which is opened unless it is open; `identity` is what it must be."""
    with kept_open((opening, worker), partial(_open, opening, worker)) as target:
        if target.plan.identity != identity:
            raise InputError(
                f"expected the target {identity} at {without_password(opening.target)} on every "
                f"worker, got {target.plan.identity}"
            )
        with stopping_on_ctrl_c():
            checked = target.checks[key].run(track)
        return _as_given(opening, checked)


def _open(opening: Opening, worker: int, resources: ExitStack) -> _Open:
    started = time.perf_counter()
    target = opening.open(worker)
    surfaces = resources.enter_context(session(target.surfaces, ledger=opening.ledger))
    checks = checks_of(surfaces, target, opening.seed, opening.against_defences, opening.only)
    determined = what_determines(target, opening.seed, opening.only)
    seconds = time.perf_counter() - started
    plan = Plan.of(target, determined, checks, opening.seed, seconds, opening.only)
    shown = opening.shown
    plan = replace(
        plan,
        name=shown(plan.name),
        identity=shown(plan.identity),
        checks={
            shown(key): replace(exposure, part=shown(exposure.part))
            for key, exposure in plan.checks.items()
        },
        stores={shown(name): facts for name, facts in plan.stores.items()},
    )
    made = zip(plan.checks, numbered(checks).values(), strict=True)
    return _Open(plan, dict(made))


def _as_given(opening: Opening, checked: Checked) -> Checked:
    """The findings with the name of the target that people gave, wherever this process found it."""
    shown = opening.shown
    return Checked(
        tuple(
            replace(
                finding, reason=shown(finding.reason),
                exposure=replace(finding.exposure, part=shown(finding.part)),
            )
            for finding in checked.findings
        ),
        tuple(replace(skip, reason=shown(skip.reason)) for skip in checked.skips),
    )  # fmt: skip
