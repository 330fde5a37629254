"""Policies: the decisions of a team about what to audit, what fails, and what is ignored.

A policy is a file `keyhole.toml`, or the table `[tool.keyhole]` of a `pyproject.toml`:

    targets = ["./model"]                      # what `keyhole audit` without TARGET audits
    data = "texts.tsv"
    exposures = ["text", "KH-WEIGHTS-*"]       # families or rules to check; all by default
    returns = ["labels", "embeddings"]         # what the service returns; by default anything
    fail-on = ["high", "text.exact > 0.1"]     # by default everything that is given away
    allow-unchecked = false                    # true: a check without a result does not fail

    [severity]
    KH-PREDICTIONS-CUTS = "low"                # the severity of a rule or of a finding; an id
                                               # comes before a pattern with *

    [[rule]]                                   # all rules under an entry of a framework:
    owasp = "LLM08:2025"                       # owasp, aisvs, atlas or cwe
    severity = "critical"                      # their severity, or
    fail = true                                # they fail, whatever fail-on says

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
from typing import Any, cast

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
    expect_exposures,
    expect_returns,
)
from keyhole.core.files import exists, read_toml
from keyhole.core.standards import FRAMEWORKS, expect_standard

FILES = ("keyhole.toml", "pyproject.toml")


@dataclass(frozen=True)
class Policy:
    """The settings of a policy; by default everything that is given away fails.

    `standards` are the conditions from [[rule]], by which findings fail besides
    `fail_on`.
    """

    source: str = "no policy: whatever is given away fails"
    targets: tuple[str, ...] = ()
    data: str | None = None
    exposures: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    fail_on: tuple[Condition, ...] = field(default_factory=lambda: (condition("low"),))
    allow_unchecked: bool = False
    severities: Mapping[str, Severity] = field(default_factory=dict[str, Severity])
    ignores: tuple[Ignore, ...] = ()
    standards: tuple[Condition, ...] = ()

    def severity(self, name: str, rule: Rule) -> Severity | None:
        """Return the severity that the policy sets for a finding: the first that matches it."""
        given = self.severities.items()
        found = (severity for pattern, severity in given if _names(pattern, name, rule))
        return next(found, None)


def find_policy(folder: Path) -> Path | None:
    """Return the policy of a folder, if any; a pyproject.toml counts if it has [tool.keyhole]."""
    for name in FILES:
        path = folder / name
        if exists(path) and (
            name == FILES[0] or "keyhole" in _tool(read_toml(path, "a policy"))
        ):
            return path
    return None


def read_policy(path: str | Path, environment: str | None = None) -> Policy:
    """Read a policy from a file, with the settings of an environment."""
    path = Path(path)
    table = read_toml(path, "a policy")
    if path.name == FILES[1]:
        if "keyhole" not in _tool(table):
            raise InputError(f"{path} has no table [tool.keyhole]")
        table = _table(_tool(table)["keyhole"], "tool.keyhole", path)
    if not table:
        raise InputError(f"{path} is empty: give {', '.join(_KEYS)} or environment")
    environments = _table(table.pop("environment", {}), "environment", path)
    policy = _layer(Policy(source=str(path)), table, path)
    for (
        name,
        inner,
    ) in environments.items():  # reads all of them, so that any mistake shows
        layered = _layer(policy, _table(inner, f"environment.{name}", path), path)
        if name == environment:
            policy = replace(layered, source=f"{path}, environment {name}")
    if environment is not None and environment not in environments:
        known = ", ".join(environments) or "none"
        raise InputError(
            f"{path} has no environment {environment[:40]}; it has {known}"
        )
    return policy


def _tool(table: Mapping[str, Any]) -> dict[str, Any]:
    tool = table.get("tool", {})
    return cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}


def _layer(policy: Policy, table: Mapping[str, Any], path: Path) -> Policy:
    """Return a policy with the settings of a table added or replaced.

    Its severities come before those of the policy: first [severity], then each
    [[rule]].
    """
    expect_keys(table, _KEYS, str(path))
    changes = {"severities": {}} | {
        _KEYS[key]: _value(key, value, policy, path)
        for key, value in table.items()
        if key != "rule"
    }
    inherited = policy.severities
    policy = replace(policy, **cast("Any", changes))
    for entry in _tables(table.get("rule", []), "rule", path):
        policy = _with_rules(policy, entry, path)
    return replace(policy, severities=_before(policy.severities, inherited))


def _value(key: str, value: Any, policy: Policy, path: Path) -> object:
    """Read the value of a key, or raise an InputError that says what it takes."""
    match key:
        case "targets":
            return tuple(_in_folder(path, name) for name in _words(value, key, path))
        case "exposures":
            return expect_exposures(_words(value, key, path), f"exposures of {path}")
        case "returns":
            return expect_returns(_words(value, key, path), f"returns of {path}")
        case "fail-on":
            return tuple(condition(words) for words in _words(value, key, path))
        case "severity":
            return _severities(value, path)
        case "ignore":
            entries = _tables(value, "ignore", path)
            return (*policy.ignores, *(_ignore(entry, path) for entry in entries))
        case "data" if isinstance(value, str):
            return _in_folder(path, value)
        case "allow-unchecked" if isinstance(value, bool):
            return value
        case _:
            kind = "a file's name" if key == "data" else "true or false"
            raise InputError(f"expected {key} in {path} as {kind}, got {value!r:.40}")


def _before(
    first: Mapping[str, Severity], then: Mapping[str, Severity]
) -> Mapping[str, Severity]:
    """Put severities before others: the first pattern that matches a finding decides."""
    return {**first, **then, **first}


def _severities(value: Any, path: Path) -> dict[str, Severity]:
    """Return a table of severities: first those of findings, then of rules, then wildcards."""
    given: dict[str, Severity] = {}
    for name, word in _table(value, "severity", path).items():
        if word not in list(Severity) or word == Severity.UNKNOWN:
            names = ", ".join(
                severity for severity in Severity if severity != Severity.UNKNOWN
            )
            raise InputError(
                f"the severity of {name[:60]} in {path} must be one of {names}, not {word!r:.40}"
            )
        _expect_rule(name, f"[severity] of {path}")
        given[name] = Severity(word)
    return dict(sorted(given.items(), key=lambda entry: _generality(entry[0])))


def _generality(pattern: str) -> tuple[bool, bool]:
    return any(sign in pattern for sign in "*?["), pattern.startswith("KH-")


def _with_rules(policy: Policy, table: Mapping[str, Any], path: Path) -> Policy:
    """Return a policy with a [[rule]], which applies to the rules under entries of a framework."""
    keys = [key for key in table if key in _STANDARDS]
    if (
        len(keys) != 1
        or not set(table) - set(keys) <= {"severity", "fail"}
        or len(table) < 2
    ):
        raise InputError(
            f"[[rule]] of {path} must have one of {', '.join(_STANDARDS)}, and severity or "
            f"fail, and has {', '.join(table)[:60] or 'nothing'}"
        )
    known = {rule.id: rule.standards for rule in RULES}
    ids = _words(table[keys[0]], keys[0], path)
    under = {rule for word in ids for rule in expect_standard(keys[0], word, known)}
    if "severity" in table:
        given = dict.fromkeys(sorted(under), table["severity"])
        severities = _before(policy.severities, _severities(given, path))
        policy = replace(policy, severities=severities)
    if table.get("fail", True) is not True:
        raise InputError(
            f"fail in [[rule]] of {path} can only be true; [[ignore]] excuses"
        )
    if "fail" in table:
        met = Condition(
            f"{keys[0]} {', '.join(ids)}",
            lambda item: item.finding.exposed and item.rule.id in under,
        )
        policy = replace(policy, standards=(*policy.standards, met))
    return policy


def _ignore(table: Mapping[str, Any], path: Path) -> Ignore:
    if set(table) != {"finding", "reason", "until"}:
        raise InputError(
            f"[[ignore]] of {path} must have finding, reason and until, and has "
            f"{', '.join(table)[:60] or 'nothing'}"
        )
    finding = table["finding"]
    reason = table["reason"]
    until = table["until"]
    if (
        not isinstance(finding, str)
        or not isinstance(reason, str)
        or not reason.strip()
    ):
        raise InputError(
            f"[[ignore]] of {path} must have a finding and a reason in words"
        )
    if isinstance(until, datetime) or not isinstance(until, date):
        raise InputError(
            f"until in [[ignore]] of {path} must be a date such as 2027-06-30, not {until!r:.40}"
        )
    _expect_rule(finding, f"[[ignore]] of {path}")
    return Ignore(finding, reason, until)


def _expect_rule(word: str, where: str) -> None:
    """Raise an InputError if a word begins like the id of a rule and matches none."""
    known = (*(rule.id for rule in RULES), NOT_CHECKED)
    if word.upper().startswith("KH-") and not any(
        fnmatchcase(rule, word) for rule in known
    ):
        raise InputError(
            f"{where} names {word[:60]}, which matches no rule (such as {RULES[0].id} or KH-TEXT-*)"
        )


_STANDARDS = tuple(dict.fromkeys(framework.key for framework in FRAMEWORKS))
_KEYS = {  # the keys of a policy's file, and the fields of Policy that they set
    "targets": "targets",
    "data": "data",
    "exposures": "exposures",
    "returns": "returns",
    "fail-on": "fail_on",
    "allow-unchecked": "allow_unchecked",
    "severity": "severities",
    "ignore": "ignores",
    "rule": "standards",
}


def _words(value: Any, key: str, path: Path) -> tuple[str, ...]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(
        isinstance(entry, str) for entry in entries
    ):
        raise InputError(
            f"expected {key} in {path} as a list of words, got {value!r:.40}"
        )
    return tuple(cast("list[str]", entries))


def _table(value: Any, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"expected {key} in {path} as a table, got {value!r:.40}")
    return dict(cast("dict[str, Any]", value))


def _tables(value: Any, key: str, path: Path) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise InputError(f"expected [[{key}]] in {path}, got {value!r:.40}")
    return [_table(entry, key, path) for entry in cast("list[Any]", value)]


def _in_folder(path: Path, name: str) -> str:
    """Return a name relative to the policy's folder if there is such a file, else unchanged."""
    file = path.parent / name
    return str(file) if exists(file) else name


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
    if words in _FAILING:
        least = Severity(words).rank
        return Condition(
            words, lambda item: item.finding.exposed and item.severity.rank >= least
        )
    if words in list(Family):
        return Condition(
            words, lambda item: item.finding.exposed and item.family == words
        )
    comparison = _COMPARISON.fullmatch(words)
    if comparison:
        return Condition(words, _comparing(words, *comparison.groups()))
    if _NAME.fullmatch(words) and "-" in words:
        _expect_rule(words, "fail-on")
        return Condition(
            words, lambda item: item.finding.exposed and matches(words, item)
        )
    raise InputError(
        f"fail-on does not know {words[:60]!r}: give a severity ({', '.join(_FAILING)}), a family "
        f"({', '.join(Family)}), an id of a rule or finding, or a figure such as "
        "'text.exact > 0.1'"
    )


def matches(pattern: str, item: Item) -> bool:
    """Return whether a pattern matches the id of a finding or of its rule."""
    return _names(pattern, item.id, item.rule)


def _names(pattern: str, name: str, rule: Rule) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(rule.id, pattern)


def _comparing(
    words: str, family: str, name: str, sign: str, number: str
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
    assessment: Assessment, policy: Policy, today: date | None = None
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
        rulings = [
            Ruled(ruled.finding, Ruling.ALLOWED, f"allow-unchecked: {ruled.rule}")
            if ruled.ruling is Ruling.UNCHECKED
            else ruled
            for ruled in rulings
        ]
    decision = _decision(rulings, len(items), policy, assessment)
    return replace(assessment, items=items, decision=decision)


def _decision(
    rulings: Sequence[Ruled], tried: int, policy: Policy, assessment: Assessment
) -> Decision:
    count = Counter(ruled.ruling for ruled in rulings)
    unchecked = count[Ruling.UNCHECKED]
    if count[Ruling.FAILS]:
        rules = dict.fromkeys(
            ruled.rule for ruled in rulings if ruled.ruling is Ruling.FAILS
        )
        code = FAILED
        rule = f"{count[Ruling.FAILS]} of {tried} findings fail: {'; '.join(rules)}"
    elif not rulings and assessment.hypothetical:
        code = PASSED if policy.allow_unchecked else UNCHECKED
        rule = f"no check is about what is returned ({', '.join(assessment.audit.returns)})"
    elif not rulings:
        code = UNCHECKED
        rule = "nothing was checked"
    elif unchecked and not policy.allow_unchecked:
        code = UNCHECKED
        rule = f"{unchecked} could not be checked, and that is not clean"
    elif unchecked:
        code = UNCHECKED
        rule = "no check came to a result, which allow-unchecked does not excuse"
    else:
        parts = [
            f"{count[ruling]} {words}"
            for ruling, words in _EXCUSED.items()
            if count[ruling]
        ]
        detail = f" ({', '.join(parts)})" if parts else ""
        code = PASSED
        rule = f"no finding fails{detail}"
    return Decision(code, rule, policy.source, tuple(rulings))


_EXCUSED = {  # rulings that do not fail an audit, in words for its decision
    Ruling.IGNORED: "ignored",
    Ruling.KNOWN: "in the baseline already",
    Ruling.ALLOWED: "could not be checked, which the policy allows",
}


def _ruled(item: Item, policy: Policy, today: date) -> Ruled:
    expired = _expired(item, policy, today)
    if item.ignored is not None:
        return Ruled(item.id, Ruling.IGNORED, _because(item.ignored))
    met = _met(item, policy)
    if met is not None and _is_known(item, policy):
        return Ruled(item.id, Ruling.KNOWN, f"{item.state} as in the baseline")
    if met is not None:
        return Ruled(item.id, Ruling.FAILS, f"fail-on {met}{expired}")
    if item.finding.outcome is Outcome.UNCHECKED:
        return Ruled(item.id, Ruling.UNCHECKED, item.finding.status.value)
    if item.finding.exposed:
        why = "meets no condition of fail-on"
    else:
        why = "nothing was given away"
    return Ruled(item.id, Ruling.PASSES, why)


def _met(item: Item, policy: Policy) -> Condition | None:
    """Return the first condition that a finding meets, if any."""
    conditions = (*policy.fail_on, *policy.standards)
    return next((condition for condition in conditions if condition.met(item)), None)


def _is_known(item: Item, policy: Policy) -> bool:
    """Return whether the baseline has a finding that meets a condition, and it is no worse now."""
    if item.finding.outcome is Outcome.UNCHECKED or item.before is None:
        return False
    return (
        item.state in (State.SAME, State.BETTER)
        and _met(item.before, policy) is not None
    )


def _skipped(skip: Skip, policy: Policy, today: date) -> Ruled:
    """Rule on a check that could not be made, ignored by the id of its exposure or rule."""
    name = skip.exposure.id
    rule = skip.exposure.rule
    for ignore in policy.ignores:
        named = fnmatchcase(name, ignore.finding) or fnmatchcase(rule, ignore.finding)
        if ignore.until >= today and named:
            return Ruled(name, Ruling.IGNORED, _because(ignore))
    return Ruled(name, Ruling.UNCHECKED, skip.reason)


def _ignored(item: Item, policy: Policy, today: date) -> Ignore | None:
    """Return the ignore that holds for a finding today; one that gave nothing away needs none."""
    if item.finding.outcome is Outcome.KEPT:
        return None
    given = (i for i in policy.ignores if matches(i.finding, item) and i.until >= today)
    return next(given, None)


def _expired(item: Item, policy: Policy, today: date) -> str:
    ends = [
        i.until for i in policy.ignores if matches(i.finding, item) and i.until < today
    ]
    return f" (ignored until {max(ends)}, which has passed)" if ends else ""


def _because(ignore: Ignore) -> str:
    return f"until {ignore.until}: {ignore.reason}"
