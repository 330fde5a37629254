"""`keyhole audit`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole import report
from keyhole.audit.run import audit as run
from keyhole.cli.app import (
    Device,
    Json,
    LedgerFile,
    Seed,
    app,
    expect_folder,
    interruptible,
)
from keyhole.cli.console import bars, people, say
from keyhole.cli.extract import kept_in
from keyhole.errors import InputError
from keyhole.files import write_text
from keyhole.results import dump


@app.command(
    epilog="\b\nExample:\n  keyhole audit demo --json-file audit.json --page audit.html\n"
    "  keyhole audit ./my-model --data texts.tsv --texts 10"
)
def audit(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A .safetensors file, http://host:port/v2/models/NAME, a model (folder, .gguf "
            "file or hub name), or demo.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts to try a model with: .txt (one a line), or .tsv, .csv, .jsonl with a "
            "column sentence or text.",
        ),
    ] = None,
    texts: Annotated[int, typer.Option(help="How many of the texts to read back.")] = 3,
    flips: Annotated[
        int, typer.Option(help="How many of a classifier's answers to try to flip.")
    ] = 12,
    column: Annotated[str | None, typer.Option(help="The column that holds the texts.")] = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="The column that holds the right class: label, if there is one; without it, the "
            "model's own answer is taken to be right."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers to look at, such as 1,6,12; by default the first, middle, last."),
    ] = None,
    device: Device = "cpu",
    page: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write the page for people.")
    ] = Path("keyhole-report.html"),
    json_file: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write the findings for a pipeline.")
    ] = Path("keyhole-report.json"),
    ledger: LedgerFile = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Try every attack that applies, and report what the target gives away."""
    expect_folder(json_file, page)
    with interruptible(lambda: kept_in(ledger)), bars("done") as track:
        result = run(
            target, data=data, texts=texts, flips=flips, column=column, label=label,
            layers=_numbers(layers), device=device, ledger=ledger, seed=seed, track=track,
        )  # fmt: skip
    result.save(json_file)
    write_text(page, report.render(result))
    if as_json:
        typer.echo(dump(result.to_dict()))
    people.print(report.table(result))
    say(f"page: {page}   findings: {json_file}")
    raise typer.Exit(result.exit_code)


def _numbers(layers: str | None) -> list[int] | None:
    if layers is None:
        return None
    try:
        return [int(part) for part in layers.split(",")]
    except ValueError:
        raise InputError(f"expected layers such as 1,6,12, got {layers}") from None
