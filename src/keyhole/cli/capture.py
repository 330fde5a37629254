"""`keyhole capture`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
from keyhole.core.errors import InputError, expect_count
from keyhole.core.journal import records_in
from keyhole.data import NO_LABEL, Example, read_examples, read_texts
from keyhole.recover.gradients.recover_batch import capture_update
from keyhole.recover.gradients.update import KIND, Protocol
from keyhole.recover.simulate import UNFINISHED, files_of
from keyhole.recover.simulate import capture as capture_leaks


@app.command(
    epilog="\b\nExample:\n"
    '  keyhole capture demo --text "a secret of mine" --expose hidden:3 --out leak.safetensors\n'
    "  keyhole capture ./my-model --data texts.txt --expose kv:1 --precision int8 --out leaks\n"
    '  keyhole capture demo --text "one text" --text "another one" --expose gradient '
    "--out gradients.safetensors\n"
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
            "text; gradient is what a client hands over for a batch of texts."
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
        float,
        typer.Option(
            help="How much noise to add, in standard deviations of the leak; to a gradient, in "
            "units of --clip."
        ),
    ] = 0.0,
    degrade: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORM",
            help="Change the leak. Hidden states: normalised (rows of length 1), permuted (rows in "
            "random order), subset:K (K rows), truncated:K (K numbers of each row). Pooled "
            "embeddings: normalised, truncated:K. Logits: log-probabilities. Hidden states, or "
            "keys and values, by a secret drawn from the number KEY: rotated:KEY, scrambled:KEY (a "
            "linear map, tokens of a block permuted), mixed:KEY (tokens of a block also mixed). "
            "May be repeated.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="For a gradient: texts in its batch; by default all given.")
    ] = None,
    hide: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="For a gradient: a part to leave out, embeddings."),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(help="For a gradient: the norm to clip each text's own gradient to."),
    ] = None,
    local_steps: Annotated[
        int | None,
        typer.Option(
            help="For a gradient: steps that the client takes on its batch, 1 by default; with "
            "more, the change of its weights leaks."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="For a gradient: the client's learning rate (0.01).")
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
    expect_count("--batch", batch)
    forms = degrade or []
    if expose == KIND:
        if forms:
            raise InputError(f"expected no --degrade for a gradient, got {forms[0]}")
        steps = 1 if local_steps is None else local_steps
        protocol = Protocol(clip, noise, steps, 0.01 if rate is None else rate)
        examples = [Example(f"text {n}", NO_LABEL, each) for n, each in enumerate(text or [], 1)]
        if data is not None:
            more = batch if limit is None else limit
            examples += read_examples(data, text=column or (), limit=more, labelled=False)
        if not examples:
            raise InputError("expected --text or --data, got neither")
        expect_new(out, force=force)
        update = capture_update(
            model, examples[:batch], out=out, protocol=protocol, hide=hide or (),
            precision=precision, device=device, allow_pickle=allow_pickle, seed=seed,
        )  # fmt: skip
        show(f"{out}: the {update.what} of a batch of {update.texts} texts, {precision}")
        return
    for option, value in {
        "--batch": batch, "--hide": hide, "--clip": clip, "--local-steps": local_steps,
        "--rate": rate,
    }.items():  # fmt: skip
        if value is not None:
            raise InputError(f"expected {option} with --expose gradient, got {expose}")
    texts = list(text or []) + ([] if data is None else read_texts(data, column, limit))
    if not texts:
        raise InputError("expected --text or --data, got neither")
    files = files_of(out, len(texts))
    if len(files) == 1 or not (out / UNFINISHED).exists():  # else its own leaks may be there
        expect_new(*files, force=force)
    with interruptible(lambda: _kept(out)):
        states = ", ".join([precision, *forms])
        capture_leaks(
            model, texts, expose, out=out, precision=precision, noise=noise, forms=forms,
            device=device, allow_pickle=allow_pickle, force=force, seed=seed,
            notify=lambda path, leak: show(
                f"{path}: {leak.exposure} of {leak.length or 0} tokens, {states}"
            ),
        )  # fmt: skip


def _kept(out: Path) -> str:
    """What a stopped capture has behind it."""
    leaks = records_in(out / UNFINISHED)
    return f"{leaks} leaks are in {out}: the same command goes on" if leaks else ""
