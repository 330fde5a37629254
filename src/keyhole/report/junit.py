"""An audit as JUnit XML, in the dialect of Jenkins' xUnit plugin (junit-10), which all others read.

One test case for each check: a failure where something was given away, an error where it could not
be checked, skipped where nothing was tried or a policy ignores it. Where a policy decided, a test
case fails if and only if the policy says so: the table of tests and the exit code must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from keyhole.assess import Assessment, Item, Ruling
from keyhole.assess.severity import cost
from keyhole.core import Outcome, Skip
from keyhole.core.exposure import NOT_CHECKED
from keyhole.core.text import inert
from keyhole.report import words


@dataclass(frozen=True)
class Case:
    """One check: `end` is the tag of its outcome, empty for a pass; the rest is what is shown."""

    classname: str
    name: str
    seconds: float
    end: str
    kind: str
    message: str
    details: tuple[str, ...]


def render(assessment: Assessment) -> str:
    """A suite for each endpoint or model of the target."""
    audit, cases = assessment.audit, _cases(assessment)
    name = inert(f"keyhole audit of {audit.target}")
    root = Element("testsuites", {"name": name, **_sums([case for _, case in cases])})
    about = {
        "verdict": assessment.verdict, "severity": assessment.severity.value,
        "identity": audit.identity, "keyhole": words.version(audit),
        "policy": "" if assessment.decision is None else assessment.decision.source,
    }  # fmt: skip
    finished = words.finished(audit)
    when = {} if finished is None else {"timestamp": finished.removesuffix("Z")}
    for part in dict.fromkeys(place for place, _ in cases):
        suite = [case for place, case in cases if place == part]
        skipped = str(sum(case.end == "skipped" for case in suite))
        named = {"name": inert(part), **_sums(suite), "skipped": skipped, **when}
        parent = SubElement(root, "testsuite", named)
        properties = SubElement(parent, "properties")
        for key, value in about.items():
            SubElement(properties, "property", name=key, value=inert(value))
        for case in suite:
            _add(parent, case)
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _cases(assessment: Assessment) -> list[tuple[str, Case]]:
    """Every check, with the endpoint or model that it is about."""
    audit = assessment.audit
    made = [
        (item.finding.part or audit.target, _case(item, assessment))
        for item in (*assessment.items, *assessment.hypothetical)
    ]
    return [*made, *((audit.target, _skipped(skip, assessment)) for skip in audit.skips)]


def _case(item: Item, assessment: Assessment) -> Case:
    finding = item.finding
    end, because = _end(item, assessment)
    details = (
        f"finding: {item.id}", f"rule: {item.rule.id} ({item.rule.name})",
        f"standards: {words.names_of(item.rule.standards)}",
        f"severity: {item.severity}, score {item.score} of 10 ({item.why})",
        f"cost: {cost(finding)}, {finding.seconds:.2f} s", f"status: {finding.status}",
        *([f"decided by: {because}"] if because else []),
        *([f"reason: {finding.reason}"] if finding.reason else []),
        *([f"try it: {finding.command}"] if finding.command else []),
        *([f"fix: {finding.remedy}"] if finding.remedy and finding.exposed else []),
    )  # fmt: skip
    return Case(
        _classname(item.family, finding.part),
        f"{words.exposure(finding.exposure)} ({finding.attack})",
        finding.seconds, end, item.severity.value,
        f"{item.severity}: {words.outcome(finding)}", details,
    )  # fmt: skip


def _end(item: Item, assessment: Assessment) -> tuple[str, str]:
    """The tag of how a check ended, and which rule of a policy decided that."""
    if item in assessment.hypothetical:
        return "skipped", "the service does not return it"
    plain = {
        Outcome.GIVEN_AWAY: "failure", Outcome.EXPOSED: "failure", Outcome.UNCHECKED: "error",
        Outcome.KEPT: "",
    }  # fmt: skip
    if assessment.decision is None:
        return plain[item.finding.outcome], ""
    ruled = next(ruled for ruled in assessment.decision.rulings if ruled.name == item.id)
    end = {
        Ruling.FAILS: "failure", Ruling.IGNORED: "skipped", Ruling.UNCHECKED: _unknown(assessment),
    }.get(ruled.ruling, "")  # fmt: skip
    return end, ruled.rule


def _unknown(assessment: Assessment) -> str:
    """A policy may allow what could not be checked; then it is no error."""
    decision = assessment.decision
    return "skipped" if decision is not None and decision.exit_code == 0 else "error"


def _skipped(skip: Skip, assessment: Assessment) -> Case:
    decision, known = assessment.decision, skip.exposure.rule != NOT_CHECKED
    ignored = decision is not None and any(
        ruled.name == skip.exposure.id and ruled.ruling is Ruling.IGNORED
        for ruled in decision.rulings
    )
    return Case(
        _classname(skip.exposure.family if known else "skipped", ""),
        f"{words.skip(skip)} ({skip.attack})", 0.0,
        _unknown(assessment) if skip.unchecked and not ignored else "skipped",
        "unknown" if skip.unchecked else "not tried", skip.reason, (),
    )  # fmt: skip


def _classname(family: str, part: str) -> str:
    return f"keyhole.{family}.{words.slug(part)}" if part else f"keyhole.{family}"


def _sums(cases: Sequence[Case]) -> dict[str, str]:
    count = {tag: sum(case.end == tag for case in cases) for tag in ("failure", "error")}
    return {
        "tests": str(len(cases)), "failures": str(count["failure"]), "errors": str(count["error"]),
        "time": _time(sum(case.seconds for case in cases)),
    }  # fmt: skip


def _time(seconds: float) -> str:
    return f"{max(0.0, seconds):.3f}"


def _add(suite: Element, case: Case) -> None:
    child = SubElement(
        suite, "testcase", classname=case.classname, name=inert(case.name), time=_time(case.seconds)
    )
    text = "\n".join(inert(line) for line in case.details)
    if case.end:
        end = SubElement(child, case.end, type=case.kind, message=inert(case.message))
        end.text = text or None
    elif text:
        SubElement(child, "system-out").text = text
