"""`keyhole audit`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.frame import (
    CLEAN,
    FAILURE,
    FINDINGS,
    Json,
    LedgerFile,
    Seed,
    Target,
    app,
    ready_surfaces,
)
from keyhole.console import Show, people, progress, say


@app.command(epilog="\b\nExample:\n  keyhole audit demo --json-file audit.json --page audit.html")
def audit(
    target: Target,
    page: Annotated[Path, typer.Option(metavar="FILE", help="The page for people.")] = Path(
        "keyhole-report.html"
    ),
    json_file: Annotated[
        Path, typer.Option(metavar="FILE", help="The findings for a pipeline.")
    ] = Path("keyhole-report.json"),
    ledger: LedgerFile = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Try every attack that applies, and report what the target gives away."""
    from keyhole import report
    from keyhole.audit import audit as run
    from keyhole.oracle.target import describe, open_surfaces
    from keyhole.results import dump, write_text

    bars: dict[str, Show] = {}
    surfaces = open_surfaces(target)
    with ready_surfaces(surfaces, None, ledger) as ready, progress() as track:

        def watch(attack: str, count: int, expected: int | None) -> None:
            if attack not in bars:
                bars[attack] = track(attack, expected)
            bars[attack](count)

        found = run(ready, target=describe(target, surfaces), seed=seed, watch=watch)
    text = dump(found.to_dict())
    write_text(json_file, text)
    write_text(page, report.render(found))
    if as_json:
        typer.echo(text)
    people.print(report.table(found))
    say(f"page: {page}   findings: {json_file}")
    if found.failed:
        raise typer.Exit(FAILURE)
    raise typer.Exit(FINDINGS if found.exposed else CLEAN)
