"""What a training gave as findings, before and after: the audit's page shows both.

The attacks are HackAttend's, with pictures of what the first one cut. Masks that the model did not
help to choose (harden/evaluate.py) stand next to them: a model that had learnt to read masks would
withstand the ones and not the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from keyhole.audit.flips import cuts_of, exposure_of, finding
from keyhole.core import Audit, Finding, Outcome, Remedied, Status
from keyhole.core.exposure import Exposure
from keyhole.disrupt.disruption import status_of
from keyhole.harden.evaluate import Evaluation, Measured
from keyhole.harden.run import Hardening
from keyhole.models.loading import load_config, load_tokenizer


def audit_of(hardening: Hardening, folder: str | Path) -> Audit:
    """The models before and after as parts of one target; `folder` is where the trained one is."""
    place = Path(folder) / hardening.runs[-1].folder
    tokenizer, config = load_tokenizer(place), load_config(place)
    evaluations = hardening.evaluations()
    rows = {
        name: findings(evaluation, name, tokenizer, config)
        for name, evaluation in evaluations.items()
    }
    if hardening.before is not None:
        first, *after = rows
        trained = [row for name in after for row in rows[name]]
        rows[first] = tuple(_with_remedy(row, trained, hardening.method) for row in rows[first])
    return Audit(
        target=hardening.model,
        identity=hardening.identity,
        findings=tuple(row for group in rows.values() for row in group),
        seed=hardening.seed,
        seconds=sum(evaluation.seconds for evaluation in evaluations.values()),
    )


def findings(evaluation: Evaluation, part: str, tokenizer: Any, config: Any) -> tuple[Finding, ...]:
    """One for each kind of mask; `part` names the model."""
    attacks: list[Finding] = []
    masks = partial(Exposure, "KH-PREDICTIONS-CUTS", part=part)
    others: dict[Exposure, Measured] = {}
    for name, measured in evaluation.attacks.items():
        disruption = evaluation.disruptions.get(name)
        if disruption is None:  # an evaluation from a file has no outcomes
            others[masks("attack", name=name)] = measured
            continue
        cuts = () if attacks else cuts_of(tokenizer, config, disruption)
        attacks.append(
            finding(exposure_of(disruption.method, part), disruption, cuts, disruption.seconds)
        )
    others |= {
        masks("transferred", name=name): measured
        for name, measured in evaluation.transferred.items()
    }
    others |= {masks(name): measured for name, measured in evaluation.wrong_label.items()}
    return (*attacks, *(_counted(exposure, measured) for exposure, measured in others.items()))


def _with_remedy(row: Finding, trained: Sequence[Finding], method: str) -> Finding:
    """A row of the model before, with what the same masks flip after the training."""
    remedy = f"keyhole harden --method {method}"
    return replace(
        row,
        remedied=tuple(
            Remedied(f"{remedy}: {other.part}", other.known, other.reason)
            for other in trained
            if replace(other.exposure, part=row.part) == row.exposure
            and other.outcome is not Outcome.UNCHECKED
        ),
    )


def _counted(exposure: Exposure, measured: Measured) -> Finding:
    none = measured.examples == 0
    return Finding(
        exposure=exposure,
        attack="masks that it did not help to choose",
        status=Status.NOT_APPLICABLE if none else status_of(measured.flips, measured.examples),
        reason=f"{measured.flips} of {measured.examples} right answers flipped",
        remedy="Where these flip more than the attack does, the model reads labels off masks.",
        error=None,
        queries=round(measured.queries * measured.examples),
        seconds=measured.seconds,
        known=measured.success,
        sought="prediction",
    )
