"""Audits one exposure of a target, given by name, with the checks that a whole audit runs on it.

| name | target | what is sought |
|---|---|---|
| `hidden:3`, `kv:0`, `maps:1`, `attention:1`, `pooled`, `logits` | models | text |
| `pooled` | vector stores | text |
| `gradient` | models with a loss | the texts of a batch |
| `flips` | classifiers and models that write text | the prediction |
| `scores` | endpoints, whatever they answer | weights |

The names of leaks are those of `keyhole lab capture --expose`.
"""

from __future__ import annotations

import time

from keyhole.audit import flips, gradients, stores, texts
from keyhole.audit.check import Check, joined, run_check
from keyhole.audit.endpoints import EndpointPart
from keyhole.audit.options import AuditOptions
from keyhole.audit.stores import StoreTarget
from keyhole.audit.target import DECODER, ModelPart, Target
from keyhole.core import Audit
from keyhole.core.errors import (
    InputError,
    expect_among,
    expect_count,
    expect_number,
    expect_seed,
)
from keyhole.core.progress import untracked
from keyhole.models.capture import KINDS, Exposure
from keyhole.recover.gradients.update import KIND as GRADIENT
from keyhole.recover.registry import PRECISIONS

SCORES = "scores"
FLIPS = "flips"
NAMES = (*KINDS, GRADIENT, SCORES, FLIPS)


def audit_exposure(
    target: Target,
    exposure: str,
    *,
    precision: str = "float32",
    share: float | None = None,
    budget: int | None = None,
    seed: int = 0,
) -> Audit:
    """Attack one exposure of an opened target.

    `precision` is how a leak is rounded, `share` how much attention may be cut for a
    flip, `budget` how many queries an attacker of an endpoint may make.
    """
    expect_seed(seed)
    expect_number("share", share, above=0)
    expect_count("budget", budget)
    expect_among("a precision", precision, PRECISIONS)
    if share is not None and exposure != FLIPS:
        raise InputError(f"share is for {FLIPS}, not for {exposure}: leave it out")
    if budget is not None and exposure != SCORES:
        raise InputError(f"budget is for {SCORES}, not for {exposure}: leave it out")
    started = time.perf_counter()
    checks = _checks(target, exposure, precision, share, budget, seed)
    checked = joined(run_check(check, untracked) for check in checks)
    return Audit(
        target=target.name or target.identity,
        identity=target.identity,
        findings=stores.merged(target.store, checked.findings),
        skips=(*target.skips, *checked.skips),
        seed=seed,
        seconds=time.perf_counter() - started,
    )


def _checks(
    target: Target,
    exposure: str,
    precision: str,
    share: float | None,
    budget: int | None,
    seed: int,
) -> list[Check]:
    if exposure.partition(":")[0] not in NAMES:
        raise InputError(
            f"there is no exposure {exposure}: give one such as hidden:3, {', '.join(NAMES[1:])}"
        )
    checks: list[Check] = []
    for part in target.parts:
        if isinstance(part, EndpointPart) and exposure == SCORES:
            checks += part.weight_checks(seed, as_given=True, budget=budget)
        elif isinstance(part, StoreTarget) and exposure == "pooled":
            checks += part.checks(AuditOptions(seed=seed))
        elif not isinstance(part, ModelPart) or part.name == DECODER:
            continue  # of an encoder-decoder model, the encoder is attacked
        elif exposure == FLIPS:
            checks += flips.checks(part.name, part.target, seed, share)
        elif exposure == GRADIENT:
            checks += gradients.checks(part.name, part.target, seed)
        elif exposure != SCORES:
            leak = Exposure.parse(exposure)
            checks += texts.checks_of(part.name, part.target, leak, precision, seed)
    if not checks:
        what = "an endpoint" if exposure == SCORES else "a model"
        raise InputError(
            f"{exposure} needs {what}, and {target.name or 'an endpoint'} is none"
        )
    return checks
