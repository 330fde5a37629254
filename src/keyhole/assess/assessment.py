"""An audit with its meaning: findings with ids, rules and severities, four cards, one verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from keyhole.assess.item import Item
from keyhole.assess.ruling import Decision
from keyhole.assess.severity import USUAL, Scale, Severity, score
from keyhole.core import Audit, Finding, Outcome
from keyhole.core.exposure import Family, Rule, rule_of, slug


class Level(StrEnum):
    """How much of a family is given away."""

    NOT_TRIED = "not tried"
    NONE = "none"
    UNKNOWN = "could not check"
    PARTLY = "partly"
    ALL = "all"


@dataclass(frozen=True)
class Card:
    """One family at a glance: how bad, through how many exposures, the worst, the cheapest fix."""

    family: Family
    level: Level
    severity: Severity
    exposed: int
    checked: int
    unchecked: int
    worst: Item | None
    fix: str
    fixes: int  # how many of the exposures the fix is for


@dataclass(frozen=True)
class Assessment:
    """What all formats are made from.

    `items` are the findings that count, the worst first; `controls` are attacks without choice,
    run for comparison, and `audit.skips` what was not tried: neither is in the counts. `gone` are
    findings of a baseline that are no longer there (baseline.py), `decision` is what a policy says
    of all this (decision.py).
    """

    audit: Audit
    items: tuple[Item, ...]
    controls: tuple[Item, ...]
    families: tuple[Card, ...]
    verdict: str
    gone: tuple[Item, ...] = ()
    decision: Decision | None = None

    @property
    def severity(self) -> Severity:
        """That of the worst finding; what could not be checked is never none."""
        unchecked = [Severity.UNKNOWN] if self.audit.unchecked or not self.items else []
        return max([*unchecked, *(item.severity for item in self.items)], key=_rank)

    @property
    def exit_code(self) -> int:
        """What a policy decided; without one, what the audit says by itself."""
        return self.audit.exit_code if self.decision is None else self.decision.exit_code

    @property
    def exposed(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.finding.exposed)

    def card(self, family: Family) -> Card:
        return next(card for card in self.families if card.family is family)


def assess(
    audit: Audit,
    scale: Scale = USUAL,
    override: Callable[[str, Rule, Finding], Severity | None] | None = None,
) -> Assessment:
    """Every finding with its id, rule and severity; `override` may set another severity.

    An override holds for what was given away: it cannot make an exposure of what was kept, nor
    a clean bill of what could not be checked.
    """
    named = zip(ids(audit.findings), audit.findings, strict=True)
    items = [_item(name, finding, scale, override) for name, finding in named]
    counted = sorted((item for item in items if not item.finding.control), key=_order)
    controls = tuple(item for item in items if item.finding.control)
    families = tuple(_card(family, counted) for family in Family)
    return Assessment(audit, tuple(counted), controls, families, _verdict(audit, families))


def ids(findings: Sequence[Finding]) -> list[str]:
    """A name for each finding that stays the same from audit to audit: that of its exposure.

    Where these agree the attack is added, and where that agrees too, a number.
    """
    plain = [finding.exposure.id for finding in findings]
    twice = {name for name, count in Counter(plain).items() if count > 1}
    longer = [
        slug(name, finding.attack) if name in twice else name
        for name, finding in zip(plain, findings, strict=True)
    ]
    used: set[str] = set()
    for place, name in enumerate(longer):
        number = 1
        while longer[place] in used:
            number += 1
            longer[place] = f"{name}-{number}"
        used.add(longer[place])
    return longer


def _item(
    name: str,
    finding: Finding,
    scale: Scale,
    override: Callable[[str, Rule, Finding], Severity | None] | None,
) -> Item:
    rule, scored = rule_of(finding.exposure), score(finding, scale)
    chosen = override(name, rule, finding) if override and finding.exposed else None
    severity = scored.severity if chosen is None else chosen
    why = scored.why if chosen is None else f"{scored.why}; set to {chosen} by the policy"
    return Item(name, rule, finding, severity, scored.points, why)


def _rank(severity: Severity) -> int:
    return severity.rank


def _order(item: Item) -> tuple[int, int, float, int, str]:
    return (-item.severity.rank, -item.score, -item.share, item.finding.queries, item.id)


def _card(family: Family, items: Sequence[Item]) -> Card:
    mine = [item for item in items if item.family is family]
    exposed = [item for item in mine if item.finding.exposed]
    unchecked = sum(item.finding.outcome is Outcome.UNCHECKED for item in mine)
    remedies = Counter(item.finding.remedy for item in exposed if item.finding.remedy)
    fix, fixes = remedies.most_common(1)[0] if remedies else ("", 0)
    severity = max((item.severity for item in mine), key=_rank, default=Severity.NONE)
    return Card(
        family, _level(mine, exposed, unchecked), severity, len(exposed), len(mine), unchecked,
        exposed[0] if exposed else None, fix, fixes,
    )  # fmt: skip


def _level(mine: Sequence[Item], exposed: Sequence[Item], unchecked: int) -> Level:
    if not mine:
        return Level.NOT_TRIED
    if exposed:
        whole = any(item.proved and item.share >= USUAL.all_of_it for item in exposed)
        return Level.ALL if whole else Level.PARTLY
    return Level.UNKNOWN if unchecked else Level.NONE


_ALL = {
    Family.WEIGHTS: "the weights can be copied", Family.INPUTS: "inputs can be computed back",
    Family.TEXT: "text can be read back", Family.PREDICTIONS: "predictions can be flipped",
}  # fmt: skip
_PARTLY = {
    Family.WEIGHTS: "the weights can be copied in part",
    Family.INPUTS: "inputs can be computed back in part",
    Family.TEXT: "text can be read back in part",
    Family.PREDICTIONS: "some predictions can be flipped",
}


def _verdict(audit: Audit, families: Sequence[Card]) -> str:
    """One line: what is lost, then what nobody knows."""
    total = len(audit.attacks)
    if total == 0 and not audit.unchecked:
        return "Nothing was checked: no attack applies to this target."
    lost = [
        (_ALL if card.level is Level.ALL else _PARTLY)[card.family]
        for card in families
        if card.exposed
    ]
    unchecked = f"{audit.unchecked} of {total + _skipped(audit)} checks had no result"
    if lost:
        listed = lost[0] if len(lost) == 1 else f"{', '.join(lost[:-1])} and {lost[-1]}"
        tail = f"; {unchecked}" if audit.unchecked else ""
        return f"{listed[0].upper()}{listed[1:]}{tail}."
    if audit.unchecked >= total + _skipped(audit):
        return "Could not check: no attack came to a result that says anything of this target."
    if audit.unchecked:
        return f"Nothing was given away, but {unchecked}: that is not a clean bill."
    return f"Nothing was given away: {total} of {total} attacks tried came back empty."


def _skipped(audit: Audit) -> int:
    return sum(skip.unchecked for skip in audit.skips)
