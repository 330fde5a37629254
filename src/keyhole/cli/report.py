"""`keyhole report`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole import report as reports
from keyhole.cli.answers import answer
from keyhole.cli.app import Force, Json, app, expect_folder, expect_new
from keyhole.cli.console import say
from keyhole.files import write_text
from keyhole.results import Audit


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors --dim 8\n"
    "  keyhole audit target.safetensors\n"
    "  keyhole report keyhole-report.json --page again.html",
)
def report(
    findings: Annotated[
        Path, typer.Argument(metavar="AUDIT.json", help="A file written by keyhole audit.")
    ],
    page: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write the page for people.")
    ] = Path("keyhole-report.html"),
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Make the page again from the findings."""
    expect_folder(page)
    expect_new(page, force=force)
    audit = Audit.load(findings)
    write_text(page, reports.render(audit))
    answer(audit.to_dict(), reports.table(audit), as_json=as_json)
    say(f"page: {page}")
