"""Every attacker on attention under the name that people type, and what the audit tries it with.

To add one, write the attacker in its own module and add one entry to ATTACKERS.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_type_hints

from keyhole.core.exposure import Exposure
from keyhole.core.registry import Entry, Registry
from keyhole.disrupt.disruption import Attacker
from keyhole.disrupt.hack_attend import HackAttend
from keyhole.disrupt.rerank import Rerank


@dataclass(frozen=True)
class Row:
    """One row of the audit: what is cut, and the attacker's hyperparameters there."""

    exposure: Exposure
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _preset(
    make: Callable[..., HackAttend], *hidden: str, **changes: Any
) -> Callable[..., HackAttend]:
    """`make` with keywords that can be listed: the fields of HackAttend and of its schedule.

    Their defaults are what `make(**changes)` sets; `hidden` ones cannot be set.
    """
    usual = make(**changes)
    fields = {**vars(usual), **vars(usual.schedule)}
    options = {name: fields[name] for name in fields if name not in ("schedule", *hidden)}

    def made(**given: Any) -> HackAttend:
        return make(**{**changes, **given})

    hints = get_type_hints(HackAttend) | get_type_hints(type(usual.schedule))
    made.__annotations__ = {name: hints[name] for name in options}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
        for name, value in options.items()
    ]
    cast("Any", made).__signature__ = inspect.Signature(parameters)
    return made


_USUAL = vars(Rerank())  # the schedule at its usual length
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
    Entry("strongest", _preset(HackAttend.strongest), method=HackAttend, note=_STRONGEST),
    Entry("rerank", _preset(HackAttend.strongest, **_USUAL), (
        Row(Exposure(_CUTS, "head"), _BRIEF),
        Row(Exposure(_CUTS, "model"), {**_BRIEF, "scope": "model"}),
    ), HackAttend, _RERANK),
    Entry("as-released", _preset(HackAttend.as_released), (
        Row(Exposure(_CUTS, "head-released")),
    ), HackAttend, _RELEASED),
    Entry("random", _preset(HackAttend.random, "ranking", "order"), (
        Row(Exposure(_CUTS, "head-random")),
    ), HackAttend, _RANDOM),
)  # fmt: skip
