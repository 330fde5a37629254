"""Every attacker on attention under the name that people type, and what the audit tries it with.

To add one, write the attacker in its own module and add one entry to ATTACKERS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keyhole.core.exposure import Exposure
from keyhole.core.registry import Entry, Registry
from keyhole.disrupt.disruption import Attacker
from keyhole.disrupt.hack_attend import HackAttend, Scope, Spare
from keyhole.disrupt.rerank import Rerank


@dataclass(frozen=True)
class Row:
    """One row of the audit: what is cut, and the attacker's hyperparameters there."""

    exposure: Exposure
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def rerank(
    share: float = 0.01, scope: Scope = "head", *, ranking: str = "removal", rounds: int = 8,
    prefixes: int = 16, refine: int = 8, restarts: int = 0, target: int | None = None,
    continuation: int = 1, spare: Spare = "special", seed: int = 0,
) -> HackAttend:  # fmt: skip
    """The stronger schedule at its usual length: fewer queries than the strongest."""
    return HackAttend(
        share, ranking, Rerank(rounds, prefixes, refine, restarts), scope, target=target,
        continuation=continuation, spare=spare, seed=seed,
    )  # fmt: skip


_BRIEF: dict[str, Any] = {"prefixes": 8, "refine": 4}  # an audit looks at many things

_STRONGEST = "Ours: ranked by the effect of removal, re-ranked often, with swaps and a restart."
_RERANK = "Ours, shorter: the same schedule with fewer rankings and no restart."
_RELEASED = (
    "HackAttend as released: ranked once by the gradient, heads added one by one; all may be cut "
    "but the first token and padding."
)
_CUTS = "KH-PREDICTIONS-CUTS"
_RANDOM = "The control: heads and units in a random order."

ATTACKERS: Registry[Attacker, Row] = Registry(
    "method",
    Entry("strongest", HackAttend.strongest, method=HackAttend, note=_STRONGEST),
    Entry("rerank", rerank, (
        Row(Exposure(_CUTS, "head"), _BRIEF),
        Row(Exposure(_CUTS, "model"), {**_BRIEF, "scope": "model"}),
    ), HackAttend, _RERANK),
    Entry("as-released", HackAttend.as_released, (
        Row(Exposure(_CUTS, "head-released")),
    ), HackAttend, _RELEASED),
    Entry("random", HackAttend.random, (
        Row(Exposure(_CUTS, "head-random")),
    ), HackAttend, _RANDOM),
)  # fmt: skip
