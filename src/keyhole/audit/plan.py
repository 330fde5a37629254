"""What is to be checked of a target, and what is needed to put the findings together.

`checks_of` needs the target open. A `Plan` does not: it is made where the target is opened, by a
worker maybe, and whoever has it can name every check and make the audit of what they gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from keyhole.audit import answers as answer_checks
from keyhole.audit import defences as defence_checks
from keyhole.audit import flips as flip_checks
from keyhole.audit import gradients as gradient_checks
from keyhole.audit import inputs, weights
from keyhole.audit import leaks as leak_checks
from keyhole.audit import servers as server_checks
from keyhole.audit import stores as store_checks
from keyhole.audit import texts as text_checks
from keyhole.audit.check import Check, Checked, nothing_to_try
from keyhole.audit.stores import StoreFacts
from keyhole.audit.targets import Target
from keyhole.audit.texts import left_out as layers_left_out
from keyhole.core import Audit, Skip
from keyhole.core.exposure import NOT_CHECKED, Exposure, is_chosen
from keyhole.core.journal import Run, digest
from keyhole.core.result import restored
from keyhole.oracle import Oracle

ENDPOINTS = (weights.checks, inputs.checks)
MODELS = (text_checks.checks, gradient_checks.checks, flip_checks.checks)
STORES = (store_checks.checks,)
LEAKS = (leak_checks.checks,)
SERVERS = (server_checks.checks,)
ANSWERS = (answer_checks.checks,)


@dataclass(frozen=True)
class Plan:
    """The exposure of each check, by its key, and what the audit says besides their findings.

    `several`: the target has several parts, and what one does not give another does. `seconds` is
    what opening took.
    """

    name: str
    identity: str
    determined: dict[str, Any]
    checks: dict[str, Exposure]
    skips: tuple[Skip, ...] = ()
    several: bool = False
    stores: dict[str, StoreFacts] = field(default_factory=dict[str, StoreFacts])
    seed: int = 0
    seconds: float = 0.0
    only: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, opened: Target, determined: Run, checks: list[Check], seed: int, seconds: float,
        only: Sequence[str] = (),
    ) -> Plan:  # fmt: skip
        return cls(
            name=opened.name or opened.identity,
            identity=opened.identity,
            determined=dict(determined),
            checks={key: check.exposure for key, check in numbered(checks).items()},
            skips=(
                *opened.skips,
                *(
                    skip
                    for name, model in opened.models.items()
                    for skip in layers_left_out(name, model.loaded.model, model.layers)
                ),
            ),
            several=len(opened.surfaces) + len(opened.models) > 1,
            stores={name: store.facts for name, store in opened.stores.items()},
            seed=seed,
            seconds=seconds,
            only=tuple(only),
        )

    @property
    def digest(self) -> str:
        """Two plans share it only if their checks give the same."""
        return digest(self.determined, list(self.checks))

    def audit(self, checked: Checked, seconds: float) -> Audit:
        """What all checks gave, as an audit."""
        skips = checked.skips
        if self.several:
            skips = tuple(skip for skip in skips if skip.unchecked or skip == left_out(self.only))
        return Audit(
            target=self.name,
            identity=self.identity,
            findings=store_checks.whole(self.stores, checked.findings),
            skips=(*self.skips, *skips),
            seed=self.seed,
            seconds=self.seconds + seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        return restored(cls, data)


def numbered(checks: list[Check]) -> dict[str, Check]:
    """Every check under a key of its own, in the order of the findings."""
    return {f"{number}. {check.name}": check for number, check in enumerate(checks, 1)}


def checks_of(
    surfaces: Mapping[str, Oracle], opened: Target, seed: int, against_defences: bool,
    only: Sequence[str] = (),
) -> list[Check]:  # fmt: skip
    """In the order of the findings, each under a name that says of which part it is.

    `only` names the families and rules to check; what is left out keeps its number.
    """
    parts = [
        *(family(name, oracle, seed) for name, oracle in surfaces.items()
          for family in ENDPOINTS),
        *(family(name, model, seed) for name, model in opened.models.items()
          for family in MODELS),
        *(family(name, store) for name, store in opened.stores.items()
          for family in STORES),
        *(family(name, leaks) for name, leaks in opened.leaks.items()
          for family in LEAKS),
        *(family(name, server) for name, server in opened.servers.items()
          for family in SERVERS),
        *(family(name, answers) for name, answers in opened.answers.items()
          for family in ANSWERS),
    ]  # fmt: skip
    if against_defences:  # last, so that a journal's numbers stay what they were without them
        parts += [
            *(defence_checks.endpoint_checks(name, oracle, seed)
              for name, oracle in surfaces.items()),
            *(defence_checks.model_checks(name, model, seed)
              for name, model in opened.models.items()),
        ]  # fmt: skip
    return [
        check if is_chosen(check.exposure, only) else nothing_to_try(left_out(only), check.exposure)
        for checks in parts
        for check in checks
    ]


def left_out(only: Sequence[str]) -> Skip:
    """What an audit of some exposures says of the others."""
    exposure = Exposure(NOT_CHECKED, "others", name=", ".join(only))
    return Skip(exposure, "none", "left out, as --only or the policy says")
