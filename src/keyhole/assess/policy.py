"""Policies: the decisions of a team about what to audit, what fails, and what is ignored.

A policy is a file `keyhole.toml`, or the table `[tool.keyhole]` of a `pyproject.toml`:

    targets = ["./model"]                      # what `keyhole audit` without TARGET audits
    data = "texts.tsv"
    returns = ["labels", "embeddings"]         # what the service returns; by default anything
    fail-on = ["high", "text.exact > 0.1"]     # by default everything that is given away
    allow-unchecked = false                    # true: a check without a result does not fail

    [severity]
    KH-PREDICTIONS-CUTS = "low"                # the severity of a rule or of a finding; an id
                                               # comes before a pattern with *

    [[ignore]]
    finding = "KH-TEXT-KEYS-AND-VALUES"        # the id of a finding or rule; * is a wildcard
    reason = "the cache never leaves the cluster"
    until = 2027-06-30

    [environment.production]                   # with --environment production
    fail-on = ["low"]

The settings of an environment replace those above it, except that its ignores and
severities are added. File names are relative to the policy's folder.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from keyhole.assess.assessment import (
    FAILED,
    PASSED,
    UNCHECKED,
    Assessment,
    Decision,
    Ignore,
    Item,
    Ruled,
    Ruling,
    State,
)
from keyhole.assess.severity import Severity
from keyhole.core import Outcome, Skip
from keyhole.core.errors import InputError, expect_keys
from keyhole.core.exposure import (
    NOT_CHECKED,
    RULES,
    Family,
    Rule,
    expect_returns,
)
from keyhole.core.files import exists, read_toml
from keyhole.core.result import typed

FILES = ("keyhole.toml", "pyproject.toml")


@dataclass(frozen=True)
class Policy:
    """The settings of a policy; by default everything that is given away fails."""

    source: str = "no policy: whatever is given away fails"
    targets: tuple[str, ...] = ()
    data: str | None = None
    returns: tuple[str, ...] = ()
    fail_on: tuple[Condition, ...] = field(default_factory=lambda: (condition("low"),))
    allow_unchecked: bool = False
    severities: Mapping[str, Severity] = field(default_factory=dict[str, Severity])
    ignores: tuple[Ignore, ...] = ()

    def severity(self, name: str, rule: Rule) -> Severity | None:
        """Return the severity that the policy sets for a finding: the first that matches it."""
        for pattern, severity in self.severities.items():
            if _names(pattern, name, rule.id):
                return severity
        return None


def find_policy(folder: Path) -> Path | None:
    """Return the policy of a folder, if any; a pyproject.toml counts if it has [tool.keyhole]."""
    own, shared = (folder / name for name in FILES)
    if exists(own):
        return own
    if exists(shared) and "keyhole" in _tool(read_toml(shared, "a policy")):
        return shared
    return None


def read_policy(path: str | Path, environment: str | None = None) -> Policy:
    """Read a policy from a file, with the settings of an environment."""
    path = Path(path)
    table = read_toml(path, "a policy")
    if path.name == FILES[1]:
        if "keyhole" not in _tool(table):
            raise InputError(f"{path} has no table [tool.keyhole]")
        table = typed(_TABLE, _tool(table)["keyhole"], f"{path}, tool.keyhole")
    if not table:
        raise InputError(f"{path} is empty: give {', '.join(_KEYS)} or environment")
    where = f"{path}, environment"
    tables = typed(dict[str, _TABLE], table.pop("environment", {}), where)
    plain = _layer(Policy(source=str(path)), table, path)
    # All of them, so that any mistake shows.
    policies = {name: _layer(plain, inner, path) for name, inner in tables.items()}
    if environment is None:
        return plain
    if environment not in policies:
        known = ", ".join(policies) or "none"
        raise InputError(
            f"{path} has no environment {environment[:40]}; it has {known}"
        )
    return replace(policies[environment], source=f"{path}, environment {environment}")


def _tool(table: Mapping[str, Any]) -> Any:
    """Return the table [tool], or no key at all."""
    return table.get("tool") or {}


_TABLE = dict[str, Any]
# The keys of a policy's file, and the fields of Policy that they set.
_KEYS = {
    "targets": "targets",
    "data": "data",
    "returns": "returns",
    "fail-on": "fail_on",
    "allow-unchecked": "allow_unchecked",
    "severity": "severities",
    "ignore": "ignores",
}


def _layer(
    policy: Policy,
    table: Mapping[str, Any],
    path: Path,
) -> Policy:
    """Return a policy with the settings of a table added or replaced.

    Its severities come before those of the policy: the first pattern that matches a
    finding decides.
    """
    expect_keys(table, _KEYS, str(path))
    changes: dict[str, Any] = {
        _KEYS[key]: _value(key, value, path) for key, value in table.items()
    }
    own = changes.get("severities", {})
    changes["severities"] = {**own, **policy.severities, **own}
    changes["ignores"] = (*policy.ignores, *changes.get("ignores", ()))
    return replace(policy, **changes)


def _value(
    key: str,
    value: Any,
    path: Path,
) -> object:
    """Read the value of a key, or raise an InputError that says what it takes."""
    where = f"{path}, {key}"
    if key == "data":
        return _in_folder(path, typed(str, value, where))
    if key == "allow-unchecked":
        return typed(bool, value, where)
    if key == "severity":
        return _severities(typed(dict[str, Severity], value, where), where)
    if key == "ignore":
        return _ignores(typed(tuple[Ignore, ...], value, where), path)
    if isinstance(value, str):
        value = [value]
    words = typed(tuple[str, ...], value, where)
    if key == "targets":
        return tuple(_in_folder(path, name) for name in words)
    if key == "returns":
        return expect_returns(words, f"returns of {path}")
    return tuple(map(condition, words))


def _severities(table: Mapping[str, Severity], where: str) -> dict[str, Severity]:
    """Return a table of severities: first those of findings, then of rules, then wildcards."""
    for name, severity in table.items():
        _expect_rule(name, where)
        if severity is Severity.UNKNOWN:
            raise InputError(f"{where}: {name[:60]} cannot be unknown")
    return {name: table[name] for name in sorted(table, key=_generality)}


def _generality(pattern: str) -> tuple[bool, bool]:
    return any(sign in pattern for sign in "*?["), pattern.startswith("KH-")


def _ignores(ignores: tuple[Ignore, ...], path: Path) -> tuple[Ignore, ...]:
    where = f"[[ignore]] of {path}"
    for each in ignores:
        if not each.finding.strip() or not each.reason.strip():
            raise InputError(f"{where} must have a finding and a reason in words")
        _expect_rule(each.finding, where)
    return ignores


def _expect_rule(word: str, where: str) -> None:
    """Raise an InputError if a word begins like the id of a rule and matches none."""
    known = (*(rule.id for rule in RULES), NOT_CHECKED)
    matches_none = not any(fnmatchcase(rule, word) for rule in known)
    if matches_none and word.upper().startswith("KH-"):
        raise InputError(
            f"{where} names {word[:60]}, which matches no rule (such as {RULES[0].id} or KH-TEXT-*)"
        )


def _in_folder(path: Path, name: str) -> str:
    """Return a name relative to the policy's folder if there is such a file, else unchanged."""
    file = path.parent / name
    if exists(file):
        return str(file)
    return name


# The conditions in `fail-on`. An audit fails if a finding meets any of them:
#
#     "high"                        a finding of this severity or a worse one
#     "text"                        anything of this family that is given away
#     "KH-TEXT-*", "text-layer-3"   anything given away under this rule or id; * is a wildcard
#     "text.exact > 0.1"            a figure of this family, whatever the outcome of the attack
#
# Figures are `exact` (the share recovered exactly), `share` (the share that is known),
# `score` (0 to 10), `error`, `queries` and `seconds`. A finding without the figure does
# not meet the condition, and controls never do.

FIGURES: dict[str, Callable[[Item], float | None]] = {
    "exact": lambda item: item.exact,
    "share": lambda item: item.share,
    "score": lambda item: item.score,
    "error": lambda item: item.finding.error,
    "queries": lambda item: item.finding.queries,
    "seconds": lambda item: item.finding.seconds,
}
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_COMPARISON = re.compile(r"\s*([a-z]+)\.([a-z]+)\s*(>=|<=|>|<)\s*(\S+)\s*")
_NAME = re.compile(r"[\w*?-]+")
_FAILING = [severity for severity in Severity if severity.rank >= Severity.LOW.rank]


@dataclass(frozen=True)
class Condition:
    """An entry of `fail-on` as it was written, and a test of whether a finding meets it."""

    words: str
    met: Callable[[Item], bool]

    def __str__(self) -> str:
        return self.words


def condition(words: str) -> Condition:
    """Read an entry of `fail-on`, or raise an InputError that says what it takes."""
    comparison = _COMPARISON.fullmatch(words)
    if comparison:
        return Condition(words, _comparing(words, *comparison.groups()))

    def by_severity(item: Item) -> bool:
        return item.severity.rank >= Severity(words).rank

    def by_family(item: Item) -> bool:
        return item.family == words

    def by_name(item: Item) -> bool:
        return _names(words, item.id, item.rule.id)

    if words in _FAILING:
        met = by_severity
    elif words in list(Family):
        met = by_family
    elif _NAME.fullmatch(words) and "-" in words:
        _expect_rule(words, "fail-on")
        met = by_name
    else:
        raise InputError(
            f"fail-on does not know {words[:60]!r}: give a severity ({', '.join(_FAILING)}), a "
            f"family ({', '.join(Family)}), an id of a rule or finding, or a figure such as "
            "'text.exact > 0.1'"
        )
    return Condition(words, lambda item: item.finding.exposed and met(item))


def _names(
    pattern: str,
    name: str,
    rule: str,
) -> bool:
    """Return whether a pattern matches the id of a finding or of its rule."""
    return fnmatchcase(name, pattern) or fnmatchcase(rule, pattern)


def _comparing(
    words: str,
    family: str,
    name: str,
    sign: str,
    number: str,
) -> Callable[[Item], bool]:
    """Return the test of a comparison such as text.exact > 0.1."""
    if family not in list(Family) or name not in FIGURES:
        raise InputError(
            f"fail-on does not know {words[:60]!r}: give a family ({', '.join(Family)}) and a "
            f"figure ({', '.join(FIGURES)}), such as text.exact"
        )
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if math.isnan(limit):
        raise InputError(f"{words[:60]!r} in fail-on must end with a number")

    def met(item: Item) -> bool:
        value = FIGURES[name](item)
        return (
            item.family == family and value is not None and _COMPARE[sign](value, limit)
        )

    return met


def decided(
    assessment: Assessment,
    policy: Policy,
    today: date | None = None,
) -> Assessment:
    """Return the assessment with the policy's decision, and with ignored findings marked."""
    today = today or datetime.now(UTC).date()
    items = tuple(
        replace(item, ignored=_ignored(item, policy, today))
        for item in assessment.items
    )
    rulings = [_ruled(item, policy, today) for item in items]
    rulings += [
        _skipped(skip, policy, today) for skip in assessment.audit.unchecked_skips
    ]
    if policy.allow_unchecked and assessment.audit.unchecked < len(rulings):
        for place, ruled in enumerate(rulings):
            if ruled.ruling is Ruling.UNCHECKED:
                rule = f"allow-unchecked: {ruled.rule}"
                rulings[place] = Ruled(ruled.finding, Ruling.ALLOWED, rule)
    decision = _decision(rulings, len(items), policy, assessment)
    return replace(assessment, items=items, decision=decision)


def _decision(
    rulings: Sequence[Ruled],
    tried: int,
    policy: Policy,
    assessment: Assessment,
) -> Decision:
    count = Counter(ruled.ruling for ruled in rulings)
    unchecked = count[Ruling.UNCHECKED]
    code = UNCHECKED
    if count[Ruling.FAILS]:
        rules = dict.fromkeys(
            ruled.rule for ruled in rulings if ruled.ruling is Ruling.FAILS
        )
        code = FAILED
        rule = f"{count[Ruling.FAILS]} of {tried} findings fail: {'; '.join(rules)}"
    elif not rulings and assessment.hypothetical:
        if policy.allow_unchecked:
            code = PASSED
        rule = f"no check is about what is returned ({', '.join(assessment.audit.returns)})"
    elif not rulings:
        rule = "nothing was checked"
    elif unchecked and not policy.allow_unchecked:
        rule = f"{unchecked} could not be checked, and that is not clean"
    elif unchecked:
        rule = "no check came to a result, which allow-unchecked does not excuse"
    else:
        code = PASSED
        rule = "no finding fails"
        parts = [
            f"{count[ruling]} {words}"
            for ruling, words in _EXCUSED.items()
            if count[ruling]
        ]
        if parts:
            rule += f" ({', '.join(parts)})"
    return Decision(code, rule, policy.source, tuple(rulings))


_EXCUSED = {  # rulings that do not fail an audit, in words for its decision
    Ruling.IGNORED: "ignored",
    Ruling.KNOWN: "in the baseline already",
    Ruling.ALLOWED: "could not be checked, which the policy allows",
}


def _ruled(
    item: Item,
    policy: Policy,
    today: date,
) -> Ruled:
    if item.ignored is not None:
        return Ruled(item.id, Ruling.IGNORED, _because(item.ignored))
    met = _met(item, policy)
    if met is not None and _is_known(item, policy):
        return Ruled(item.id, Ruling.KNOWN, f"{item.state} as in the baseline")
    if met is not None:
        expired = _expired(item, policy, today)
        return Ruled(item.id, Ruling.FAILS, f"fail-on {met}{expired}")
    if item.finding.outcome is Outcome.UNCHECKED:
        return Ruled(item.id, Ruling.UNCHECKED, item.finding.status.value)
    why = "nothing was given away"
    if item.finding.exposed:
        why = "meets no condition of fail-on"
    return Ruled(item.id, Ruling.PASSES, why)


def _met(item: Item, policy: Policy) -> Condition | None:
    """Return the first condition that a finding meets, if any."""
    return next((each for each in policy.fail_on if each.met(item)), None)


def _is_known(item: Item, policy: Policy) -> bool:
    """Return whether the baseline has a finding that meets a condition, and it is no worse now."""
    if item.finding.outcome is Outcome.UNCHECKED or item.before is None:
        return False
    return (
        item.state in (State.SAME, State.BETTER)
        and _met(item.before, policy) is not None
    )


def _skipped(
    skip: Skip,
    policy: Policy,
    today: date,
) -> Ruled:
    """Rule on a check that could not be made, ignored by the id of its exposure or rule."""
    name = skip.exposure.id
    for ignore in _ignores_of(name, skip.exposure.rule, policy):
        if ignore.until >= today:
            return Ruled(name, Ruling.IGNORED, _because(ignore))
    return Ruled(name, Ruling.UNCHECKED, skip.reason)


def _ignored(
    item: Item,
    policy: Policy,
    today: date,
) -> Ignore | None:
    """Return the ignore that holds for a finding today; one that gave nothing away needs none."""
    if item.finding.outcome is Outcome.KEPT:
        return None
    ignores = _ignores_of(item.id, item.rule.id, policy)
    return next((each for each in ignores if each.until >= today), None)


def _expired(
    item: Item,
    policy: Policy,
    today: date,
) -> str:
    ignores = _ignores_of(item.id, item.rule.id, policy)
    ends = [each.until for each in ignores if each.until < today]
    if not ends:
        return ""
    return f" (ignored until {max(ends)}, which has passed)"


def _ignores_of(
    name: str,
    rule: str,
    policy: Policy,
) -> list[Ignore]:
    return [each for each in policy.ignores if _names(each.finding, name, rule)]


def _because(ignore: Ignore) -> str:
    return f"until {ignore.until}: {ignore.reason}"
