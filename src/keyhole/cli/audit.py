"""`keyhole audit`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.cli.frame import (
    CLEAN,
    FAILURE,
    FINDINGS,
    Device,
    Json,
    LedgerFile,
    Seed,
    app,
    ready_surfaces,
)
from keyhole.console import Show, people, progress, say
from keyhole.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.exposures.texts import TextTarget
    from keyhole.oracle import Oracle


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
    texts: Annotated[int, typer.Option(help="How many of them.")] = 3,
    column: Annotated[str | None, typer.Option(help="The column that holds them.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to look at, such as 1,6,12; by default a few.")
    ] = None,
    device: Device = "cpu",
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
    from keyhole.oracle.target import describe
    from keyhole.results import dump, write_text

    bars: dict[str, Show] = {}
    surfaces, models = _opened(target, data, texts, column, _numbers(layers), device)
    with ready_surfaces(surfaces, None, ledger) as ready, progress("done") as track:

        def watch(attack: str, count: int, expected: int | None) -> None:
            if attack not in bars:
                bars[attack] = track(attack, expected)
            bars[attack](count)

        found = run(
            ready, models=models, target=describe(target, surfaces), seed=seed, watch=watch
        )  # fmt: skip
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


def _numbers(layers: str | None) -> list[int] | None:
    if layers is None:
        return None
    try:
        return [int(part) for part in layers.split(",")]
    except ValueError:
        raise InputError(f"expected layers such as 1,6,12, got {layers}") from None


def _opened(
    target: str,
    data: Path | None,
    count: int,
    column: str | None,
    layers: list[int] | None,
    device: str,
) -> tuple[dict[str, Oracle], dict[str, TextTarget]]:
    """The endpoints and the models that a target consists of."""
    from keyhole.data import read_texts
    from keyhole.exposures.texts import TextTarget
    from keyhole.models.box import TEXTS, load_box
    from keyhole.models.loading import load_model, names_model
    from keyhole.oracle.target import DEMO, open_surfaces

    model = names_model(target)
    if data is not None and not model and target != DEMO:
        raise InputError(f"expected --data with a model, got the endpoint {target}")
    surfaces = {} if model else open_surfaces(target)
    if not model and target != DEMO:
        return surfaces, {}
    tried = TEXTS if data is None else read_texts(data, column, count)
    loaded = load_model(target, device=device) if model else load_box(device=device)
    return surfaces, {loaded.name: TextTarget(loaded, tried, layers)}
