"""`keyhole policy check`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keyhole.assess import Assessment, Decision, Ruling
from keyhole.cli.answers import answer
from keyhole.cli.app import Json, app
from keyhole.cli.judging import BaselineFile, Environment, Judge, PolicyFile
from keyhole.core import Audit

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(group, name="policy", help="Judge findings by what a team has decided.")

_COLOURS = {
    Ruling.FAILS: "red", Ruling.UNCHECKED: "yellow", Ruling.IGNORED: "dim", Ruling.KNOWN: "dim",
    Ruling.PASSES: "green",
}  # fmt: skip


@group.callback()
def policy() -> None:
    """Judge findings by what a team has decided."""


@group.command(
    "check",
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors --dim 8\n"
    "  keyhole audit target.safetensors\n"
    "  keyhole policy check keyhole-report.json",
)
def check(
    findings: Annotated[
        Path, typer.Argument(metavar="AUDIT.json", help="A file written by keyhole audit.")
    ],
    policy: PolicyFile = None,
    environment: Environment = None,
    baseline: BaselineFile = None,
    as_json: Json = False,
) -> None:
    """Say whether an audit passes a policy, and which rule decided.

    Exit codes: 0 no finding fails, 1 findings fail, 2 wrong input, 3 something could not be
    checked.
    """
    judged = Judge.of(policy, environment, baseline)(Audit.load(findings))
    decision = judged.decision
    assert decision is not None  # noqa: S101 - a judge decides
    answer(_data(decision), _words(judged, decision), as_json=as_json)
    raise typer.Exit(decision.exit_code)


def _data(decision: Decision) -> dict[str, object]:
    rulings = [
        {"finding": ruled.name, "ruling": ruled.ruling.value, "rule": ruled.rule}
        for ruled in decision.rulings
    ]
    return {
        "exit_code": decision.exit_code, "rule": decision.rule, "policy": decision.source,
        "rulings": rulings,
    }  # fmt: skip


def _words(judged: Assessment, decision: Decision) -> Group:
    """What decided, then every finding with the rule that decided about it."""
    severities = {item.id: item.severity.value for item in judged.items}
    view = Table(box=box.SIMPLE)
    for heading in ("finding", "severity", "ruling", "by"):
        view.add_column(heading, overflow="fold")
    for ruled in decision.rulings:
        view.add_row(
            Text(ruled.name), severities.get(ruled.name, "–"),
            Text(ruled.ruling.value, style=_COLOURS[ruled.ruling]), Text(ruled.rule),
        )  # fmt: skip
    gone = [Text(f"gone since the baseline: {item.id}") for item in judged.gone]
    title = f"{_ENDS[decision.exit_code]}: {decision.rule}"
    return Group(Text(title, style="bold"), Text(f"policy: {decision.source}"), view, *gone)


_ENDS = {0: "Passes", 1: "Fails", 3: "Could not check"}
