"""`keyhole audit` as a function: every attack that applies to a target, judged, as findings.

Findings in, page out, nothing global. A family of exposures is a function that takes an endpoint or
a model and gives findings and skips; to add an attack, see the registry of its package.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from keyhole.audit import flips as flip_checks
from keyhole.audit import inputs, weights
from keyhole.audit import texts as text_checks
from keyhole.audit.check import Checked
from keyhole.audit.targets import Data, Target, open_target, target_of
from keyhole.audit.texts import TextTarget
from keyhole.bounds import expect_count, expect_seed
from keyhole.devices import expect_device
from keyhole.oracle import Oracle
from keyhole.oracle.session import session
from keyhole.progress import Track, untracked
from keyhole.results import Audit, Finding, Skip

ENDPOINTS = (weights.check, inputs.check)
MODELS = (text_checks.check, flip_checks.check)


def audit(
    target: str | Oracle | Mapping[str, Oracle] | TextTarget | Target,
    *,
    data: str | Path | None = None,
    texts: int = 3,
    flips: int = 12,
    column: str | None = None,
    label: str | None = None,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    ledger: str | Path | None = None,
    seed: int = 0,
    track: Track = untracked,
) -> Audit:
    """Try every attack that applies to a target, and report what it gives away.

    `target` is what the command line takes (`demo`, a file, an address, a model's folder or name),
    or an oracle, several by name, or a model with its texts. `data` is a file of texts for a model:
    the first `texts` of its `column` are read back, and the first `flips` flipped, whose right
    classes are in the column `label`: by default the one of that name, if there is one, or else the
    model's own answers count as right. `layers` overrides which layers are looked at. `ledger`
    remembers what endpoints answered.
    """
    started = time.perf_counter()
    expect_seed(seed)
    expect_count("--texts", texts)
    expect_count("--flips", flips)
    expect_device(device)
    if isinstance(target, str):
        given = None if data is None else Data(data, texts, flips, column, label)
        opened = open_target(target, data=given, layers=layers, device=device)
    else:
        opened = target_of(target)
    with session(opened.surfaces, ledger=ledger) as surfaces:
        checked = [check(seed, track) for check in _checks(surfaces, opened.models)]
    findings: list[Finding] = [finding for part in checked for finding in part.findings]
    skips: list[Skip] = [skip for part in checked for skip in part.skips]
    if len(opened.surfaces) + len(opened.models) > 1:
        # What one part of the target does not give, another does.
        skips = [skip for skip in skips if skip.unchecked]
    return Audit(
        target=opened.name or opened.identity,
        identity=opened.identity,
        findings=tuple(findings),
        skips=(*opened.skips, *skips),
        seed=seed,
        seconds=time.perf_counter() - started,
    )


def _checks(
    surfaces: Mapping[str, Oracle], models: Mapping[str, TextTarget]
) -> list[Callable[[int, Track], Checked]]:
    return [
        *(partial(check, name, oracle) for name, oracle in surfaces.items() for check in ENDPOINTS),
        *(partial(check, name, model) for name, model in models.items() for check in MODELS),
    ]
