"""`keyhole capture` and `keyhole invert text`: a leak made, and a leak read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from keyhole.cli.app import (
    CLEAN,
    FAILURE,
    FINDINGS,
    INTERRUPTED,
    AllowPickle,
    Device,
    Json,
    ModelName,
    Seed,
    app,
)
from keyhole.cli.console import people, progress, say
from keyhole.cli.invert import group
from keyhole.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.invert import Leak, TextRecovery
    from keyhole.models import Loaded

_STYLES = {"verified": "green", "likely": "yellow", "unknown": "red"}


def _loaded(model: str, device: str, allow_pickle: bool) -> Loaded:
    from keyhole.models.demo import load_demo
    from keyhole.models.loading import load_model
    from keyhole.oracle.target import DEMO

    if model == DEMO:
        return load_demo(device=device)
    return load_model(model, device=device, allow_pickle=allow_pickle)


@app.command(
    epilog="\b\nExample:\n"
    '  keyhole capture demo --text "a secret of mine" --expose hidden:3 --out leak.safetensors\n'
    "  keyhole capture ./my-model --data texts.txt --expose kv:1 --precision int8 --out leaks"
)
def capture(
    model: ModelName,
    expose: Annotated[
        str, typer.Option(help="hidden:3, kv:0, maps:1, attention:1 or pooled: kind and layer.")
    ],
    text: Annotated[list[str] | None, typer.Option(help="A text; may be repeated.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts: .txt, or .tsv, .csv, .jsonl with a column."),
    ] = None,
    column: Annotated[str | None, typer.Option(help="The column that holds them.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only so many texts of the file.")] = None,
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, int8 or int4 (a scale a row).")
    ] = "float32",
    noise: Annotated[
        float, typer.Option(help="Noise to add, in standard deviations of the leak.")
    ] = 0.0,
    out: Annotated[
        Path,
        typer.Option(metavar="PATH", help="The leak file, or a folder where there are several."),
    ] = Path("leak.safetensors"),
    device: Device = "cpu",
    allow_pickle: AllowPickle = False,
    seed: Seed = 0,
) -> None:
    """Run a model on a text and write down what it would leak, to hand to an attacker."""
    from keyhole.data import read_texts
    from keyhole.models.capture import Exposure
    from keyhole.recover.simulate import degrade, leak_of

    exposure = Exposure.parse(expose)
    texts = list(text or []) + ([] if data is None else read_texts(data, column, limit))
    if not texts:
        raise InputError("expected --text or --data, got neither")
    if len(texts) > 1 and out.suffix:
        raise InputError(f"expected a folder for {len(texts)} leaks, got {out}")
    loaded = _loaded(model, device, allow_pickle)
    paths = [out]
    if len(texts) > 1:
        paths = [out / f"leak-{number:04d}.safetensors" for number in range(len(texts))]
    for number, (one, path) in enumerate(zip(texts, paths, strict=True)):
        leak = leak_of(loaded.model, loaded.tokenizer, one, exposure)
        leak = degrade(leak, precision, noise, seed + number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"expected a folder to write to, got {path.parent}: {error}"
            ) from error
        leak.save(path)
        say(f"{path}: {exposure} of {leak.length or 0} tokens, {precision}")


@group.command(
    "text",
    epilog="\b\nExample:\n"
    '  keyhole capture demo --text "a secret of mine" --expose hidden:3 --out leak.safetensors\n'
    "  keyhole invert text demo leak.safetensors --json",
)
def invert_text(
    model: ModelName,
    leaks: Annotated[
        list[Path], typer.Argument(metavar="LEAK", help="Files (or folders of files) of one kind.")
    ],
    device: Device = "cpu",
    allow_pickle: AllowPickle = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="One JSON line for each leak, as soon as it is found."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read the text back from what a model exposed, verified by running the model on it.

    Green tokens are verified, yellow ones likely, red ones unknown. With --out, leaks that are
    there already are not read again.
    """
    from keyhole.invert import load_leak

    paths = {path: _digest(path) for path in _files(leaks)}
    done = _before(out)
    fresh = [path for path, digest in paths.items() if digest not in done]
    if len(fresh) < len(paths):
        say(f"{out}: {len(paths) - len(fresh)} of {len(paths)} leaks were read before")
    given = [load_leak(path) for path in fresh]
    found = [done[digest] for digest in paths.values() if digest in done]
    if given:
        loaded = _loaded(model, device, allow_pickle)
        found += _read(loaded, fresh, given, out)
    if as_json:
        typer.echo(json.dumps(found if len(paths) > 1 else found[0], indent=2, allow_nan=False))
    statuses = {str(one["status"]) for one in found}
    if statuses == {"not applicable"}:
        raise typer.Exit(FAILURE)
    given_away = statuses & {"recovered", "inexact", "not identifiable"}
    raise typer.Exit(FINDINGS if given_away else CLEAN)


def _files(paths: list[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not inside:
            raise InputError(f"expected leaks (.safetensors) in {path}, got none")
        found += inside
    return found


def _digest(path: Path) -> str:
    """A leak is known by what is in it, so that another file of the same name is read again."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise InputError(f"expected a leak file, got {path}: {error.strerror}") from error


def _before(out: Path | None) -> dict[str, dict[str, Any]]:
    """What an earlier run wrote, by digest; a line that a crash cut off is dropped."""
    if out is None or not out.exists():
        return {}
    try:
        text = out.read_text("utf-8")
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        known = {str(one["digest"]): one for one in found}
        os.truncate(out, len(text[: text.rfind("\n") + 1].encode()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"expected results of `keyhole invert text` in {out}: {error!r}") from None
    return known


def _read(
    loaded: Loaded, paths: list[Path], leaks: list[Leak], out: Path | None
) -> list[dict[str, Any]]:
    from keyhole.invert import recovering

    found: dict[int, dict[str, Any]] = {}
    tokens = sum(leak.length or 0 for leak in leaks)
    texts = "one text" if len(leaks) == 1 else f"{len(leaks)} texts"
    say(f"{loaded.name}: {leaks[0].exposure} of {texts}, {tokens:,} tokens")
    try:
        with progress("tokens") as track:
            show = track(str(leaks[0].exposure), tokens or None)
            for number, one in recovering(loaded.model, loaded.tokenizer, leaks, watch=show):
                name = paths[number]
                data = {"leak": str(name), "digest": _digest(name), **one.to_dict()}
                found[number] = data
                if out is not None:
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(data, allow_nan=False) + "\n")
                people.print(_shown(loaded, paths[number], one))
    except KeyboardInterrupt:
        kept = f"; {len(found)} texts are in {out}: the same command goes on" if out else ""
        say(f"keyhole: stopped{kept}", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        raise InputError(f"expected a file to write, got {out}: {error.strerror}") from error
    return [found[number] for number in sorted(found)]


def _shown(loaded: Loaded, path: Path, found: TextRecovery) -> Text:
    from keyhole.recover.pieces import written

    line = Text(f"{path.name}: {found.status} ({found.reason})\n  ")
    if found.ids:
        pieces = written(loaded.tokenizer, found.ids)
        for piece, mark in zip(pieces, found.marks, strict=False):
            line.append(piece, style=_STYLES[mark.value])
    line.append(f"\n  {found.passes:,} passes, {found.seconds:.2f} s. {found.advice}")
    return line
