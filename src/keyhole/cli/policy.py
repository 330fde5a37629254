"""`keyhole policy`, and what all commands that judge audits share: policy and baseline."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keyhole.cli import options as opt
from keyhole.cli.app import command
from keyhole.cli.outputs import answer
from keyhole.core import Audit
from keyhole.core.errors import InputError
from keyhole.core.options import OUTPUT

if TYPE_CHECKING:
    from keyhole.assess import Assessment, Decision, Policy

AuditFile = Annotated[
    Path, typer.Argument(metavar="AUDIT.json", help="A file written by keyhole audit.")
]
PolicyFile = Annotated[
    Path | None,
    opt.about(
        "The policy, which says what fails and what is ignored: a keyhole.toml, or a "
        "pyproject.toml with [tool.keyhole]. By default the one in this folder, if any.",
        OUTPUT,
        metavar="FILE",
    ),
]
Environment = Annotated[
    str | None,
    opt.about(
        "The environment of the policy, such as production.",
        OUTPUT,
        envvar="KEYHOLE_ENVIRONMENT",
    ),
]
BaselineFile = Annotated[
    Path | None,
    opt.about(
        "An earlier audit of the same target: findings that are no worse than in it do not fail. "
        "For a fleet, the folder of its results.",
        OUTPUT,
        metavar="AUDIT.json",
    ),
]
_COLOURS = {
    "fails": "red",
    "could not check": "yellow",
    "ignored": "dim",
    "known": "dim",
    "allowed": "dim",
    "passes": "green",
}
_ENDS = {0: "Passes", 1: "Fails", 3: "Could not check"}


@dataclass(frozen=True)
class Judge:
    """A policy and baselines, which are read before any work begins."""

    policy: Policy
    baselines: tuple[Audit, ...] = ()

    @classmethod
    def of(
        cls,
        policy: Path | None,
        environment: str | None,
        baseline: Path | None,
    ) -> Judge:
        from keyhole.assess import Policy, find_policy, read_policy

        chosen = policy or find_policy(Path())
        if chosen is None and environment is not None:
            raise InputError(
                "--environment needs a policy: write a keyhole.toml, or name one with --policy"
            )
        judge = cls(Policy())
        if chosen is not None:
            judge = cls(read_policy(chosen, environment))
        if baseline is not None:
            return judge.against(Audit.load(baseline))
        return judge

    def against(self, *baselines: Audit | None) -> Judge:
        """Return a judge with the same policy and other baselines.

        An audit is compared with the first of them that is of its target.
        """
        return replace(self, baselines=tuple(filter(None, baselines)))

    def __call__(self, audit: Audit) -> Assessment:
        from keyhole.assess import assess, compared, decided

        assessment = assess(audit, self.policy.severity, self.policy.returns)
        if self.baselines:
            own = filter(audit.is_of, self.baselines)
            baseline = next(own, self.baselines[0])
            old = assess(baseline, self.policy.severity, assessment.audit.returns)
            assessment = compared(assessment, old)
        return decided(assessment, self.policy)


@command(
    "keyhole lab plant target.safetensors -o dim=8",
    "keyhole audit target.safetensors",
    "keyhole policy keyhole-target.safetensors.json",
)
def policy(
    findings: AuditFile,
    policy: PolicyFile = None,
    environment: Environment = None,
    baseline: BaselineFile = None,
    as_json: opt.Json = False,
) -> None:
    """Tell whether an audit passes a policy, and which rule decided.

    Exit codes: 0 no finding fails, 1 findings fail, 2 wrong input, 3 something could
    not be checked.
    """
    judged = Judge.of(policy, environment, baseline)(Audit.load(findings))
    decision = judged.decision
    assert decision is not None  # noqa: S101 - a judge always decides
    answer(asdict(decision), _words(judged, decision), as_json=as_json)
    raise typer.Exit(decision.exit_code)


def _words(judged: Assessment, decision: Decision) -> Group:
    """Return the decision, and every finding with the rule that decided about it."""
    severities = {item.id: item.severity.value for item in judged.items}
    view = Table(box=box.SIMPLE)
    for heading in ("finding", "severity", "ruling", "by"):
        view.add_column(heading, overflow="fold")
    for ruled in decision.rulings:
        view.add_row(
            Text(ruled.finding),
            severities.get(ruled.finding, "–"),
            Text(ruled.ruling.value, style=_COLOURS[ruled.ruling]),
            Text(ruled.rule),
        )
    gone = [Text(f"gone since the baseline: {item.id}") for item in judged.gone]
    gone += [Text(f"not tried, as before: {item.id}") for item in judged.untried]
    title = f"{_ENDS[decision.exit_code]}: {decision.rule}"
    return Group(
        Text(title, style="bold"), Text(f"policy: {decision.policy}"), view, *gone
    )
