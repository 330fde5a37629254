"""Every attacker on attention under the name that people type, and what the audit tries it with.

To add one, write the attacker in its own module and add one line to ATTACKERS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keyhole.core.registry import Entry, Registry
from keyhole.disrupt.disruption import Attacker
from keyhole.disrupt.hack_attend import HackAttend, Scope, Spare
from keyhole.disrupt.rerank import Rerank


@dataclass(frozen=True)
class Line:
    """One row of the audit: what is cut, and the attacker's hyperparameters there."""

    cut: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return self.cut


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
_RANDOM = "The control: heads and units in a random order."

ATTACKERS: Registry[Attacker, Line] = Registry(
    "method",
    Entry("strongest", HackAttend.strongest, method=HackAttend, note=_STRONGEST),
    Entry("rerank", rerank, (
        Line("a share of each head's attention", _BRIEF),
        Line("a share of all attention", {**_BRIEF, "scope": "model"}),
    ), HackAttend, _RERANK),
    Entry("as-released", HackAttend.as_released, (
        Line("a share of each head's attention"),
    ), HackAttend, _RELEASED),
    Entry("random", HackAttend.random, (
        Line("a share of each head's attention, as a control"),
    ), HackAttend, _RANDOM),
)  # fmt: skip
