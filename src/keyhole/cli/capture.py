"""`keyhole capture`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.bounds import expect_count
from keyhole.cli.app import (
    AllowPickle,
    Device,
    Force,
    ModelName,
    Seed,
    app,
    expect_new,
    interruptible,
)
from keyhole.cli.console import show
from keyhole.data import read_texts
from keyhole.errors import InputError
from keyhole.recover.run import UNFINISHED, capturing, files_of
from keyhole.resume import records_in


@app.command(
    epilog="\b\nExample:\n"
    '  keyhole capture demo --text "a secret of mine" --expose hidden:3 --out leak.safetensors\n'
    "  keyhole capture ./my-model --data texts.txt --expose kv:1 --precision int8 --out leaks\n"
    '  keyhole capture demo --text "in any order" --expose hidden:1 --degrade permuted '
    "--out rows.safetensors"
)
def capture(
    model: ModelName,
    expose: Annotated[
        str,
        typer.Option(
            help="What leaks, and of which layer: hidden:3, kv:0, maps:1, attention:1 or pooled; "
            "logits are those of the next token, logits:4 those of the first 4 tokens after the "
            "text."
        ),
    ],
    text: Annotated[
        list[str] | None, typer.Option(help="A text to run the model on; may be repeated.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file of texts: .txt (one a line), or .tsv, .csv, .jsonl with a column of them.",
        ),
    ] = None,
    column: Annotated[str | None, typer.Option(help="The column that holds the texts.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Take only this many texts of the file.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="How the leak is rounded: float32, bfloat16, float16, int8 or int4 (both with one "
            "scale for each row); a pooled embedding also to binary, its signs."
        ),
    ] = "float32",
    noise: Annotated[
        float, typer.Option(help="How much noise to add, in standard deviations of the leak.")
    ] = 0.0,
    degrade: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORM",
            help="What else becomes of the rows of hidden states: normalised (length one), "
            "permuted (in no order), subset:K (K rows), truncated:K (K numbers of each row); "
            "of a pooled embedding: normalised and truncated:K; of logits: log-probabilities. May "
            "be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH", help="The file to write the leak to, or a folder for several leaks."
        ),
    ] = Path("leak.safetensors"),
    device: Device = "cpu",
    allow_pickle: AllowPickle = False,
    force: Force = False,
    seed: Seed = 0,
) -> None:
    """Write down what a model leaks about a text, to try an attack on."""
    expect_count("--limit", limit)
    forms = degrade or []
    texts = list(text or []) + ([] if data is None else read_texts(data, column, limit))
    if not texts:
        raise InputError("expected --text or --data, got neither")
    files = files_of(out, len(texts))
    if len(files) == 1 or not (out / UNFINISHED).exists():  # else its own leaks may be there
        expect_new(*files, force=force)
    with interruptible(lambda: _kept(out)):
        for path, leak in capturing(
            model, texts, expose, out=out, precision=precision, noise=noise, forms=forms,
            device=device, allow_pickle=allow_pickle, force=force, seed=seed,
        ):  # fmt: skip
            states = ", ".join([precision, *forms])
            show(f"{path}: {leak.exposure} of {leak.length or 0} tokens, {states}")


def _kept(out: Path) -> str:
    """What a stopped capture has behind it."""
    leaks = records_in(out / UNFINISHED)
    return f"{leaks} leaks are in {out}: the same command goes on" if leaks else ""
