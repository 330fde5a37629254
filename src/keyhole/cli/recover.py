"""`keyhole recover`."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from keyhole.cli import options as opt
from keyhole.cli.app import command, interruptible
from keyhole.cli.bars import bars
from keyhole.cli.outputs import say, show, visible
from keyhole.core import exit_code
from keyhole.core.errors import InputError
from keyhole.core.files import expect_writable
from keyhole.core.options import CHECKS, DATA, OUTPUT, option

if TYPE_CHECKING:
    from keyhole.models.loading import Loaded
    from keyhole.recover.gradients import BatchRecovery
    from keyhole.recover.originals import Original
    from keyhole.recover.recovery import TextRecovery
    from keyhole.recover.run import LeakRead

_MARKS = {  # of tokens: the style, the brackets around the text, and the legend
    "verified": ("green", "", "", ""),
    "likely": ("yellow", "[", "]", "likely in [brackets]"),
    "unknown": ("red", "{", "}", "unknown in {braces}"),
}


@command(
    'keyhole lab capture demo --text "a secret of mine" --expose hidden:3 --out leak.safetensors',
    "keyhole recover demo leak.safetensors --json",
    'keyhole lab capture demo --text "one of two" --text "texts of a batch" --expose gradient '
    "--out gradients.safetensors",
    "keyhole recover demo gradients.safetensors",
)
def recover(
    model: opt.ModelName,
    leaks: Annotated[
        list[Path],
        typer.Argument(
            metavar="LEAK",
            help="Files (or folders of files) of one kind: leaks of keyhole lab capture, or what "
            "other programs saved as .npy, .npz, .safetensors or .pt.",
        ),
    ],
    expose: str | None = option(
        None,
        "What files of other programs hold, and of which layer: hidden:3, kv:0, maps:1. By "
        "default, names, shapes and numbers tell.",
        DATA,
    ),
    corpus: opt.Corpus = None,
    truth: Path | None = option(
        None,
        "The true texts, one for each leak, in order: report how much of each was recovered.",
        DATA,
        metavar="FILE",
    ),
    method: opt.Method = None,
    noise: float | None = option(
        None,
        "The size of the noise in the leaks, if it is known, in standard deviations of the "
        "leak. With noise of unknown size less is verified, and nothing from one vector.",
        CHECKS,
    ),
    out: Path | None = option(
        None,
        "Write one JSON line for each leak as soon as it is read; the same command resumes from "
        "this file.",
        OUTPUT,
        metavar="FILE",
    ),
    as_json: opt.Json = False,
    device: opt.Device = "cpu",
    allow_pickle: opt.AllowPickle = False,
) -> None:
    """Read the text back from what a model exposed, verified by running the model on it.

    Verified tokens are plain and green, likely ones in \\[brackets] and yellow, unknown
    ones in {braces} and red. With --out, leaks that are there already are not read
    again.
    """
    from keyhole.data import read_texts
    from keyhole.recover.files.contents import leak_files
    from keyhole.recover.gradients import is_update
    from keyhole.recover.run import run

    if out is not None:
        expect_writable(out)
    if is_update(leak_files(leaks)[0]):
        _expect_none(method=method, corpus=corpus, noise=noise, out=out, expose=expose)
        return _recover_updates(model, leaks, truth, device, allow_pickle, as_json)
    texts: list[LeakRead] = []
    true: list[str] | None = None
    if truth is not None:
        true = read_texts(truth)

    def kept() -> str:
        if out is None:
            return ""
        return f"{len(texts)} texts are in {out}: the same command goes on"

    with interruptible(kept), bars("recover", "texts") as track:

        def notify(read: LeakRead) -> None:
            texts.append(read)
            if not (read.before or as_json):
                with track.paused():
                    show(_shown(read))

        run(
            model,
            leaks,
            method=method,
            corpus=corpus,
            noise=noise,
            expose=expose,
            truth=true,
            device=device,
            allow_pickle=allow_pickle,
            out=out,
            track=track,
            notify=notify,
        )
    before = sum(text.before for text in texts)
    if before:
        say(f"{out}: {before} of {len(texts)} leaks were read before")
    if as_json:
        _print_json(
            [text.to_dict() for text in sorted(texts, key=lambda text: text.number)]
        )
    raise typer.Exit(exit_code(text.recovery.status for text in texts))


def _expect_none(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise InputError(f"--{name} is not for gradients: leave it out")


def _recover_updates(
    model: str,
    leaks: list[Path],
    truth: Path | None,
    device: str,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    from keyhole.audit.texts import originals_of
    from keyhole.data import read_texts
    from keyhole.models.demo import open_model
    from keyhole.recover.files.contents import leak_files
    from keyhole.recover.gradients.recover_batch import recovering_updates

    loaded = open_model(model, None, device, allow_pickle)
    tokenizer = loaded.tokenizer
    originals: list[Original] = []
    if truth is not None:
        originals = originals_of(loaded, read_texts(truth))
    results: list[dict[str, Any]] = []
    batches: list[BatchRecovery] = []
    with bars("recover", "batches") as track:
        for file, batch in recovering_updates(loaded, leak_files(leaks), track):
            batches.append(batch)
            result = {"leak": str(file), **batch.to_dict()}
            words = _shown_batch(loaded, file, batch)
            if originals:
                found = [
                    original
                    for original in originals
                    if any(
                        original.is_exactly(tokenizer, text.ids) for text in batch.texts
                    )
                ]
                result["exact"] = len(found)
                words.append(
                    f"\n  {len(found)} of {len(originals)} true texts are among them, exactly"
                )
            results.append(result)
            if not as_json:
                with track.paused():
                    show(words)
    if as_json:
        _print_json(results)
    raise typer.Exit(exit_code(batch.status for batch in batches))


def _print_json(results: list[dict[str, Any]]) -> None:
    data: Any = results
    if len(results) == 1:
        (data,) = results
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


def _shown_batch(
    loaded: Loaded,
    file: Path,
    batch: BatchRecovery,
) -> Text:
    from keyhole.models.pieces import written

    line = Text(f"{file.name}: {batch.status} ({batch.reason})")
    for number, text in enumerate(batch.texts):
        line.append(f"\n  text {number + 1}")
        if batch.labels:
            line.append(f" (class {batch.labels[number]})")
        line.append(": ")
        line.append(_marked(text, loaded.tokenizer.pad_token_id))
    if not batch.texts and batch.tokens:
        words = visible(" ".join(written(loaded.tokenizer, list(batch.tokens))))
        line.append(f"\n  its tokens, in no order: {words}")
    line.append(f"\n  {batch.cost}")
    return line


def _shown(read: LeakRead) -> Text:
    recovery = read.recovery
    line = Text(f"{Path(read.leak).name}: {recovery.status} ({recovery.reason})\n  ")
    line.append(_marked(recovery, read.padding))
    signs = [
        legend
        for mark, (*_, legend) in _MARKS.items()
        if legend and mark in recovery.marks
    ]
    line.append(f"\n  {': '.join(filter(None, (recovery.marked, ', '.join(signs))))}")
    if read.shared is not None:
        words = "exactly the true text" if read.exact else "not the true text"
        line.append(f"\n  {words}: {read.shared}")
    line.append(f"\n  {recovery.cost}")
    return line


def _marked(recovery: TextRecovery, padding: int | None) -> Text:
    """Return a text with the colours and brackets of its tokens' marks.

    `padding` is the id that an attack gives for a token it knows nothing about.
    """
    line = Text()
    tokens = zip(recovery.pieces, recovery.marks, recovery.ids, strict=False)
    pieces: list[tuple[str, str]] = []
    for piece, mark, id_ in tokens:
        if id_ == padding and mark == "unknown":
            piece = " ?"
        if piece:
            pieces.append((mark, piece))
    for mark, alike in groupby(pieces, key=lambda pair: pair[0]):
        words = visible("".join(piece for _, piece in alike))
        space = words[: len(words) - len(words.lstrip())]
        style, before, after, _ = _MARKS[mark]
        line.append(f"{space}{before}{words.lstrip()}{after}", style=style)
    return line
