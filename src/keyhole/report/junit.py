"""An audit as JUnit XML, in the dialect of Jenkins' xUnit plugin (junit-10), which all others read.

Each check is a test case: a failure if something was given away, an error if it could not be
checked, skipped if nothing was tried or a policy ignores it. If a policy decided, a test case fails
if and only if the policy says so, so that the tests and the exit code agree.
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
    """A check of a part of the target; `end` is the tag of its outcome, empty if it passed."""

    part: str
    classname: str
    name: str
    seconds: float
    end: str
    kind: str
    message: str
    details: tuple[str, ...]


def render(assessment: Assessment) -> str:
    """Return a document with a suite for each part of the target."""
    audit = assessment.audit
    cases = [_case(item, assessment) for item in (*assessment.items, *assessment.hypothetical)]
    cases += [_skipped(skip, assessment) for skip in audit.skips]
    name = inert(f"keyhole audit of {audit.target}")
    root = Element("testsuites", {"name": name, **_totals(cases)})
    about = {
        "verdict": assessment.verdict,
        "severity": assessment.severity.value,
        "identity": audit.identity,
        "keyhole": words.version(audit),
        "policy": "" if assessment.decision is None else assessment.decision.source,
    }
    finished = words.finished(audit)
    when = {} if finished is None else {"timestamp": finished.removesuffix("Z")}
    for part in dict.fromkeys(case.part for case in cases):
        suite = [case for case in cases if case.part == part]
        skipped = str(sum(case.end == "skipped" for case in suite))
        attributes = {"name": inert(part), **_totals(suite), "skipped": skipped, **when}
        parent = SubElement(root, "testsuite", attributes)
        properties = SubElement(parent, "properties")
        for key, value in about.items():
            SubElement(properties, "property", name=key, value=inert(value))
        for case in suite:
            _add(parent, case)
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _case(item: Item, assessment: Assessment) -> Case:
    finding = item.finding
    end, because = _end(item, assessment)
    details = [
        f"finding: {item.id}",
        f"rule: {item.rule.id} ({item.rule.name})",
        f"standards: {', '.join(standard.id for standard in item.rule.standards) or 'none'}",
        f"severity: {item.severity}, score {item.score} of 10 ({item.why})",
        f"cost: {cost(finding)}, {finding.seconds:.2f} s",
        f"status: {finding.status}",
    ]
    details += [f"decided by: {because}"] if because else []
    details += [f"reason: {finding.reason}"] if finding.reason else []
    details += [f"try it: {finding.command}"] if finding.command else []
    details += [f"fix: {finding.remedy}"] if finding.remedy and finding.exposed else []
    return Case(
        finding.part or assessment.audit.target,
        _classname(item.family, finding.part),
        f"{words.exposure(finding.exposure)} ({finding.attack})",
        finding.seconds,
        end,
        item.severity.value,
        f"{item.severity}: {words.outcome(finding)}",
        tuple(details),
    )


_ENDS = {
    Outcome.GIVEN_AWAY: "failure",
    Outcome.EXPOSED: "failure",
    Outcome.UNCHECKED: "error",
    Outcome.KEPT: "",
}


def _end(item: Item, assessment: Assessment) -> tuple[str, str]:
    """Return the tag of how a check ended, and the rule of a policy that decided it."""
    if item in assessment.hypothetical:
        return "skipped", "the service does not return it"
    if assessment.decision is None:
        return _ENDS[item.finding.outcome], ""
    ruled = next(ruled for ruled in assessment.decision.rulings if ruled.name == item.id)
    unchecked = _end_of_unchecked(assessment)
    ends = {Ruling.FAILS: "failure", Ruling.IGNORED: "skipped", Ruling.UNCHECKED: unchecked}
    return ends.get(ruled.ruling, ""), ruled.rule


def _end_of_unchecked(assessment: Assessment) -> str:
    """Return the tag of a check without a result, which a policy may allow."""
    decision = assessment.decision
    return "skipped" if decision is not None and decision.exit_code == 0 else "error"


def _skipped(skip: Skip, assessment: Assessment) -> Case:
    decision, has_rule = assessment.decision, skip.exposure.rule != NOT_CHECKED
    ignored = decision is not None and any(
        ruled.name == skip.exposure.id and ruled.ruling is Ruling.IGNORED
        for ruled in decision.rulings
    )
    return Case(
        assessment.audit.target,
        _classname(skip.exposure.family if has_rule else "skipped", ""),
        f"{words.skip(skip)} ({skip.attack})",
        0.0,
        _end_of_unchecked(assessment) if skip.unchecked and not ignored else "skipped",
        "unknown" if skip.unchecked else "not tried",
        skip.reason,
        (),
    )


def _classname(family: str, part: str) -> str:
    return f"keyhole.{family}.{words.slug(part)}" if part else f"keyhole.{family}"


def _totals(cases: Sequence[Case]) -> dict[str, str]:
    return {
        "tests": str(len(cases)),
        "failures": str(sum(case.end == "failure" for case in cases)),
        "errors": str(sum(case.end == "error" for case in cases)),
        "time": _time(sum(case.seconds for case in cases)),
    }


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
