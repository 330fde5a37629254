"""`keyhole harden`: parse, one library call, print."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.frame import (
    CLEAN,
    FAILURE,
    INTERRUPTED,
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
    model_path,
)
from keyhole.console import progress, say
from keyhole.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.data import Example
    from keyhole.harden import Defence, Training
    from keyhole.models import Loaded


class MethodName(StrEnum):
    PLAIN = "plain"
    SATTEND = "sattend"
    FREELB = "freelb"
    SMART = "smart"
    R3F = "r3f"
    ASA = "asa"
    ATTACK_MASKS = "attack-masks"


class ModeName(StrEnum):
    UNIT = "unit"
    TOKEN = "token"  # noqa: S105 - a token of text


_CARD = "hardening.json"
_TOGETHER = 16  # examples that are attacked at once: few, so that the bar moves


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole harden ./my-classifier --data train.tsv --method attack-masks --epochs 1 "
    "--dev dev.tsv --out hardened\n"
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
    method: Annotated[MethodName, typer.Option(help="How to train.")] = MethodName.SATTEND,
    rate: Annotated[
        float | None, typer.Option(help="Share of attention to drop (sattend): 0.2.")
    ] = None,
    mode: Annotated[
        ModeName | None, typer.Option(help="Drop single units or whole tokens (sattend): unit.")
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
    flips: Annotated[int, typer.Option(help="How many of its answers to try to flip.")] = 50,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep each epoch there; the same command goes on."),
    ] = None,
    device: Device = "cpu",
    allow_pickle: AllowPickle = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a model against the attack on attention, and measure whether it helped."""
    from keyhole.models.loading import save
    from keyhole.results import FORMAT, dump, environment

    defence = _defence(method, rate, mode)
    _writable(out, model)
    if flips < 1:
        raise InputError(f"expected --flips of 1 or more, got {flips}")
    names = classes.split(",") if classes else None
    tried = _read(model, data, text, label, names, examples)
    held = [] if dev is None else _read(model, dev, text, label, names, None)
    settings: dict[str, Any] = {
        "epochs": epochs, "rate": learning_rate, "batch": batch, "seed": seed, "longest": longest,
        "amp": amp,
    }  # fmt: skip
    with _stoppable(checkpoint):
        loaded, trained = _loaded(model, tried, device, allow_pickle, seed)
        say(f"{model}: {method.value}, {len(tried)} examples, {epochs} epochs")
        before = _measured(loaded, held, flips, longest, seed, "before") if trained else None
        done = _trained(loaded, tried, defence, settings, device, checkpoint)
        loaded.model.requires_grad_(False)
        if done.reason:
            say(f"keyhole: {done.reason}", style="bold red")
            raise typer.Exit(FAILURE)
        result: dict[str, Any] = {
            "format": FORMAT, "kind": "hardening", "model": model, "identity": loaded.identity,
            "method": method.value, "defence": repr(defence), "data": data, "examples": len(tried),
            **settings, "device": device, "training": asdict(done), "before": before,
            "after": None, "environment": environment(),
        }  # fmt: skip
        _write_card(out, result)  # first: whoever is stopped from here on may come again
        save(loaded, out)
        result["after"] = _measured(loaded, held, flips, longest, seed, "after")
        _write_card(out, result)
    if as_json:
        typer.echo(dump(result))
    say(_summary(done, before, result["after"], out))
    raise typer.Exit(CLEAN)


def _defence(method: MethodName, rate: float | None, mode: ModeName | None) -> Defence:
    from keyhole import harden

    if method is MethodName.SATTEND:
        return harden.SAttend(
            rate=0.2 if rate is None else rate, mode="unit" if mode is None else mode.value
        )
    for name, value in (("--rate", rate), ("--mode", mode)):
        if value is not None:
            raise InputError(f"expected {name} with --method sattend, got {method.value}")
    others: dict[MethodName, type[Any]] = {
        MethodName.PLAIN: harden.Plain, MethodName.FREELB: harden.FreeLB,
        MethodName.SMART: harden.SMART, MethodName.R3F: harden.R3F, MethodName.ASA: harden.ASA,
        MethodName.ATTACK_MASKS: harden.AttackMasks,
    }  # fmt: skip
    return others[method]()


def _writable(out: Path, model: str) -> None:
    """Said before hours of training, not after; nothing is made before there is a model."""
    if (
        out.exists()
        and any(out.iterdir() if out.is_dir() else [out])
        and not (out / _CARD).exists()
    ):
        raise InputError(f"expected a new folder, or one made by this command, got {out}")
    if out.exists() and Path(model).exists() and out.samefile(model):
        raise InputError(f"expected another folder than the model's own, got {out}")
    there = next(one for one in (out, *out.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InputError(f"expected a folder to write, got {out}: nothing can be made in {there}")


def _write_card(out: Path, result: dict[str, Any]) -> None:
    from keyhole.files import write_text
    from keyhole.results import dump

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"expected a folder to write, got {out}: {error.strerror}") from error
    write_text(out / _CARD, dump(result))


@contextmanager
def _stoppable(checkpoint: Path | None) -> Generator[None]:
    """Ctrl-C is one line, which says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        whole = checkpoint is not None and any(checkpoint.glob("epoch-*[0-9]"))
        kept = f"; whole epochs are in {checkpoint}: the same command goes on" if whole else ""
        say(f"keyhole: stopped{kept}", style="yellow")
        raise typer.Exit(INTERRUPTED) from None


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


def _loaded(
    model: str, examples: list[Example], device: str, allow_pickle: bool, seed: int
) -> tuple[Loaded, bool]:
    """The model, and whether its head was trained before: one that has none gets a new one."""
    import torch

    from keyhole.models.loading import load_model, task_of

    name, task = model_path(model), "choice" if examples[0].choices else "classification"
    trained = task_of(name) == task
    count = max(example.label for example in examples) + 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        loaded = load_model(
            name, task=task, device=device, allow_pickle=allow_pickle,
            new_head=None if trained else count,
        )  # fmt: skip
    classes = loaded.model.config.num_labels
    if task == "classification" and count > classes:
        raise InputError(f"expected labels from 0 to {classes - 1}, got {count - 1}")
    return loaded, trained


def _measured(
    loaded: Loaded, held: list[Example], flips: int, longest: int, seed: int, when: str
) -> dict[str, Any] | None:
    """Accuracy over all held examples; flips of the stronger attack among the first few."""
    from keyhole.disrupt import HackAttend
    from keyhole.harden import evaluate

    if not held:
        return None
    method = HackAttend.strongest(seed=seed)
    with progress("examples") as track:
        bars = {"clean": track(f"{when}: clean", None), "flips": track(f"{when}: flips", None)}
        found = evaluate(
            loaded.model, held, loaded.tokenizer, attacks={"flips": method}, attacked=flips,
            together=_TOGETHER, longest=longest,
            progress=lambda part, done, total: bars[part](done, total),
        )  # fmt: skip
    flipped = found.attacks["flips"]
    figures: dict[str, Any] = {
        "accuracy": found.accuracy, "examples": found.examples, "success": flipped.success,
        "attacked": flipped.examples, "share": method.share,
    }  # fmt: skip
    say(f"{when}: {_line(figures)}")
    return figures


def _line(found: dict[str, Any]) -> str:
    return (
        f"accuracy {found['accuracy']:.1%} of {found['examples']}; {found['success']:.1%} of "
        f"{found['attacked']} right answers flip at {found['share']:.0%} of each head"
    )


def _trained(
    loaded: Loaded,
    examples: list[Example],
    defence: Defence,
    settings: dict[str, Any],
    device: str,
    checkpoint: Path | None,
) -> Training:
    from keyhole.harden import Progress, train

    with progress("steps") as track:
        show = track("training", None)

        def watch(now: Progress) -> None:
            show(now.step, now.steps, f"epoch {now.epoch + 1}, loss {now.loss:.3f}")

        return train(
            loaded.model, loaded.tokenizer, examples, defence, device=device,
            checkpoint=checkpoint, watch=watch, **settings,
        )  # fmt: skip


def _summary(
    done: Training, before: dict[str, Any] | None, after: dict[str, Any] | None, out: Path
) -> str:
    resumed = f", {done.resumed} epochs of them earlier" if done.resumed else ""
    lines = [f"{done.steps} steps in {done.seconds:.1f} s{resumed}; loss {done.losses[-1]:.3f}"]
    if before is not None and after is not None:
        lines.append(
            f"accuracy {before['accuracy']:.1%} → {after['accuracy']:.1%}; "
            f"flips {before['success']:.1%} → {after['success']:.1%}"
        )
    return "\n".join([*lines, f"model: {out}"])
