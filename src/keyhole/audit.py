"""`keyhole audit`: every attack that applies to a target, judged, and collected as findings.

Findings in, page out, nothing global. To add an attack, write it in its own module and add one
line to ATTACKS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch

from keyhole.errors import InputError
from keyhole.extract.judge import Method, judge
from keyhole.extract.low_rank import LowRank
from keyhole.extract.single_head import SingleHead
from keyhole.oracle.counted import Counted
from keyhole.oracle.protocol import Oracle, ask, identity_of
from keyhole.results import FORMAT, Extraction, Finding, Skip, Status, environment

Watch = Callable[[str, int, int | None], None]  # attack, queries so far, queries expected


@dataclass(frozen=True)
class Attack:
    """One exposure and the attack that it invites.

    `budget` is the share of the unknowns that the attacker may ask for; None is no limit.
    """

    exposure: str
    remedy: str
    method: Callable[[int], Method]  # by seed
    answers: str = "score"
    budget: float | None = None


_FEWER = "Count queries per client; a budget below the number of unknowns leaves W unknown."
_COARSER = "Return a label instead of the score; bound the norms of input embeddings."

ATTACKS = (
    Attack("full scores", _COARSER, lambda seed: SingleHead(seed=seed)),
    Attack("full scores, low-rank head", _COARSER, lambda seed: LowRank(seed=seed)),
    Attack("scores under a budget", _FEWER, lambda seed: SingleHead(seed=seed), budget=0.5),
)


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


def audit(oracle: Oracle, *, target: str = "", seed: int = 0, watch: Watch | None = None) -> Audit:
    """Run every attack of the registry that applies to `oracle`."""
    started = time.perf_counter()
    kind = answer_kind(oracle)
    findings: list[Finding] = []
    skips: list[Skip] = []
    for attack in ATTACKS:
        method = attack.method(seed)
        name = type(method).__name__
        if attack.answers != kind:
            reason = f"it reads {attack.answers} answers; this target gives {kind} answers"
            skips.append(Skip(attack.exposure, name, reason))
            continue
        findings.append(_run(attack, method, oracle, seed, watch))
    return Audit(
        target=target or identity_of(oracle),
        identity=identity_of(oracle),
        findings=tuple(findings),
        skips=tuple(skips),
        seed=seed,
        seconds=time.perf_counter() - started,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def answer_kind(oracle: Oracle) -> str:
    """score, last-token or every-token: found out with one question of two tokens."""
    answer = ask(oracle, torch.zeros(1, 2, oracle.dim, dtype=torch.float64))
    return {1: "score", 2: "last-token"}.get(answer.ndim, "every-token")


def _run(attack: Attack, method: Method, oracle: Oracle, seed: int, watch: Watch | None) -> Finding:
    name = type(method).__name__
    floor = oracle.dim**2 + oracle.dim
    budget = None if attack.budget is None else int(attack.budget * floor)
    expected = budget if budget is not None else method.expected(oracle.dim)

    def notify(count: int) -> None:
        if watch is not None:
            watch(attack.exposure, count, expected)

    extraction = method(Counted(oracle, budget, notify))
    if budget is not None and extraction.model is not None:
        # The budget binds the attacker, not the auditor: how good is what the attacker has?
        check = judge(oracle, extraction.model, seed)
        trace = ((extraction.queries, check.worst),)
        extraction = replace(extraction, check=check, trace=trace)
    return _finding(attack, name, extraction)


def _finding(attack: Attack, name: str, extraction: Extraction) -> Finding:
    return Finding(
        exposure=attack.exposure,
        attack=name,
        status=extraction.status,
        reason=extraction.reason,
        remedy=attack.remedy,
        error=None if extraction.check is None else extraction.check.worst,
        queries=extraction.queries,
        seconds=extraction.seconds,
        floor=extraction.floor,
        known=extraction.known,
        trace=extraction.trace,
    )
