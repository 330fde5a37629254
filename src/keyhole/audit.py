"""`keyhole audit`: every attack that applies to a target, judged, and collected as findings.

Findings in, page out, nothing global. To add an attack, write it in its own module and register it
with the secret that it is after (exposures/).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from keyhole.errors import InputError
from keyhole.exposures import flips, inputs, texts, weights
from keyhole.exposures.family import Watch
from keyhole.exposures.texts import TextTarget
from keyhole.oracle import Oracle, identity_of
from keyhole.results import FORMAT, Finding, Skip, Status, environment

ENDPOINTS = (weights.check, inputs.check)
MODELS = (texts.check, flips.check)


@dataclass(frozen=True)
class Audit:
    """What an audit found; pages and tables are made from this and nothing else."""

    target: str
    identity: str
    findings: tuple[Finding, ...]
    skips: tuple[Skip, ...]
    seed: int
    seconds: float
    created: str
    environment: dict[str, str] = field(default_factory=environment)

    @property
    def exposed(self) -> int:
        return sum(finding.exposed for finding in self.findings)

    @property
    def failed(self) -> bool:
        """Nothing could be checked: that is no clean bill of health."""
        return all(finding.status is Status.ORACLE_FAILED for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": "audit", **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Audit:
        try:
            if data["kind"] != "audit":
                raise InputError(f"expected an audit, got {data['kind']}")
            plain = {name: data[name] for name in ("target", "identity", "seed", "seconds")}
            return cls(
                findings=tuple(Finding.from_dict(one) for one in data["findings"]),
                skips=tuple(Skip(**one) for one in data["skips"]),
                created=data["created"],
                environment=data["environment"],
                **plain,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"expected an audit written by keyhole, got {error!r}") from error


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
