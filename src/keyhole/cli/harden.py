"""`keyhole harden`: parse, one library call, print."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.app import (
    CLEAN,
    AllowPickle,
    Classes,
    Device,
    Json,
    Label,
    Longest,
    ModelName,
    Seed,
    TextColumn,
    app,
    expect_folder,
    model_path,
)
from keyhole.cli.console import people, say
from keyhole.errors import InputError
from keyhole.harden.run import CARD, Course, Measure, stoppable

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.data import Example
    from keyhole.harden import Defence
    from keyhole.harden.run import Hardened


class MethodName(StrEnum):
    PLAIN = "plain"
    SATTEND = "sattend"
    FREELB = "freelb"
    SMART = "smart"
    R3F = "r3f"
    ASA = "asa"
    ATTACK_MASKS = "attack-masks"
    STRONGEST = "strongest"


class ModeName(StrEnum):
    UNIT = "unit"
    TOKEN = "token"  # noqa: S105 - a token of text


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole harden ./my-classifier --data train.tsv --method strongest --epochs 1 "
    "--dev dev.tsv --page hardened.html --out hardened\n"
    "  keyhole disrupt ./hardened --data dev.tsv"
)
def harden(
    model: ModelName,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Labelled examples: .tsv, .csv, .jsonl, .json, or a dataset's name on the hub.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the trained model goes, with its card.")
    ],
    method: Annotated[
        MethodName,
        typer.Option(help="How to train; strongest is attack-masks and freelb together."),
    ] = MethodName.SATTEND,
    rate: Annotated[
        float | None, typer.Option(help="Share of attention to drop (sattend): 0.2.")
    ] = None,
    mode: Annotated[
        ModeName | None, typer.Option(help="Drop single units or whole tokens (sattend): unit.")
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option(help="Of the masked answers (attack-masks: 0.35, strongest: 1)."),
    ] = None,
    text: TextColumn = None,
    label: Label = "label",
    classes: Classes = None,
    examples: Annotated[int | None, typer.Option(help="Only the first so many.")] = None,
    epochs: Annotated[int, typer.Option(help="Times over all examples.")] = 3,
    batch: Annotated[int, typer.Option(help="Examples in a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, at its peak.")] = 2e-5,
    longest: Longest = 128,
    amp: Annotated[
        bool, typer.Option("--amp", help="Passes in bfloat16 where they may be.")
    ] = False,
    dev: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Measure accuracy and flips on it, before and after."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A page that shows what was cut, before and after."),
    ] = None,
    flips: Annotated[int, typer.Option(help="How many of its answers to try to flip.")] = 50,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep each epoch there; the same command goes on."),
    ] = None,
    device: Device = "cpu",
    allow_pickle: AllowPickle = False,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="Train so many models, and give mean and range.")] = 1,
    as_json: Json = False,
) -> None:
    """Train a model against the attack on attention, and measure whether it helped."""
    from keyhole import report
    from keyhole.results import FORMAT, dump, environment

    defence = _defence(method, rate, mode, weight)
    _writable(out, model)
    _check(flips, seeds, page, dev)
    names = classes.split(",") if classes else None
    tried = _read(model, data, text, label, names, examples)
    held = [] if dev is None else _read(model, dev, text, label, names, None)
    settings: dict[str, Any] = {
        "epochs": epochs, "rate": learning_rate, "batch": batch, "longest": longest, "amp": amp,
    }  # fmt: skip
    course = Course(
        model, tried, defence, settings, out, device, allow_pickle, checkpoint,
        Measure(held, flips, longest, seed),
    )  # fmt: skip
    about: dict[str, Any] = {
        "format": FORMAT, "kind": "hardening", "model": model, "method": method.value,
        "defence": repr(defence), "data": data, "examples": len(tried), **settings,
        "device": device, "environment": environment(),
    }  # fmt: skip
    say(f"{model}: {method.value}, {len(tried)} examples, {epochs} epoch{'s'[: epochs > 1]}")
    with stoppable(checkpoint):
        done = course.run(seed, seeds, about)
    if page is not None:
        _write_page(page, model, done, held, seed)
    if as_json:
        typer.echo(dump(done.card))
    if done.after:
        people.print(report.hardening(done.before, done.after))
    say(f"{'model' if seeds == 1 else 'models'}: {out}")
    raise typer.Exit(CLEAN)


def _defence(
    method: MethodName, rate: float | None, mode: ModeName | None, weight: float | None
) -> Defence:
    from keyhole import harden

    weighed: dict[MethodName, Callable[..., Defence]] = {
        MethodName.ATTACK_MASKS: harden.AttackMasks, MethodName.STRONGEST: harden.Together.strongest
    }  # fmt: skip
    if weight is not None and method not in weighed:
        raise InputError(f"expected --weight with attack-masks or strongest, got {method.value}")
    if method is MethodName.SATTEND:
        return harden.SAttend(
            rate=0.2 if rate is None else rate, mode="unit" if mode is None else mode.value
        )
    for name, value in (("--rate", rate), ("--mode", mode)):
        if value is not None:
            raise InputError(f"expected {name} with --method sattend, got {method.value}")
    if method in weighed:
        return weighed[method]() if weight is None else weighed[method](weight=weight)
    others: dict[MethodName, type[Any]] = {
        MethodName.PLAIN: harden.Plain, MethodName.FREELB: harden.FreeLB,
        MethodName.SMART: harden.SMART, MethodName.R3F: harden.R3F, MethodName.ASA: harden.ASA,
    }  # fmt: skip
    return others[method]()


def _check(flips: int, seeds: int, page: Path | None, dev: str | None) -> None:
    for name, value in (("--flips", flips), ("--seeds", seeds)):
        if value < 1:
            raise InputError(f"expected {name} of 1 or more, got {value}")
    if page is not None and dev is None:
        raise InputError("expected --dev with --page, got none: the page shows what was measured")
    expect_folder(page)


def _writable(out: Path, model: str) -> None:
    """Said before hours of training, not after; nothing is made before there is a model."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]) and not (out / CARD).exists():
        raise InputError(f"expected a new folder, or one made by this command, got {out}")
    if out.exists() and Path(model).exists() and out.samefile(model):
        raise InputError(f"expected another folder than the model's own, got {out}")
    there = next(one for one in (out, *out.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"expected a folder to write, got {out}: nothing can be made in {there}")


def _read(
    model: str,
    data: str,
    text: list[str] | None,
    label: str,
    classes: list[str] | None,
    limit: int | None,
) -> list[Example]:
    from keyhole.data import read_examples
    from keyhole.models.loading import class_names, load_config

    names = classes or class_names(load_config(model_path(model)))
    return read_examples(data, text=text or (), label=label, names=names, limit=limit)


def _write_page(
    page: Path, model: str, done: Hardened, held: list[Example], seed: int
) -> None:  # fmt: skip
    """The audit's own page, with what was measured before and after."""
    from datetime import UTC, datetime

    from keyhole import report
    from keyhole.audit import Audit
    from keyhole.audit.hardened import findings
    from keyhole.files import write_text

    loaded, shown = done.loaded, done.named
    found = [one for name, result in shown.items() for one in findings(result, name, loaded, held)]
    seconds = sum(result.seconds for result in shown.values())
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_text(
        page, report.render(Audit(model, loaded.identity, tuple(found), (), seed, seconds, now))
    )
