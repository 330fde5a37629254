"""The weights from answers: every kind of answer an endpoint gives, and the attack it invites.

To add one, write the attack in its own module and add one line to ATTACKS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from keyhole.audit.check import Checked, Watch
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
from keyhole.extract.extraction import Extraction
from keyhole.oracle import Clipped, Counted, Oracle, OracleError, Rounded
from keyhole.oracle import SignOnly as Thresholded
from keyhole.results import Finding, Skip, Status


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


def check(surface: str, oracle: Oracle, seed: int, watch: Watch | None) -> Checked:
    """Every attack that reads what this endpoint gives; the others are skipped."""
    try:
        kind = choose(oracle, seed).kind
    except OracleError as error:
        return Checked((_unanswered(surface, str(error)),))
    findings: list[Finding] = []
    skips: list[Skip] = []
    for attack in ATTACKS:
        if attack.reads is kind:
            findings.append(_run(attack, surface, oracle, seed, watch))
        else:
            reason = f"it reads {attack.reads}; this target gives {kind}"
            name = type(attack.method(seed)).__name__
            skips.append(Skip(attack.exposure, name, reason))
    return Checked(tuple(findings), tuple(skips))


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
