"""What `keyhole harden` does, step by step: measure, train with each seed, save, measure again."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from keyhole.cli.app import FAILURE, INTERRUPTED, model_path
from keyhole.cli.console import progress, say
from keyhole.errors import InputError

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.cli.console import Show
    from keyhole.data import Example
    from keyhole.harden import Defence, Evaluation, Training
    from keyhole.models import Loaded

CARD = "hardening.json"
_TOGETHER = 16  # examples that are attacked at once: few, so that the bar moves


@dataclass(frozen=True)
class Measure:
    """Accuracy over all held examples; every kind of mask on the first few."""

    held: list[Example]
    flips: int
    longest: int
    seed: int

    def __call__(
        self, loaded: Loaded, when: str, before: Evaluation | None = None
    ) -> Evaluation | None:
        """Once trained, also with masks that the model did not help to choose."""
        from keyhole.disrupt import HackAttend
        from keyhole.harden import evaluate, standard

        if not self.held:
            return None
        attacks = standard(seed=self.seed)
        more: dict[str, Any] = {}
        if when != "before":
            more["wrong_label"] = HackAttend(attacks["stronger"].share, seed=self.seed)
        if before is not None and loaded.tokenizer.padding_side == "right":
            more["donors"] = {"the model before": before.found["stronger"]}
        bars: dict[str, Show] = {}
        with progress("examples") as track:

            def watch(part: str, done: int, total: int) -> None:
                if part not in bars:
                    bars[part] = track(f"{when}: {part}", total)
                bars[part](done)

            return evaluate(
                loaded.model, self.held, loaded.tokenizer, attacks=attacks, attacked=self.flips,
                seed=self.seed, together=_TOGETHER, longest=self.longest, progress=watch, **more,
            )  # fmt: skip


@dataclass(frozen=True)
class Hardened:
    """The card, the last model, and what was measured: nothing where there was nothing held."""

    card: dict[str, Any]
    loaded: Loaded
    before: Evaluation | None
    after: tuple[Evaluation, ...]

    @property
    def named(self) -> dict[str, Evaluation]:
        """The evaluations by what people call the models."""
        parts = [f" {run['folder']}" if len(self.after) > 1 else "" for run in self.card["runs"]]
        found = {} if self.before is None else {"the model before training": self.before}
        later = zip(parts, self.after, strict=False)
        return found | {f"the model after training{part}": one for part, one in later}


@dataclass(frozen=True)
class Course:
    """One model's training, with as many seeds as wanted."""

    model: str
    examples: list[Example]
    defence: Defence
    settings: dict[str, Any]
    out: Path
    device: str
    allow_pickle: bool
    checkpoint: Path | None
    measure: Measure

    def run(self, seed: int, seeds: int, about: dict[str, Any]) -> Hardened:
        """Train, save and measure; the card is written as it grows."""
        from keyhole.models.loading import save

        loaded, trained = self._loaded(seed)
        before = self.measure(loaded, "before") if trained else None
        after: list[Evaluation] = []
        card = {**about, "identity": loaded.identity, "before": before and before.to_dict()}
        card["runs"] = runs = list[dict[str, Any]]()
        for number in range(seed, seed + seeds):
            part = "" if seeds == 1 else f"seed-{number}"
            if runs:
                loaded, _ = self._loaded(number)
            done = self._trained(loaded, number, part)
            runs.append({"seed": number, "folder": part or ".", "training": asdict(done)})
            _write_card(self.out, card)  # first: whoever is stopped from here on may come again
            save(loaded, self.out / part)
            found = self.measure(loaded, f"after {part}".strip(), before)
            runs[-1]["after"] = found and found.to_dict()
            _write_card(self.out, card)
            after += [] if found is None else [found]
        return Hardened(card, loaded, before, tuple(after))

    def _loaded(self, seed: int) -> tuple[Loaded, bool]:
        """The model, and whether its head was trained before: one that has none gets a new one."""
        import torch

        from keyhole.models.loading import load_model, task_of

        examples = self.examples
        name = model_path(self.model)
        task = "choice" if examples[0].choices else "classification"
        trained = task_of(name) == task
        count = max(example.label for example in examples) + 1
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            loaded = load_model(
                name, task=task, device=self.device, allow_pickle=self.allow_pickle,
                new_head=None if trained else count,
            )  # fmt: skip
        classes = loaded.model.config.num_labels
        if task == "classification" and count > classes:
            raise InputError(f"expected labels from 0 to {classes - 1}, got {count - 1}")
        return loaded, trained

    def _trained(self, loaded: Loaded, seed: int, part: str) -> Training:
        from keyhole.harden import Progress, train

        with progress("steps") as track:
            show = track("training", None)

            def watch(now: Progress) -> None:
                show(now.step, now.steps, f"epoch {now.epoch + 1}, loss {now.loss:.3f}")

            done = train(
                loaded.model, loaded.tokenizer, self.examples, self.defence, seed=seed,
                device=self.device, checkpoint=self.checkpoint and self.checkpoint / part,
                watch=watch, **self.settings,
            )  # fmt: skip
        loaded.model.requires_grad_(False)
        if done.reason:
            say(f"keyhole: {done.reason}", style="bold red")
            raise typer.Exit(FAILURE)
        resumed = f", {done.resumed} epochs of them earlier" if done.resumed else ""
        say(f"{done.steps} steps in {done.seconds:.1f} s{resumed}; loss {done.losses[-1]:.3f}")
        return done


def _write_card(out: Path, result: dict[str, Any]) -> None:
    from keyhole.files import write_text
    from keyhole.results import dump

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"expected a folder to write, got {out}: {error.strerror}") from error
    write_text(out / CARD, dump(result))


@contextmanager
def stoppable(checkpoint: Path | None) -> Generator[None]:
    """Ctrl-C is one line, which says what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        whole = checkpoint is not None and any(checkpoint.rglob("epoch-*[0-9]"))
        kept = f"; whole epochs are in {checkpoint}: the same command goes on" if whole else ""
        say(f"keyhole: stopped{kept}", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
