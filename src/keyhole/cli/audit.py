"""`keyhole audit`: parse, one library call, print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.cli.app import (
    CLEAN,
    FAILURE,
    FINDINGS,
    Device,
    Json,
    LedgerFile,
    Seed,
    app,
    expect_folder,
    ready_surfaces,
)
from keyhole.cli.console import Show, people, progress, say
from keyhole.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.audit.texts import TextTarget
    from keyhole.data import Example
    from keyhole.models import Loaded
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
    texts: Annotated[int, typer.Option(help="How many of them to read back.")] = 3,
    flips: Annotated[int, typer.Option(help="How many of a classifier's answers to flip.")] = 12,
    column: Annotated[str | None, typer.Option(help="The column that holds them.")] = None,
    label: Annotated[
        str,
        typer.Option(help="The column of the right classes; without it, the model's own answers."),
    ] = "label",
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
    from keyhole.files import write_text
    from keyhole.oracle.target import describe
    from keyhole.results import dump

    expect_folder(json_file, page)
    bars: dict[str, Show] = {}
    asked = None if data is None else _Data(data, texts, flips, column, label)
    surfaces, models = _opened(target, asked, _numbers(layers), device)
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


@dataclass(frozen=True)
class _Data:
    """Which part of a file is tried, and with which columns."""

    file: Path
    texts: int
    flips: int
    column: str | None
    label: str

    def read(self, loaded: Loaded) -> tuple[list[str], list[Example]]:
        """Texts to read back, and examples to flip where the model is a classifier."""
        from keyhole.data import read_examples, read_texts
        from keyhole.models.loading import class_names, head_of

        texts = read_texts(self.file, self.column, self.texts)
        if head_of(loaded.model) != "classification":
            return texts, []
        names = class_names(loaded.model.config)
        return texts, read_examples(
            self.file, text=self.column or (), label=self.label, names=names, limit=self.flips,
            labelled=False,
        )  # fmt: skip


def _opened(
    target: str, data: _Data | None, layers: list[int] | None, device: str
) -> tuple[dict[str, Oracle], dict[str, TextTarget]]:
    """The endpoints and the models that a target consists of."""
    from keyhole.audit.texts import TextTarget
    from keyhole.models import demo as box
    from keyhole.models.loading import load_model, names_model, task_of
    from keyhole.oracle.target import DEMO, open_surfaces

    model = names_model(target)
    if data is not None and not model and target != DEMO:
        raise InputError(f"expected --data with a model, got the endpoint {target}")
    if not (model or target == DEMO or "://" in target or Path(target).exists()):
        raise InputError(
            "expected a .safetensors file, a model's folder, a .gguf file, owner/name on the hub, "
            f"http://host:port/v2/models/NAME or demo, got {target}: no such file or folder"
        )
    surfaces = {} if model else open_surfaces(target)
    if not model and target != DEMO:
        return surfaces, {}
    if model:
        task = task_of(target)
        loaded = load_model(target, task="base" if task == "choice" else task, device=device)
        twin = None
    else:
        loaded = box.load_demo("classification", device)
        twin = box.load_demo("classification", device, hardened=True) if box.has_twin() else None
    texts, examples = (box.TEXTS, box.EXAMPLES) if data is None else data.read(loaded)
    # The built-in examples have the right classes for the classifier in the box alone.
    examples = () if model and data is None else examples
    about = "" if model or data is not None else box.ABOUT
    subject = TextTarget(loaded, texts, layers, examples=examples, twin=twin, about=about)
    return surfaces, {loaded.name: subject}
