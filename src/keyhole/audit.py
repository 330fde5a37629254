"""`keyhole audit`: every attack that applies to a target, judged, and collected as findings.

Findings in, page out, nothing global. To add an attack, write it in its own module and add one
line to ATTACKS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from keyhole.errors import InputError
from keyhole.extract import (
    FullOutput,
    LowRank,
    Method,
    MultiHead,
    OneLayerTransformer,
    SignOnly,
    SingleHead,
    Tolerant,
    judge,
)
from keyhole.extract.auto import Auto, Kind, choose
from keyhole.oracle import Clipped, Counted, Oracle, OracleError, Rounded, identity_of
from keyhole.oracle import SignOnly as Thresholded
from keyhole.results import FORMAT, Extraction, Finding, Skip, Status, environment

Watch = Callable[[str, int, int | None], None]  # exposure, queries so far, queries expected


@dataclass(frozen=True)
class Attack:
    """One exposure and the attack that it invites.

    `reads` is the kind of answers it needs. `view` degrades them as a server might, to find out
    whether that would help; `budget` is the share of the unknowns that the attacker may ask for.
    """

    exposure: str
    reads: Kind
    method: Callable[[int], Method]  # by seed
    remedy: str
    view: Callable[[Oracle], Oracle] | None = None
    budget: float | None = None


_COARSER = "Return a label instead of the score; bound the norms of input embeddings."
_FEWER = "Count queries per client; a budget below the number of unknowns leaves W unknown."
_BOUND = "Bound the norms of inputs as well: long ones undo the rounding."
_FURTHER = "Fewer decimals or a tighter bound on norms: they cost the attacker digits."
_LABEL = "Count queries per client: a label is one bit, and the attack needs them all."
_VECTOR = "Return a score or a label; a vector tells as many numbers as it has."

ATTACKS = (
    Attack("full scores", Kind.HEAD, lambda s: SingleHead(seed=s), _COARSER),
    Attack("full scores, low-rank head", Kind.HEAD, lambda s: LowRank(seed=s), _COARSER),
    Attack("scores under a budget", Kind.HEAD, lambda s: SingleHead(seed=s), _FEWER, budget=0.5),
    Attack("scores rounded to 3 decimals", Kind.HEAD, lambda s: Tolerant(5e-4, seed=s), _BOUND,
           view=lambda o: Rounded(o, 3)),
    Attack("the same, inputs of norm 10 at most", Kind.HEAD,
           lambda s: Tolerant(5e-4, max_norm=10.0, seed=s), _FURTHER,
           view=lambda o: Rounded(Clipped(o, 10.0), 3)),
    Attack("signs", Kind.HEAD, lambda s: SignOnly(accuracy=1e-4, seed=s), _LABEL, view=Thresholded),
    Attack("scores of several heads", Kind.HEADS, lambda s: MultiHead(seed=s), _COARSER),
    Attack("scores of a small Transformer", Kind.LAYER,
           lambda s: OneLayerTransformer(seed=s), _COARSER),
    Attack("rounded scores", Kind.ROUNDED, lambda s: Auto(seed=s), _BOUND),
    Attack("labels", Kind.SIGNS, lambda s: SignOnly(accuracy=1e-4, seed=s), _LABEL),
    Attack("the last token's vector", Kind.LAST_VECTOR, lambda s: FullOutput(seed=s), _VECTOR),
    Attack("every token's vector", Kind.EVERY_VECTOR, lambda s: FullOutput(seed=s), _VECTOR),
)  # fmt: skip


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
    surfaces: Oracle | Mapping[str, Oracle],
    *,
    target: str = "",
    seed: int = 0,
    watch: Watch | None = None,
) -> Audit:
    """Run every attack of the registry that applies.

    A target may have several surfaces (endpoints), given by name; one alone needs no name.
    """
    started = time.perf_counter()
    named = surfaces if isinstance(surfaces, Mapping) else {"": surfaces}
    findings: list[Finding] = []
    skips: list[Skip] = []
    for surface, oracle in named.items():
        try:
            kind = choose(oracle, seed).kind
        except OracleError as error:
            findings.append(_unanswered(surface, str(error)))
            continue
        for attack in ATTACKS:
            if attack.reads is kind:
                findings.append(_run(attack, surface, oracle, seed, watch))
            elif len(named) == 1:  # on one surface of several, the others' attacks are not missed
                reason = f"it reads {attack.reads}; this target gives {kind}"
                name = type(attack.method(seed)).__name__
                skips.append(Skip(attack.exposure, name, reason))
    identity = "; ".join(identity_of(oracle) for oracle in named.values())
    return Audit(
        target=target or identity,
        identity=identity,
        findings=tuple(findings),
        skips=tuple(skips),
        seed=seed,
        seconds=time.perf_counter() - started,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _unanswered(surface: str, reason: str) -> Finding:
    """Could not check: that is a finding too."""
    return Finding(
        exposure="any answer",
        attack="Auto",
        status=Status.ORACLE_FAILED,
        reason=reason,
        remedy=Status.ORACLE_FAILED.advice,
        error=None,
        queries=0,
        seconds=0.0,
        surface=surface,
    )


def _run(attack: Attack, surface: str, oracle: Oracle, seed: int, watch: Watch | None) -> Finding:
    method = attack.method(seed)
    seen = oracle if attack.view is None else attack.view(oracle)
    floor = oracle.dim**2 + oracle.dim
    budget = None if attack.budget is None else int(attack.budget * floor)
    expected = budget if budget is not None else method.expected(oracle.dim)

    def notify(count: int) -> None:
        if watch is not None:
            watch(attack.exposure, count, expected)

    extraction = method(Counted(seen, budget, notify))
    if budget is not None and extraction.model is not None:
        # The budget binds the attacker, not the auditor: how good is what the attacker has?
        check = judge(oracle, extraction.model, seed)
        trace = ((extraction.queries, check.worst),)
        extraction = replace(extraction, check=check, trace=trace)
    return _finding(attack, surface, type(method).__name__, extraction)


def _finding(attack: Attack, surface: str, name: str, extraction: Extraction) -> Finding:
    return Finding(
        surface=surface,
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
