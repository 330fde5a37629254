"""When an audit fails: the conditions that `fail-on` lists, one of which is enough.

    "high"                        any finding of this severity or a worse one
    "text"                        anything of this family that is given away
    "KH-TEXT-*", "text-layer-3"   anything given away under this rule or id; * stands for anything
    "text.exact > 0.1"            a figure of this family, whatever the attack's outcome

Figures are `exact` (the share that came back exactly), `share` (the share that is known), `score`
(0 to 10), `error`, `queries` and `seconds`. A finding without the figure does not meet the
condition; controls never do.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from keyhole.assess.item import Item
from keyhole.assess.severity import Severity
from keyhole.core.errors import InputError
from keyhole.core.exposure import Family

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
    """One entry of `fail-on`, as it was written, and whether a finding meets it."""

    words: str
    met: Callable[[Item], bool]

    def __str__(self) -> str:
        return self.words


def condition(words: str) -> Condition:
    """What an entry means, or one line that says what may stand there."""
    if words in _FAILING:
        least = Severity(words).rank
        return Condition(words, lambda item: item.finding.exposed and item.severity.rank >= least)
    if words in list(Family):
        return Condition(words, lambda item: item.finding.exposed and item.family == words)
    comparison = _COMPARISON.fullmatch(words)
    if comparison:
        return Condition(words, _figure(words, *comparison.groups()))
    if _NAME.fullmatch(words) and "-" in words:
        return Condition(words, lambda item: item.finding.exposed and matches(words, item))
    raise InputError(
        f"expected in fail-on a severity ({', '.join(_FAILING)}), a family "
        f"({', '.join(Family)}), an id of a rule or finding, or a figure such as "
        f"'text.exact > 0.1', got {words[:60]!r}"
    )


def matches(pattern: str, item: Item) -> bool:
    """Is this the finding, or a finding of the rule, that a pattern names?"""
    return fnmatchcase(item.id, pattern) or fnmatchcase(item.rule.id, pattern)


def _figure(words: str, family: str, name: str, sign: str, number: str) -> Callable[[Item], bool]:
    if family not in list(Family) or name not in FIGURES:
        raise InputError(
            f"expected a family ({', '.join(Family)}) and a figure ({', '.join(FIGURES)}) "
            f"such as text.exact in fail-on, got {words[:60]!r}"
        )
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if math.isnan(limit):
        raise InputError(f"expected a number at the end of {words[:60]!r} in fail-on")

    def met(item: Item) -> bool:
        value = FIGURES[name](item)
        return item.family == family and value is not None and _COMPARE[sign](value, limit)

    return met
