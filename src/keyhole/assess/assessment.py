"""An audit with its meaning: findings with ids, rules and severities, four cards, one verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum

from keyhole.assess.severity import ALL, Severity, exact, is_proved, score, share
from keyhole.core import Audit, Finding, Fleet, Outcome, Readings, Skip
from keyhole.core.exposure import Family, Rule, is_returned, rule_of, slug
from keyhole.core.status import exit_code
from keyhole.core.text import percent


class Level(StrEnum):
    """How much of a family is given away."""

    NOT_TRIED = "not tried"
    NONE = "none"
    UNKNOWN = "could not check"
    OPEN = "open"  # a route or a vector: nothing of the secret was read
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
    findings of a baseline that are no longer there, `untried` those whose check was not made this
    time, `other` is the baseline's target where that is another one, `decision` what a policy says
    of all this. `hypothetical` are findings about what the service does not return, by what
    somebody said that it `returns`: they are shown apart, and decide nothing.
    """

    audit: Audit
    items: tuple[Item, ...]
    controls: tuple[Item, ...]
    families: tuple[Card, ...]
    verdict: str
    gone: tuple[Item, ...] = ()
    untried: tuple[Item, ...] = ()
    other: str = ""
    hypothetical: tuple[Item, ...] = ()
    returns: tuple[str, ...] = ()
    decision: Decision | None = None

    @property
    def severity(self) -> Severity:
        """That of the worst finding; what could not be checked is never none."""
        unchecked = [Severity.UNKNOWN] if self.unchecked or not self.items else []
        return max([*unchecked, *(item.severity for item in self.items)], key=_rank)

    @property
    def exit_code(self) -> int:
        """What a policy decided; without one, what the audit says by itself."""
        if self.decision is not None:
            return self.decision.exit_code
        outcomes = [item.finding.outcome for item in self.items]
        return exit_code([*outcomes, *(Outcome.UNCHECKED for _ in self.unchecked_skips)])

    @property
    def unchecked_skips(self) -> tuple[Skip, ...]:
        """Checks that apply to what is returned, and could not be made."""
        return _unchecked_skips(self.audit, self.returns)

    @property
    def unchecked(self) -> int:
        """How many attacks applied to what is returned and could not be run to an end."""
        findings = sum(item.finding.outcome is Outcome.UNCHECKED for item in self.items)
        return findings + len(self.unchecked_skips)

    @property
    def exposed(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.finding.exposed)

    def card(self, family: Family) -> Card:
        return next(card for card in self.families if card.family is family)


def assess(
    audit: Audit,
    override: Callable[[str, Rule, Finding], Severity | None] | None = None,
    returns: Sequence[str] = (),
) -> Assessment:
    """Every finding with its id, rule and severity; `override` may set another severity.

    `returns` is what the service returns, where that is not what the audit says.

    An override holds for what was given away: it cannot make an exposure of what was kept, nor
    a clean bill of what could not be checked.
    """
    named = zip(ids(audit.findings), audit.findings, strict=True)
    items = [_item(name, finding, override) for name, finding in named]
    returns = tuple(returns) or audit.returns
    found = sorted((item for item in items if not item.finding.control), key=_order)
    counted = [item for item in found if _is_real(item.finding, returns)]
    hypothetical = tuple(item for item in found if not _is_real(item.finding, returns))
    controls = tuple(item for item in items if item.finding.control)
    families = tuple(_card(family, counted) for family in Family)
    made = Assessment(
        audit, tuple(counted), controls, families, "", hypothetical=hypothetical, returns=returns
    )
    return replace(made, verdict=_verdict(made))


def _is_real(finding: Finding, returns: Sequence[str]) -> bool:
    """What was observed is given out, whatever somebody says."""
    return finding.observed or is_returned(finding.exposure, returns)


def _unchecked_skips(audit: Audit, returns: Sequence[str]) -> tuple[Skip, ...]:
    return tuple(
        skip for skip in audit.skips if skip.unchecked and is_returned(skip.exposure, returns)
    )


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
    override: Callable[[str, Rule, Finding], Severity | None] | None,
) -> Item:
    rule, scored = rule_of(finding.exposure), score(finding)
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
        whole = any(item.proved and item.share >= ALL for item in exposed)
        tried = any(item.exact is not None for item in exposed)
        return Level.ALL if whole else Level.PARTLY if tried else Level.OPEN
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


_OPEN = {family: f"a way to the {family} is open" for family in Family}
_WORDS = {Level.ALL: _ALL, Level.PARTLY: _PARTLY, Level.OPEN: _OPEN}


def _verdict(made: Assessment) -> str:
    """One line: what is lost, then what nobody knows."""
    total, families = len(made.items), made.families
    if total == 0 and not made.unchecked and made.hypothetical:
        return f"Nothing was checked: no attack reads what is returned ({', '.join(made.returns)})."
    if total == 0 and not made.unchecked:
        return "Nothing was checked: no attack applies to this target."
    lost = [_WORDS[card.level][card.family] for card in families if card.exposed]
    unchecked = f"{made.unchecked} of {total + len(made.unchecked_skips)} checks had no result"
    if lost:
        listed = lost[0] if len(lost) == 1 else f"{', '.join(lost[:-1])} and {lost[-1]}"
        tail = f"; {unchecked}" if made.unchecked else ""
        return f"{listed[0].upper()}{listed[1:]}{tail}."
    if made.unchecked >= total + len(made.unchecked_skips):
        ended = "the attack had no result" if total == 1 else "no attack had a result"
        return f"Could not check: {ended}."
    if made.unchecked:
        return f"Nothing was given away, but {unchecked}: that is not a clean bill."
    tried = "the attack that was tried" if total == 1 else f"all {total} attacks"
    return f"Nothing was given away: {tried} failed."


# A finding with its id, its rule and how bad it is: a row of every format.


class State(StrEnum):
    """What became of a finding since the baseline."""

    NEW = "new"
    WORSE = "worse"
    SAME = "same"
    BETTER = "better"
    GONE = "gone"
    UNTRIED = "not tried"  # this time: as before, as far as anybody knows


@dataclass(frozen=True)
class Ignore:
    """Findings that somebody has decided to live with: whose, why, and until when.

    `finding` is an id of a finding or of a rule; `*` stands for anything.
    """

    finding: str
    reason: str
    until: date


@dataclass(frozen=True)
class Item:
    """A finding, its id in all formats, and how bad it is.

    `id` is made of what the finding is about, not of where it stands, so that the next audit of
    the same target gives the same one. `score` is 0 to 10, `why` says what it is made of. `state`
    is set where there is a baseline, `ignored` where a policy says so.
    """

    id: str
    rule: Rule
    finding: Finding
    severity: Severity
    score: int
    why: str
    state: State | None = None
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


# What a policy decides: a ruling on each finding, an exit code, and the rule behind it.
#
# Exit codes, for every command that judges: 0 nothing was given away that fails the policy, 1
# findings fail it, 2 wrong input (which never gets as far as a decision), 3 something could not be
# checked, also where everything else was clean. Findings that fail come first: a target that is
# known to be open is not waiting for the rest.

PASSED, FAILED, UNCHECKED = 0, 1, 3


class Ruling(StrEnum):
    """What a policy says of one finding."""

    FAILS = "fails"
    IGNORED = "ignored"
    KNOWN = "known"  # in the baseline, and no worse
    UNCHECKED = "could not check"
    PASSES = "passes"


@dataclass(frozen=True)
class Ruled:
    """One finding, or one check that could not be made, and which rule decided about it."""

    name: str
    ruling: Ruling
    rule: str


@dataclass(frozen=True)
class Decision:
    """Whether the audit passes; `rule` says what decided, `rulings` the same for each finding."""

    exit_code: int
    rule: str
    rulings: tuple[Ruled, ...]
    source: str

    @property
    def failing(self) -> tuple[Ruled, ...]:
        return tuple(ruled for ruled in self.rulings if ruled.ruling is Ruling.FAILS)


# How far a remedy goes, where the audit itself measured it: nothing is promised or guessed.
#
# What was measured of an exposure stands in three places: in its own readings, which were also
# tried rounded, noisy or scaled; in what it holds of a model trained against the attack
# (`Finding.remedied`); and in other findings of the same part of the target, where less was exposed
# (labels in place of scores, a defence in front, fewer decimals).


@dataclass(frozen=True)
class Measure:
    """Something done against an exposure, and the share that was still given away.

    `words` say what was left; where that is a finding of its own, `item` is that finding, and its
    exposure says what was done.
    """

    change: str
    share: float
    words: str = ""
    item: Item | None = None


_PRECISIONS = {
    "bfloat16": "rounded to bfloat16", "int8": "rounded to int8",
    "noise of 10%": "noise of 10% added", "normalised": "scaled to length 1",
}  # fmt: skip
_LESS = {  # rules whose exposures are less than those of another
    "KH-WEIGHTS-SCORES": ("KH-WEIGHTS-ROUNDED-SCORES", "KH-WEIGHTS-SIGNS"),
    "KH-WEIGHTS-ROUNDED-SCORES": ("KH-WEIGHTS-SIGNS",),
}


def measured(item: Item, items: Sequence[Item]) -> list[Measure]:
    """What helped most first; empty where nothing was measured."""
    finding = item.finding
    own = [_rounded(cell) for cell in finding.texts[1:]]
    trained = [Measure(each.remedy, each.left, each.words) for each in finding.remedied]
    others = [
        Measure("", other.share if other.finding.exposed else 0.0, "", other)
        for other in items
        if _exposes_less(other, item)
    ]
    return sorted([*own, *trained, *others], key=lambda measure: measure.share)


def _rounded(cell: Readings) -> Measure:
    count = len(cell.readings)
    words = f"{percent(cell.known)} of tokens right, {cell.exact} of {count} texts exact"
    return Measure(_PRECISIONS.get(cell.precision, cell.precision), cell.known, words)


def _exposes_less(other: Item, item: Item) -> bool:
    """Is it the same secret of the same part of the target, with less of it in sight?"""
    more, less = item.finding.exposure, other.finding.exposure
    if other is item or other.family is not item.family or less.part != more.part:
        return False
    fewer = item.rule.id in _LESS and (less.rule in _LESS[more.rule] or less.variant == "budget")
    return fewer or less.narrows(more)


# What audits of many targets mean: each by its name, one verdict, one exit code.

_COUNTED = {1: "give something away", 3: "could not be checked", 0: "give nothing away"}


@dataclass(frozen=True)
class FleetAssessment:
    """What the table, the page and all formats of a fleet are made from."""

    fleet: Fleet
    targets: Mapping[str, Assessment]  # by the name that the target's row has

    @property
    def verdict(self) -> str:
        """The one sentence that a reader takes away: what is given away, whatever a policy says."""
        counts = Counter(audit.exit_code for audit in self.fleet.audits.values())
        parts = [f"{counts[code]} {words}" for code, words in _COUNTED.items() if counts[code]]
        total = len(self.targets)
        return f"Of {total} {'target' if total == 1 else 'targets'} {', '.join(parts)}."

    @property
    def exit_code(self) -> int:
        """As of one audit: 1 where any target fails, else 3 where something was not checked."""
        codes = {assessment.exit_code for assessment in self.targets.values()}
        return next((code for code in (1, 3) if code in codes), 0)


def assess_fleet(
    fleet: Fleet, judge: Callable[[str, Audit], Assessment] = lambda name, audit: assess(audit)  # noqa: ARG005
) -> FleetAssessment:  # fmt: skip
    """Every audit with its meaning; `judge` takes the target's name, and may know a policy."""
    made = {name: judge(name, audit) for name, audit in fleet.audits.items()}
    return FleetAssessment(fleet, made)


# What changed since an earlier audit of the same target: new, worse, same, better, gone, not tried.
#
# Findings are compared by their ids. Gone is what was given away and is so no longer: the attack
# failed this time, or the target has no such thing any more. What was not checked this time is not
# gone: it is as before. What could not be checked is not better for it: it counts as it did. Of a
# baseline of another target nothing is known here, so everything is new.

SLACK = 0.02  # of the share that came back: two runs of one search differ by as much


def compared(new: Assessment, old: Assessment) -> Assessment:
    """Each item with what became of it, and those of the old audit that are not among them."""
    if not new.audit.is_of(old.audit):
        items = tuple(replace(item, state=State.NEW) for item in new.items)
        return replace(_with(new, items), other=old.audit.name or old.audit.target)
    whole = max(len(_parts(each.audit)) for each in (new, old)) > 1
    keys, absent = _keys(new.audit, whole), _absent(new.audit, whole)
    before = {key: item for item, key in _keyed(old, whole)}
    items = tuple(replace(item, state=state(item, before.get(keys[item.id]))) for item in new.items)
    left = [
        (item, key)
        for item, key in _keyed(old, whole)
        if item.finding.exposed and key not in keys.values()
    ]
    gone = tuple(replace(item, state=State.GONE) for item, key in left if key in absent)
    untried = tuple(replace(item, state=State.UNTRIED) for item, key in left if key not in absent)
    return replace(_with(new, items), gone=gone, untried=untried)


def _with(new: Assessment, items: tuple[Item, ...]) -> Assessment:
    now = {item.id: item for item in items}
    cards = tuple(
        replace(card, worst=None if card.worst is None else now.get(card.worst.id))
        for card in new.families
    )
    return replace(new, items=items, families=cards)


def _parts(audit: Audit) -> set[str]:
    return {finding.part for finding in audit.findings}


def _keys(audit: Audit, whole: bool) -> dict[str, str]:
    """What findings are compared by, by their ids: the part counts where there are several."""
    plain = [
        finding if whole else replace(finding, exposure=replace(finding.exposure, part=""))
        for finding in audit.findings
    ]
    return dict(zip(ids(audit.findings), ids(plain), strict=True))


def _keyed(assessment: Assessment, whole: bool) -> list[tuple[Item, str]]:
    keys = _keys(assessment.audit, whole)
    return [(item, keys[item.id]) for item in assessment.items]


def _absent(audit: Audit, whole: bool) -> set[str]:
    """What was looked for, and is not there."""
    found = (skip.exposure for skip in audit.skips if skip.absent)
    return {(each if whole else replace(each, part="")).id for each in found}


def state(item: Item, old: Item | None) -> State:
    """What became of one finding."""
    was = old is not None and old.finding.exposed
    if item.finding.outcome is Outcome.UNCHECKED:
        return State.NEW if old is None else State.SAME
    if not item.finding.exposed:
        return State.GONE if was else State.SAME if old is not None else State.NEW
    if old is None:
        return State.NEW
    if not was:
        return State.WORSE
    more = item.share - old.share
    change = (item.severity.rank - old.severity.rank, item.score - old.score)
    for difference in (*change, more if abs(more) > SLACK else 0):
        if difference:
            return State.WORSE if difference > 0 else State.BETTER
    return State.SAME
