"""The meaning of an audit: findings with ids, rules and severities, a card per family, a verdict.

Also here: what a policy decided about an audit, how an audit compares with a baseline,
which remedies were measured, and the meaning of the audits of a fleet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from functools import cached_property

from keyhole.assess.severity import ALL, Severity, exact, is_proved, score, share
from keyhole.core import Audit, Finding, Fleet, Outcome, Readings, Skip
from keyhole.core.exposure import Family, Rule, rule_of, slug
from keyhole.core.status import joint_exit_code
from keyhole.core.text import number, percent


class State(StrEnum):
    """How a finding compares with the baseline."""

    NEW = "new"
    WORSE = "worse"
    SAME = "same"
    BETTER = "better"
    GONE = "gone"
    UNTRIED = "not tried"  # this time: as far as anybody knows, it is as before


@dataclass(frozen=True)
class Ignore:
    """Findings that a team accepts, with the reason, until a date.

    `finding` is the id of a finding or of a rule, with * as a wildcard.
    """

    finding: str
    reason: str
    until: date


@dataclass(frozen=True)
class Item:
    """A finding with its id, its rule and its severity: a row of every format.

    `id` follows from what the finding is about, so the next audit of the same target
    gives it the same id. `score` is 0 to 10, and `why` explains it. `state` is set if
    there is a baseline, `before` if that has the finding, and `ignored` if a policy
    ignores it.
    """

    id: str
    rule: Rule
    finding: Finding
    severity: Severity
    score: int
    why: str
    state: State | None = None
    before: Item | None = None
    ignored: Ignore | None = None

    @property
    def family(self) -> Family:
        return self.rule.family

    @property
    def share(self) -> float:
        return share(self.finding)

    @property
    def exact(self) -> float | None:
        return exact(self.finding)

    @property
    def proved(self) -> bool:
        return is_proved(self.finding)


class Level(StrEnum):
    """How much of a family is given away."""

    NOT_TRIED = "not tried"
    NONE = "none"
    UNKNOWN = "could not check"
    OPEN = "open"  # a way to the secret is open, but none of the secret was read
    PARTLY = "partly"
    ALL = "all"


@dataclass(frozen=True)
class Card:
    """A summary of one family.

    `checked` counts its findings, `exposed` those that gave something away, and
    `unchecked` those without a result. `fix` is the most common remedy, and `fixes` how
    many findings have it.
    """

    family: Family
    level: Level
    severity: Severity
    exposed: int
    checked: int
    unchecked: int
    worst: Item | None
    fix: str
    fixes: int


# Exit codes of every command that judges. Code 2, for wrong input, never gets as far as
# a decision. Failing findings come before missing results: a target that is known to be
# open need not wait.

PASSED = 0
FAILED = 1
UNCHECKED = 3


class Ruling(StrEnum):
    """The decision of a policy about one finding."""

    FAILS = "fails"
    IGNORED = "ignored"
    KNOWN = "known"  # in the baseline, which it would fail, too, and no worse
    UNCHECKED = "could not check"
    ALLOWED = "allowed"  # could not be checked, which the policy allows
    PASSES = "passes"


@dataclass(frozen=True)
class Ruled:
    """A finding, or a check that could not be made, with the ruling and the policy's rule."""

    finding: str
    ruling: Ruling
    rule: str


@dataclass(frozen=True)
class Decision:
    """The decision of a policy about an audit: `rule` says what decided, `policy` which one."""

    exit_code: int
    rule: str
    policy: str
    rulings: tuple[Ruled, ...]


@dataclass(frozen=True)
class Assessment:
    """An audit with its meaning, from which all formats are made.

    - `items`: the findings that count, the worst first.
    - `controls`: attacks that choose at random, for comparison. They are not counted.
    - `gone`, `untried`: findings of the baseline that are gone, or were not checked this time.
    - `other`: the target of the baseline, if that is another target.
    - `hypothetical`: findings about what it does not return. They are shown apart and do not count.
    - `decision`: the decision of a policy.
    """

    audit: Audit
    items: tuple[Item, ...]
    controls: tuple[Item, ...]
    gone: tuple[Item, ...] = ()
    untried: tuple[Item, ...] = ()
    other: str = ""
    hypothetical: tuple[Item, ...] = ()
    decision: Decision | None = None

    @cached_property
    def families(self) -> tuple[Card, ...]:
        """A card for each family, whether it was tried or not."""
        return tuple(_card(family, self.items) for family in Family)

    @cached_property
    def verdict(self) -> str:
        """A sentence about what is lost, and then about what nobody knows."""
        total = len(self.items)
        unchecked = self.audit.unchecked
        checks = total + len(self.audit.unchecked_skips)
        if checks == 0 and self.hypothetical:
            returned = ", ".join(self.audit.returns)
            return (
                f"Nothing was checked: no attack reads what is returned ({returned})."
            )
        if checks == 0:
            return "Nothing was checked: no attack applies to this target."
        without = f"{unchecked} of {checks} checks had no result"
        lost = [
            _LOSSES[card.level][card.family] for card in self.families if card.exposed
        ]
        if lost:
            listed = " and ".join(filter(None, [", ".join(lost[:-1]), lost[-1]]))
            if unchecked:
                listed = f"{listed}; {without}"
            return f"{listed[0].upper()}{listed[1:]}."
        if unchecked >= checks and total == 1:
            return "Could not check: the attack had no result."
        if unchecked >= checks:
            return "Could not check: no attack had a result."
        if unchecked:
            return f"Nothing was given away, but {without}: that is not a clean bill."
        if total == 1:
            return "Nothing was given away: the attack that was tried failed."
        return f"Nothing was given away: all {total} attacks failed."

    @property
    def severity(self) -> Severity:
        """The severity of the worst finding; at least `unknown` if anything was not checked."""
        severities = [item.severity for item in self.items]
        if self.audit.unchecked or not severities:
            severities.append(Severity.UNKNOWN)
        return _worst(severities)

    @property
    def exit_code(self) -> int:
        """The exit code that a policy decided; without a policy, that of the findings."""
        if self.decision is None:
            return self.audit.exit_code
        return self.decision.exit_code

    @property
    def exposed(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.finding.exposed)

    @property
    def ways(self) -> int:
        """The number of ways that are open to attack, but were not attacked."""
        return sum(item.finding.open for item in self.items)

    def ruled(self, name: str) -> Ruled | None:
        """Return what a policy, if there is one, decided about a finding or a skip of this id."""
        if self.decision is None:
            return None
        rulings = self.decision.rulings
        return next((ruled for ruled in rulings if ruled.finding == name), None)

    def excused(self, name: str) -> str:
        """Return why a policy ignores a finding or skip, or allows it to be unchecked, if so."""
        ruled = self.ruled(name)
        if ruled is None or ruled.ruling not in (Ruling.IGNORED, Ruling.ALLOWED):
            return ""
        return ruled.rule


# By the id of a finding, and its rule.
Override = Callable[[str, Rule], Severity | None]


def assess(
    audit: Audit,
    override: Override | None = None,
    returns: Sequence[str] = (),
) -> Assessment:
    """Give every finding its id, rule and severity, and sum them up.

    `override` may set another severity for a finding, but only for one that gave
    something away. `returns` is what the service returns, if not what the audit says.
    """
    audit = replace(audit, returns=tuple(returns) or audit.returns)
    named = zip(ids(audit.findings, audit.skips), audit.findings, strict=True)
    items = sorted(
        (_item(name, finding, override) for name, finding in named), key=_order
    )
    counted: list[Item] = []
    controls: list[Item] = []
    hypothetical: list[Item] = []
    for item in items:
        if item.finding.control:
            controls.append(item)
        elif audit.counts(item.finding):
            counted.append(item)
        else:
            hypothetical.append(item)
    return Assessment(
        audit, tuple(counted), tuple(controls), hypothetical=tuple(hypothetical)
    )


def assessed(audit: Audit | Assessment) -> Assessment:
    """Return the assessment of an audit, or one to which a policy or a baseline was applied."""
    if isinstance(audit, Assessment):
        return audit
    return assess(audit)


def ids(findings: Sequence[Finding], skips: Sequence[Skip] = ()) -> list[str]:
    """Return an id for each finding that is the same in every audit: the id of its exposure.

    If several attacks were tried on one exposure, even if one of them came to nothing
    and is among the skips, the attack is added, and if that is the same, a number.
    """
    plain = [finding.exposure.id for finding in findings]
    failed = [skip for skip in skips if skip.unchecked and skip.attack != "none"]
    count = Counter([*plain, *(skip.exposure.id for skip in failed)])
    made: dict[str, None] = {}  # a set that keeps the order
    for name, finding in zip(plain, findings, strict=True):
        if count[name] > 1:
            name = slug(name, finding.attack)
        unique = name
        number = 1
        while unique in made:
            number += 1
            unique = f"{name}-{number}"
        made[unique] = None
    return list(made)


def _item(
    name: str,
    finding: Finding,
    override: Override | None,
) -> Item:
    rule = rule_of(finding.exposure)
    scored = score(finding)
    item = Item(name, rule, finding, scored.severity, scored.points, scored.why)
    if override and finding.exposed:
        chosen = override(name, rule)
        if chosen:
            why = f"{scored.why}; set to {chosen} by the policy"
            return replace(item, severity=chosen, why=why)
    return item


def _worst(severities: Sequence[Severity]) -> Severity:
    return max(severities, key=lambda severity: severity.rank, default=Severity.NONE)


def _order(item: Item) -> tuple[int, int, float, int, str]:
    return (
        -item.severity.rank,
        -item.score,
        -item.share,
        item.finding.queries,
        item.id,
    )


def _card(family: Family, items: Sequence[Item]) -> Card:
    mine = [item for item in items if item.family is family]
    exposed = [item for item in mine if item.finding.exposed]
    unchecked = sum(item.finding.outcome is Outcome.UNCHECKED for item in mine)
    remedies = Counter(item.finding.remedy for item in exposed if item.finding.remedy)
    ((fix, fixes),) = remedies.most_common(1) or [("", 0)]
    return Card(
        family,
        _level(mine, exposed, unchecked),
        _worst([item.severity for item in mine]),
        exposed=len(exposed),
        checked=len(mine),
        unchecked=unchecked,
        worst=next(iter(exposed), None),
        fix=fix,
        fixes=fixes,
    )


def _level(
    mine: Sequence[Item],
    exposed: Sequence[Item],
    unchecked: int,
) -> Level:
    if not mine:
        return Level.NOT_TRIED
    if any(item.proved and item.share >= ALL for item in exposed):
        return Level.ALL
    if any(item.exact is not None for item in exposed):
        return Level.PARTLY
    if exposed:
        return Level.OPEN
    if unchecked:
        return Level.UNKNOWN
    return Level.NONE


_LOSSES = {
    Level.ALL: {
        Family.WEIGHTS: "the weights can be copied",
        Family.INPUTS: "inputs can be computed back",
        Family.TEXT: "text can be read back",
        Family.PREDICTIONS: "predictions can be flipped",
    },
    Level.PARTLY: {
        Family.WEIGHTS: "the weights can be copied in part",
        Family.INPUTS: "inputs can be computed back in part",
        Family.TEXT: "text can be read back in part",
        Family.PREDICTIONS: "some predictions can be flipped",
    },
    Level.OPEN: {family: f"a way to the {family} is open" for family in Family},
}


# The measured effects of remedies. An audit measures them in three ways: texts are also
# read from rounded, noisy or scaled leaks; a model trained against the attack is
# attacked (`Finding.remedied`); and other findings of the same part of the target
# expose less, such as labels in place of scores, or the same behind a defence.


@dataclass(frozen=True)
class Measure:
    """A remedy, and the share that was still given away with it.

    `change` names the remedy, and `words` say what was left. If that is a finding of
    its own, it is `item`, and its exposure says both.
    """

    change: str
    share: float
    words: str = ""
    item: Item | None = None


_PRECISIONS = {  # the remedies of `Readings.precision`, in words
    "bfloat16": "rounded to bfloat16",
    "int8": "rounded to int8",
    "noise of 10%": "noise of 10% added",
    "normalised": "scaled to length 1",
}
_LESS = {  # by rule, the rules whose exposures give less
    "KH-WEIGHTS-SCORES": ("KH-WEIGHTS-ROUNDED-SCORES", "KH-WEIGHTS-SIGNS"),
    "KH-WEIGHTS-ROUNDED-SCORES": ("KH-WEIGHTS-SIGNS",),
}


def measured(item: Item, items: Sequence[Item]) -> list[Measure]:
    """Return the measured remedies of a finding, the one that helped most first."""
    finding = item.finding
    rounded = [_rounded(cell) for cell in finding.texts[1:]]
    trained = [Measure(each.remedy, each.left, each.words) for each in finding.remedied]
    others = [
        Measure("", other.share * other.finding.exposed, "", other)
        for other in items
        if _exposes_less(other, item)
    ]
    return sorted([*rounded, *trained, *others], key=lambda measure: measure.share)


def _rounded(cell: Readings) -> Measure:
    count = len(cell.readings)
    words = (
        f"{percent(cell.known)} of tokens right, {cell.exact} of {count} texts exact"
    )
    return Measure(_PRECISIONS.get(cell.precision, cell.precision), cell.known, words)


def _exposes_less(other: Item, item: Item) -> bool:
    """Return whether `other` exposes less of the same secret of the same part of the target."""
    more = item.finding.exposure
    less = other.finding.exposure
    if other is item or other.family is not item.family or less.part != more.part:
        return False
    # The variant `budget` is the same attack with too few queries.
    weaker = more.rule in _LESS and (
        less.rule in _LESS[more.rule] or less.variant == "budget"
    )
    return weaker or less.narrows(more)


# The audits of many targets.

_COUNTED = {
    FAILED: ("gives something away", "give something away"),
    UNCHECKED: ("could not be checked", "could not be checked"),
    PASSED: ("gives nothing away", "give nothing away"),
}


@dataclass(frozen=True)
class FleetAssessment:
    """The audits of a fleet with their meaning, by the names of the targets."""

    fleet: Fleet
    targets: Mapping[str, Assessment]

    @property
    def verdict(self) -> str:
        """One sentence about what is given away, whatever a policy says."""
        counts = Counter(each.audit.exit_code for each in self.targets.values())
        parts = [
            number(counts[code], *words)
            for code, words in _COUNTED.items()
            if counts[code]
        ]
        total = number(len(self.targets), "target", "targets")
        return f"Of {total} {', '.join(parts)}."

    @property
    def exit_code(self) -> int:
        """FAILED if any target fails, else UNCHECKED if anything was not checked, else PASSED."""
        return joint_exit_code(
            assessment.exit_code for assessment in self.targets.values()
        )


def assess_fleet(
    fleet: Fleet,
    judge: Callable[[str, Audit], Assessment] = lambda _, audit: assess(audit),
) -> FleetAssessment:
    """Assess every audit; `judge` takes the target's name, and may apply a policy."""
    made = {name: judge(name, audit) for name, audit in fleet.audits.items()}
    return FleetAssessment(fleet, made)


# Comparison with an earlier audit of the same target, the baseline. Findings are
# compared by id.
#
# A finding is gone if the attack fails this time, or if the target has no such thing
# any more. If it was not checked this time, it is as before. A check without a result
# is no improvement.

SLACK = 0.02  # two runs of one search differ by this share of what was recovered


def compared(new: Assessment, old: Assessment) -> Assessment:
    """Return the new assessment, with how each finding compares with the old one."""
    if not new.audit.is_of(old.audit):
        fresh = tuple(replace(item, state=State.NEW) for item in new.items)
        return replace(new, items=fresh, other=old.audit.name or old.audit.target)
    before = {item.id: item for item in old.items}
    items: list[Item] = []
    for item in new.items:
        earlier = before.pop(item.id, None)
        items.append(replace(item, state=state(item, earlier), before=earlier))
    # What the target has no more.
    absent = {skip.exposure.id for skip in new.audit.skips if skip.absent}
    gone: list[Item] = []
    untried: list[Item] = []
    for item in before.values():
        if not item.finding.exposed:
            continue
        if item.id in absent:
            gone.append(replace(item, state=State.GONE))
        else:
            untried.append(replace(item, state=State.UNTRIED))
    return replace(new, items=tuple(items), gone=tuple(gone), untried=tuple(untried))


def state(item: Item, old: Item | None) -> State:
    """Return how a finding compares with that of the baseline, if there is one."""
    if old is None:
        return State.NEW
    if item.finding.outcome is Outcome.UNCHECKED:
        return State.SAME
    if old.finding.exposed and not item.finding.exposed:
        return State.GONE
    if item.finding.exposed and not old.finding.exposed:
        return State.WORSE
    if not item.finding.exposed:
        return State.SAME
    more = item.share - old.share
    if abs(more) <= SLACK:
        more = 0
    severer = item.severity.rank - old.severity.rank
    for difference in (severer, item.score - old.score, more):
        if difference > 0:
            return State.WORSE
        if difference < 0:
            return State.BETTER
    return State.SAME
