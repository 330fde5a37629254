"""`keyhole corpus`: parse, one library call, print."""

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
    expect_folder,
    expect_new,
    interruptible,
)
from keyhole.cli.bars import bars
from keyhole.cli.console import show
from keyhole.core.errors import expect_count
from keyhole.core.files import write_text
from keyhole.core.journal import records_in
from keyhole.recover.embeddings.drawn import draw_texts


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole corpus ./language-model --texts 20 --out drawn.txt\n"
    '  keyhole corpus ./language-model --begin "The film" --begin "This movie" --texts 20 '
    "--out reviews.txt"
)
def corpus(
    model: ModelName,
    texts: Annotated[int, typer.Option(help="How many sentences to draw.")] = 10_000,
    begin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS",
            help="Words that sentences begin with; may be repeated. By default the first words of "
            "sentences of the corpus that ships with Keyhole.",
        ),
    ] = None,
    longest: Annotated[int, typer.Option(help="The most tokens of a sentence.")] = 40,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The file to write them to, one a line.")
    ] = Path("corpus.txt"),
    device: Device = "cpu",
    allow_pickle: AllowPickle = False,
    force: Force = False,
    seed: Seed = 0,
) -> None:
    """Draw sentences from a language model, to read embeddings with as a --corpus."""
    expect_count("--texts", texts)
    expect_count("--longest", longest)
    journal = out.with_name(f"{out.name}.journal")
    expect_folder(out)
    expect_new(out, force=force)
    with interruptible(lambda: _kept(journal)), bars("corpus", "texts") as track:
        lines = draw_texts(
            model, texts, begins=begin or (), max_length=longest, device=device,
            allow_pickle=allow_pickle, journal=journal, seed=seed, track=track,
        )  # fmt: skip
        write_text(out, "".join(f"{line}\n" for line in lines))
    journal.unlink(missing_ok=True)
    short = "" if len(lines) == texts else f" (of {texts:,}: nothing new came after those)"
    show(f"{out}: {len(lines):,} sentences{short}")


def _kept(journal: Path) -> str:
    """What a stopped run has behind it."""
    drawn = records_in(journal)
    return f"{drawn} batches are in {journal}: the same command goes on" if drawn else ""
