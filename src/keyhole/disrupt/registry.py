"""The attackers on attention by name, and the settings with which the audit tries them.

To add an attacker, write it in its own module and add one entry to ATTACKERS.
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
    """One exposure that the audit tries an attacker on, with its hyperparameters."""

    exposure: Exposure
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _preset(
    make: Callable[..., HackAttend], *hidden: str, **changes: Any
) -> Callable[..., HackAttend]:
    """Return `make` with a signature that lists its options for the registry.

    The options are the fields of HackAttend and of its schedule, except the `hidden`
    ones. Their defaults are those of `make(**changes)`.
    """
    usual = make(**changes)
    fields = {**vars(usual), **vars(usual.schedule)}
    options = {
        name: fields[name] for name in fields if name not in ("schedule", *hidden)
    }

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


_BRIEF = {"prefixes": 8, "refine": 4}  # a shorter schedule for the audit
_CUTS = "KH-PREDICTIONS-CUTS"

ATTACKERS: Registry[Attacker, Row] = Registry(
    Entry(
        "strongest",
        _preset(HackAttend.strongest),
        method=HackAttend,
        note="Ours: re-ranks units by the effect of their removal, with swaps and a restart.",
    ),
    Entry(
        "rerank",
        _preset(HackAttend.strongest, **vars(Rerank())),
        (
            Row(Exposure(_CUTS, "head"), _BRIEF),
            Row(Exposure(_CUTS, "model"), {**_BRIEF, "scope": "model"}),
        ),
        HackAttend,
        "Ours, shorter: the same schedule with fewer rankings and no restart.",
    ),
    Entry(
        "as-released",
        _preset(HackAttend.as_released),
        (Row(Exposure(_CUTS, "head-released")),),
        HackAttend,
        "HackAttend as released: ranks units once by the gradient and cuts one head after the "
        "other; only the first token and padding are spared.",
    ),
    Entry(
        "random",
        _preset(HackAttend.random, "ranking", "order"),
        (Row(Exposure(_CUTS, "head-random")),),
        HackAttend,
        "The control: heads and units in a random order.",
    ),
)
