"""Run `keyhole harden` as a function: measure, train with each seed, save, measure again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from keyhole.core import Result, environment
from keyhole.core.errors import (
    InputError,
    KeyholeError,
    expect_count,
    expect_number,
    expect_seed,
)
from keyhole.core.files import exists, expect_possible, is_folder, unwritable
from keyhole.core.journal import expect_same_run
from keyhole.core.machine import expect_device, largest_matrix, threads_for
from keyhole.core.progress import Progress, Track, untracked
from keyhole.data import Example, read_examples
from keyhole.disrupt import HackAttend
from keyhole.harden.defences import DEFENCES
from keyhole.harden.defences.combined import PlainFirst
from keyhole.harden.defences.defence import Defence
from keyhole.harden.defences.sattend import SAttend
from keyhole.harden.evaluate import Evaluation, evaluate, standard
from keyhole.harden.smoothing import Smoothing
from keyhole.harden.train import Training, train
from keyhole.models import Loaded, load_model
from keyhole.models.demo import folder_of
from keyhole.models.loading import (
    Task,
    class_names,
    expect_names,
    load_config,
    save,
    task_of,
)

MOST_CLASSES = 65_536  # of a new head, where each class has a name and a row of weights
CARD = "hardening.json"
_FLIPS = 50  # examples to attack by default
_BATCH_SIZE = 16  # of attacks; small, so that the progress bar moves


def run(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    method: str | Defence = "strongest",
    plain_first: float = 0.0,
    text: Sequence[str] = (),
    label: str = "label",
    classes: Sequence[str] = (),
    examples: int | None = None,
    epochs: int = 3,
    batch: int = 32,
    learning_rate: float = 2e-5,
    max_length: int = 128,
    amp: bool = False,
    dev: str | Path | None = None,
    flips: int | None = None,
    certify: bool = False,
    checkpoint: str | Path | None = None,
    device: str = "cpu",
    allow_pickle: bool = False,
    seed: int = 0,
    seeds: int = 1,
    force: bool = False,
    track: Track = untracked,
    **options: Any,
) -> Hardening:
    """Train a model against attacks on its attention, and measure whether it helped.

    `model` is a folder, a name on the hub or `demo`; a model without a head gets a new
    one. `data` is a file of labelled examples (`text`, `label`, `classes` and
    `examples` as in `disrupt.run`).

    `method` is a name of the registry with its hyperparameters as `options`, or your
    own defence. `plain_first` is the share of the steps before it in which the model is
    trained plainly.

    The trained model is saved in the folder `out`, or with several `seeds` in one
    folder for each inside it, with a card (hardening.json) that is updated after each
    part. A folder of another run, or of a finished one, is refused without `force`.
    `checkpoint` is a folder for the last epoch, from which an interrupted run
    continues.

    On the examples of the file `dev`, accuracy is measured before and after, and flips
    of the first `flips` (50 by default). `certify` also measures how many of those
    answers no cut of k units changes, if the model votes over the masks of its training
    with S-Attend (smoothing.py).
    """
    counts = {
        "--flips": flips,
        "--seeds": seeds,
        "--epochs": epochs,
        "batch": batch,
        "--max-length": max_length,
        "--examples": examples,
    }
    for option, value in counts.items():
        expect_count(option, value)
    for option, value in {"--flips": flips, "--certify": certify}.items():
        if value and dev is None:
            raise InputError(f"{option} needs --dev: nothing would be measured")
    expect_number("learning_rate", learning_rate, above=0)
    expect_seed(seed)
    expect_seed(seed + seeds - 1)
    expect_device(device)
    name = method if isinstance(method, str) else type(method).__name__
    method = DEFENCES.resolve(method, **options)
    smoothing = smoothing_of(method) if certify else None
    expect_number("plain_first", plain_first, least=0, below=1)
    if plain_first:
        method = PlainFirst(plain_first, method)
    expect_writable(Path(out), str(model))
    if checkpoint is not None:
        expect_folder(Path(checkpoint))
    config = load_config(folder_of(str(model)))
    expect_names(classes, config)
    names = list(classes) or class_names(config)
    read = partial(read_examples, text=text, label=label, names=names)
    chosen = read(data, limit=examples)
    held_out = [] if dev is None else read(dev)
    settings: dict[str, Any] = {
        "epochs": epochs,
        "rate": learning_rate,
        "batch": batch,
        "max_length": max_length,
        "amp": amp,
    }
    card = Hardening(
        str(model),
        name,
        repr(method),
        str(data),
        len(chosen),
        settings,
        device,
        seed=seed,
    )
    if not force:
        expect_unfinished(Path(out), card)
    course = _Course(
        card,
        chosen,
        held_out,
        flips or _FLIPS,
        method,
        Path(out),
        allow_pickle,
        None if checkpoint is None else Path(checkpoint),
        track,
        smoothing,
    )
    return course.run(range(seed, seed + seeds))


def smoothing_of(method: Defence) -> Smoothing:
    """Return the exact vote over the masks that a defence trains with."""
    if not (isinstance(method, SAttend) and method.mode == "unit" and method.emptied):
        raise InputError(
            "--certify needs a model that learns to answer under masks: give --method sattend "
            "-o emptied=true -o rate=0.95"
        )
    return Smoothing(round(1 - method.rate, 9), "partition")


def expect_writable(out: Path, model: str) -> None:
    """Raise if a model cannot be saved in this folder, before hours of training."""
    expect_folder(out)
    if out.exists() and any(out.iterdir()) and not (out / CARD).exists():
        raise InputError(
            f"choose a new folder, or one that this command made, not {out}"
        )
    if out.exists() and exists(model) and out.samefile(model):
        raise InputError(f"{out} is the model's own folder: choose another")


def expect_folder(folder: Path) -> None:
    """Raise if a folder is not writable and cannot be made."""
    expect_possible(folder)
    if exists(folder, links=True) and not is_folder(folder):
        raise InputError(f"{folder} is not a folder")
    places = (folder, *folder.absolute().parents)
    existing = next(place for place in places if exists(place))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"cannot make the folder {folder}: {existing} is not writable")


def expect_unfinished(out: Path, card: Hardening) -> None:
    """Raise if a folder holds a finished run or another run; the same run may continue."""
    if not (out / CARD).exists():
        return
    earlier = Hardening.load(out / CARD)
    if earlier.finished:
        raise InputError(
            f"{out} holds a trained model already: give --force to replace it"
        )
    fix = "choose another folder, or give --force to replace its contents"
    expect_same_run(out, _run_of(card), _run_of(earlier), fix)


def _run_of(card: Hardening) -> dict[str, Any]:
    names = ("model", "method", "defence", "data", "examples", "device", "seed")
    return {**{name: getattr(card, name) for name in names}, **card.settings}


@dataclass(frozen=True)
class _Course:
    """The training of a model with each seed, and the measurements before and after."""

    card: Hardening  # without results
    examples: list[Example]
    held_out: list[Example]
    flips: int
    defence: Defence
    out: Path
    allow_pickle: bool
    checkpoint: Path | None
    track: Track
    smoothing: Smoothing | None

    def run(self, seeds: Sequence[int]) -> Hardening:
        """Train, save and measure with each seed; write the card after each part."""
        loaded, has_head = self._loaded(seeds[0])
        measured = len(seeds) + has_head if self.held_out else 0
        overall = self.track("harden", len(seeds) + measured)
        done = itertools.count()
        overall(next(done))
        with threads_for(largest_matrix(loaded.model)):
            before: Evaluation | None = None
            if has_head and self.held_out:
                before = self._measured(loaded, "before")
                overall(next(done))
            card = replace(self.card, identity=loaded.identity, before=before)
            for seed in seeds:
                part = "" if len(seeds) == 1 else f"seed-{seed}"
                if seed != seeds[0]:
                    loaded, _ = self._loaded(seed)
                trained = Trained(seed, part or ".", self._trained(loaded, seed, part))
                overall(next(done))
                # Before the model is saved, so that an interrupted run can be started
                # again.
                self._write(replace(card, runs=(*card.runs, trained)))
                save(loaded, self.out / part)
                if self.held_out:
                    after = self._measured(loaded, f"after {part}".strip(), before)
                    trained = replace(trained, after=after)
                    overall(next(done))
                card = replace(card, runs=(*card.runs, trained))
                self._write(card)
        card = replace(card, finished=True)
        self._write(card)
        return card

    def _loaded(self, seed: int) -> tuple[Loaded, bool]:
        """Load the model and return whether it has a trained head; otherwise it gets a new one."""
        name = folder_of(self.card.model)
        task: Task = "choice" if self.examples[0].choices else "classification"
        has_head = task_of(name) == task
        count = max(example.label for example in self.examples) + 1
        if not has_head:
            expect_count("classes for a new head", count, most=MOST_CLASSES)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loaded = load_model(
                name,
                task=task,
                device=self.card.device,
                allow_pickle=self.allow_pickle,
                new_head=None if has_head else count,
            )
        classes = loaded.model.config.num_labels
        if task == "classification" and count > classes:
            raise InputError(
                f"labels must be from 0 to {classes - 1} for this model: the data has {count - 1}"
            )
        return loaded, has_head

    def _trained(
        self,
        loaded: Loaded,
        seed: int,
        part: str,
    ) -> Training:
        training = train(
            loaded.model,
            loaded.tokenizer,
            self.examples,
            self.defence,
            seed=seed,
            device=self.card.device,
            checkpoint=self.checkpoint and self.checkpoint / part,
            progress=self.track(f"training {part}".strip()),
            **self.card.settings,
        )
        loaded.model.requires_grad_(False)
        if training.reason:
            raise KeyholeError(training.reason)
        return training

    def _measured(
        self,
        loaded: Loaded,
        when: str,
        before: Evaluation | None = None,
    ) -> Evaluation:
        """Evaluate the model on the held-out examples.

        A trained model is also tried with masks that it has not influenced.
        """
        seed = self.card.seed
        attacks = standard(seed=seed)
        more: dict[str, Any] = {}
        if when != "before":
            more["wrong_label"] = HackAttend(attacks["stronger"].share, seed=seed)
        if before is not None and loaded.tokenizer.padding_side == "right":
            more["donors"] = {"the model before": before.disruptions["stronger"]}

        def track(name: str, total: int | None = None) -> Progress:
            return self.track(f"{when}: {name}", total)

        return evaluate(
            loaded.model,
            loaded.tokenizer,
            self.held_out,
            attacks=attacks,
            attacked=self.flips,
            seed=seed,
            batch_size=_BATCH_SIZE,
            max_length=self.card.settings["max_length"],
            track=track,
            smoothing=self.smoothing,
            **more,
        )

    def _write(self, card: Hardening) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.out, error) from error
        card.save(self.out / CARD)


@dataclass(frozen=True)
class Trained:
    """One seed's folder in the output, its training, and its evaluation, if it was measured."""

    seed: int
    folder: str
    training: Training
    after: Evaluation | None = None


@dataclass(frozen=True, repr=False)
class Hardening(Result):
    """The card of a run (hardening.json): settings, each seed's training, and the evaluations.

    `identity` and `before` are those of the model before training. The card is written
    after each part, and `finished` is True in the last version.
    """

    model: str
    method: str
    defence: str
    data: str
    examples: int
    settings: dict[str, Any]
    device: str
    seed: int = 0
    identity: str = ""
    before: Evaluation | None = None
    runs: tuple[Trained, ...] = ()
    finished: bool = False
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "hardening"

    @property
    def after(self) -> tuple[Evaluation, ...]:
        """The evaluations of the trained models."""
        return tuple(
            trained.after for trained in self.runs if trained.after is not None
        )

    def evaluations(self) -> dict[str, Evaluation]:
        """The evaluations by a description of the model."""
        found: dict[str, Evaluation] = {}
        if self.before is not None:
            found["the model before training"] = self.before
        for trained in self.runs:
            if trained.after is not None:
                name = f" {trained.folder}" if len(self.runs) > 1 else ""
                found[f"the model after training{name}"] = trained.after
        return found

    def summary(self) -> str:
        lines = [f"{self.model}: {self.method}, {self.examples} examples"]
        for trained in self.runs:
            seed = f"seed {trained.seed}: " if len(self.runs) > 1 else ""
            lines.append(f"{seed}{trained.training.summary()}")
        lines += [
            f"{name}: {found.summary()}" for name, found in self.evaluations().items()
        ]
        return "\n".join(lines)

    def contents(self) -> dict[str, Any]:
        runs = [
            {
                **vars(trained),
                "training": trained.training.contents(),
                "after": trained.after and trained.after.contents(),
            }
            for trained in self.runs
        ]
        before = self.before and self.before.contents()
        return {**vars(self), "before": before, "runs": runs}
