"""`keyhole report`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole import report as reports
from keyhole.cli.answers import answer
from keyhole.cli.app import Force, Json, app, expect_folder, expect_new
from keyhole.cli.console import say
from keyhole.cli.judging import BaselineFile, Environment, Judge, PolicyFile
from keyhole.cli.outputs import OutputFiles, Outputs
from keyhole.core import Audit
from keyhole.core.files import write_text
from keyhole.report import json_form
from keyhole.report.formats import FORMATS

_PAGE = Path("keyhole-report.html")


def _print_schema(asked: bool) -> None:
    if asked:
        typer.echo(json_form.schema(), nl=False)
        raise typer.Exit


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors --dim 8\n"
    "  keyhole audit target.safetensors\n"
    "  keyhole report keyhole-report.json --page again.html\n"
    "  keyhole report keyhole-report.json --output junit=keyhole.xml --output markdown=-",
)
def report(
    findings: Annotated[
        Path, typer.Argument(metavar="AUDIT.json", help="A file written by keyhole audit.")
    ],
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Where to write the page for people: {_PAGE}, if no --output is given.",
        ),
    ] = None,
    outputs: OutputFiles = None,
    policy: PolicyFile = None,
    environment: Environment = None,
    baseline: BaselineFile = None,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            callback=_print_schema,
            is_eager=True,
            help="Print the JSON Schema of AUDIT.json, and nothing else.",
        ),
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make the page again from the findings, or the report in another format."""
    del schema  # its callback has printed it
    chosen = _PAGE if page is None and not outputs else page
    expect_folder(chosen)
    expect_new(chosen, force=force)
    pages = () if chosen is None else (chosen,)
    wanted = Outputs.of(outputs, pages, FORMATS, force=force, as_json=as_json)
    judge = Judge.of(policy, environment, baseline)
    audit = Audit.load(findings)
    assessment = judge(audit)
    if chosen is not None:
        write_text(chosen, reports.render(audit, assessment))
    wanted.write(assessment)
    if not wanted.printed(assessment):
        answer(json_form.document(assessment), reports.table(audit, assessment), as_json=as_json)
    if chosen is not None:
        say(f"page: {chosen}")
