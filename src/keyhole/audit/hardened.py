"""A training's evaluation as findings, before and after: the audit's page shows both.

The attacks are HackAttend's, with pictures of what the first one cut. Masks that the model did not
help to choose (harden/evaluate.py) stand beside them: a model that had learnt to read masks would
withstand the ones and not the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from keyhole.audit.flips import cuts_of, finding, status_of
from keyhole.data import Example
from keyhole.harden.evaluate import Evaluation, Measured
from keyhole.models.loading import Loaded, head_of
from keyhole.results import Finding, Status

_WRONG = {
    "lowered": "masks that lower a wrong label",
    "raised": "masks that lead to a wrong label",
}


def findings(
    found: Evaluation, surface: str, loaded: Loaded, examples: Sequence[Example]
) -> tuple[Finding, ...]:
    """One for each kind of mask; `surface` names the model, `examples` are what it was tried on."""
    made: list[Finding] = []
    config, task = loaded.model.config, head_of(loaded.model)
    for one in found.found.values():
        cuts = () if made else cuts_of(loaded.tokenizer, config, examples, one, task)
        made.append(finding(surface, one, cuts, one.seconds))
    others = {f"masks found on {name}": one for name, one in found.transferred.items()}
    others |= {_WRONG[name]: one for name, one in found.wrong_label.items()}
    return (*made, *(_counted(words, one, surface) for words, one in others.items()))


def _counted(words: str, one: Measured, surface: str) -> Finding:
    status = status_of(one.flips, one.examples) if one.examples else Status.NOT_APPLICABLE
    return Finding(
        exposure=words,
        attack="masks that it did not help to choose",
        status=status,
        reason=f"{one.flips} of {one.examples} right answers flipped",
        remedy="Where these flip more than the attack does, the model reads labels off masks.",
        error=None,
        queries=round(one.queries * one.examples),
        seconds=one.seconds,
        known=one.success,
        surface=surface,
        sought="prediction",
    )
