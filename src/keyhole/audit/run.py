"""`keyhole audit`: every attack that applies to a target, judged, and collected as findings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial

from keyhole.audit import flips, inputs, texts, weights
from keyhole.audit.check import Watch
from keyhole.audit.texts import TextTarget
from keyhole.oracle import Oracle, identity_of
from keyhole.results import Audit, Finding, Skip

ENDPOINTS = (weights.check, inputs.check)
MODELS = (texts.check, flips.check)


def audit(
    surfaces: Oracle | Mapping[str, Oracle] | None = None,
    *,
    models: TextTarget | Mapping[str, TextTarget] | None = None,
    target: str = "",
    seed: int = 0,
    watch: Watch | None = None,
) -> Audit:
    """Run every attack of the registry that applies.

    A target may have several surfaces (endpoints) and several models, each given by name; one alone
    needs no name.
    """
    started = time.perf_counter()
    oracles = surfaces if isinstance(surfaces, Mapping) else {"": surfaces} if surfaces else {}
    subjects = models if isinstance(models, Mapping) else {"": models} if models else {}
    checks = [
        *(partial(check, name, oracle) for name, oracle in oracles.items() for check in ENDPOINTS),
        *(partial(check, name, model) for name, model in subjects.items() for check in MODELS),
    ]
    findings: list[Finding] = []
    skips: list[Skip] = []
    for check in checks:
        checked = check(seed, watch)
        findings.extend(checked.findings)
        if len(oracles) + len(subjects) == 1:  # of several, the others' attacks are not missed
            skips.extend(checked.skips)
    named = [identity_of(oracle) for oracle in oracles.values()]
    named += [f"{one.loaded.name} {one.loaded.identity}" for one in subjects.values()]
    identity = "; ".join(named)
    return Audit(
        target=target or identity,
        identity=identity,
        findings=tuple(findings),
        skips=tuple(skips),
        seed=seed,
        seconds=time.perf_counter() - started,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
