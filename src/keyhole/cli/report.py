"""`keyhole report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import command
from keyhole.cli.outputs import OutputFiles, Outputs
from keyhole.cli.policy import AuditFile, BaselineFile, Environment, Judge, PolicyFile
from keyhole.core import Audit
from keyhole.core.options import OUTPUT


def _print_schema(asked: bool) -> None:
    if asked:
        from keyhole.report import json_form

        typer.echo(json_form.schema(), nl=False)
        raise typer.Exit


@command(
    "keyhole lab plant target.safetensors -o dim=8",
    "keyhole audit target.safetensors",
    "keyhole report keyhole-target.safetensors.json --output html=again.html",
    "keyhole report keyhole-target.safetensors.json --output junit=keyhole.xml --output markdown=-",
)
def report(
    findings: AuditFile,
    outputs: OutputFiles = None,
    policy: PolicyFile = None,
    environment: Environment = None,
    baseline: BaselineFile = None,
    schema: Annotated[
        bool,
        opt.about(
            "Print the JSON Schema of AUDIT.json, and nothing else.",
            OUTPUT,
            "--schema",
            callback=_print_schema,
            is_eager=True,
        ),
    ] = False,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Make the page again from the findings, or the report in another format.

    Without --output the page goes to a file of the findings' name, in this folder.
    """
    from keyhole import report as reports
    from keyhole.report.formats import FORMATS

    del schema  # its callback has printed it
    page: dict[str, Path] = {}
    if not outputs:
        page["html"] = Path(f"{findings.stem}.html")
    wanted = Outputs.of(
        outputs,
        FORMATS,
        force=force,
        as_json=as_json,
        defaults=page,
        inputs=(findings, policy),
        baselines=[baseline],
    )
    judge = Judge.of(policy, environment, baseline)
    assessment = judge(Audit.load(findings))
    wanted.write(assessment)
    wanted.report(assessment, reports.table)
