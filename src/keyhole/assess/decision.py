"""Whether an audit passes: what a policy says of each finding, and which rule decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase

from keyhole.assess.assessment import Assessment
from keyhole.assess.conditions import matches
from keyhole.assess.item import Ignore, Item, State
from keyhole.assess.policy import Policy
from keyhole.assess.ruling import FAILED, PASSED, UNCHECKED, Decision, Ruled, Ruling
from keyhole.core import Outcome, Skip


def decided(assessment: Assessment, policy: Policy, today: date | None = None) -> Assessment:
    """The assessment with the policy's decision, and its ignores marked on the items."""
    today = today or datetime.now(UTC).date()
    items = tuple(replace(item, ignored=_ignored(item, policy, today)) for item in assessment.items)
    rulings = [_ruled(item, policy, today) for item in items]
    rulings += [_skipped(skip, policy, today) for skip in assessment.audit.skips if skip.unchecked]
    decision = _decision(rulings, len(items), policy)
    return replace(assessment, items=items, decision=decision)


def _decision(rulings: Sequence[Ruled], tried: int, policy: Policy) -> Decision:
    def first(ruling: Ruling) -> list[Ruled]:
        return [ruled for ruled in rulings if ruled.ruling is ruling]

    failing, unchecked = first(Ruling.FAILS), first(Ruling.UNCHECKED)
    if failing:
        rules = list(dict.fromkeys(ruled.rule for ruled in failing))
        code, rule = FAILED, f"{len(failing)} of {tried} findings fail: {'; '.join(rules)}"
    elif not rulings:
        code, rule = UNCHECKED, "nothing was checked"
    elif unchecked and not policy.allow_unchecked:
        code, rule = UNCHECKED, f"{len(unchecked)} could not be checked, and that is not clean"
    elif unchecked and len(unchecked) == len(rulings):
        code, rule = UNCHECKED, "no check came to a result, which allow-unchecked does not excuse"
    else:
        code, rule = PASSED, _passed(rulings)
    return Decision(code, rule, tuple(rulings), policy.source)


def _passed(rulings: Sequence[Ruled]) -> str:
    words = [
        f"{sum(ruled.ruling is ruling for ruled in rulings)} {about}"
        for ruling, about in (
            (Ruling.IGNORED, "ignored"),
            (Ruling.KNOWN, "in the baseline already"),
            (Ruling.UNCHECKED, "could not be checked, which the policy allows"),
        )
        if any(ruled.ruling is ruling for ruled in rulings)
    ]
    about = f" ({', '.join(words)})" if words else ""
    return f"no finding fails{about}"


def _ruled(item: Item, policy: Policy, today: date) -> Ruled:
    expired = _expired(item, policy, today)
    if item.ignored is not None:
        return Ruled(item.id, Ruling.IGNORED, _because(item.ignored))
    met = next((condition for condition in policy.fail_on if condition.met(item)), None)
    if met is not None and item.state in (State.SAME, State.BETTER):
        return Ruled(item.id, Ruling.KNOWN, f"{item.state} as in the baseline")
    if met is not None:
        return Ruled(item.id, Ruling.FAILS, f"fail-on {met}{expired}")
    if item.finding.outcome is Outcome.UNCHECKED:
        return Ruled(item.id, Ruling.UNCHECKED, item.finding.status.value)
    why = "meets no condition of fail-on" if item.finding.exposed else "nothing was given away"
    return Ruled(item.id, Ruling.PASSES, why)


def _skipped(skip: Skip, policy: Policy, today: date) -> Ruled:
    """A check that would apply and could not be made; ignored by the id of its exposure."""
    name = skip.exposure.id
    for ignore in policy.ignores:
        if ignore.until >= today and fnmatchcase(name, ignore.finding):
            return Ruled(name, Ruling.IGNORED, _because(ignore))
    return Ruled(name, Ruling.UNCHECKED, skip.reason)


def _ignored(item: Item, policy: Policy, today: date) -> Ignore | None:
    """The ignore that holds for a finding today; what gave nothing away needs none."""
    if not item.finding.exposed and item.finding.outcome is not Outcome.UNCHECKED:
        return None
    given = [ignore for ignore in policy.ignores if matches(ignore.finding, item)]
    return next((ignore for ignore in given if ignore.until >= today), None)


def _expired(item: Item, policy: Policy, today: date) -> str:
    ends = [i.until for i in policy.ignores if matches(i.finding, item) and i.until < today]
    return f" (ignored until {max(ends)}, which has passed)" if ends else ""


def _because(ignore: Ignore) -> str:
    return f"until {ignore.until}: {ignore.reason}"
