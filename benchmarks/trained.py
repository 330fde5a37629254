"""Options, training, attacks and table of the benchmarks that train a model and attack it.

A run is one model trained with one method and one seed. It records `what`, `method`,
`seed`, `settings`, `curve` (accuracy on the dev set after each epoch), `training`,
`attacks` (flips of right answers) and `answers`: for every right answer that was
attacked its margin, its number of tokens, the entropy of attention, and the result of
each attack. Runs can be made one by one; `--join FILE FILE …` makes one table of their
`--json` files.

Attacks (`--attacks`): `random`, `as-released` and `strongest` cut `--share` of each
head. `strongest-tenth` cuts a tenth of that share, of all units of the model, and still
shows differences where the others flip every answer. `program` is HackAttend's released
program, mask for mask, and `program-no-cut` its control, the same masks with no unit
cut; both need a model of BERT's kind. Methods of training (`--methods`, separated by
commas):

    plain  strongest  sattend:RATE  sattend-token:RATE
    freelb  smart  r3f  asa  creat  augmented  attack-masks, with settings: smart:radius=0.1:steps=2
    METHOD+METHOD
    plain>SHARE>METHOD  plain training, METHOD after that share of the steps
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import subjects
from keyhole import harden
from keyhole.data import Example, read_examples
from keyhole.disrupt import Attacker, HackAttend, ReleasedProgram
from keyhole.disrupt.batches import Batches
from keyhole.disrupt.tasks import ask
from keyhole.disrupt.units import Look, survey
from keyhole.harden import DEFENCES, Defence, Measured, Training
from keyhole.models import Loaded
from keyhole.models.masking import rewriting
from show import Row

Run = dict[str, Any]
ATTACKS: dict[str, Callable[..., Attacker]] = {
    "random": HackAttend.random,
    "as-released": HackAttend.as_released,
    "strongest": HackAttend.strongest,
    "strongest-tenth": lambda share, batch: HackAttend.strongest(
        share / 10, "model", batch=batch
    ),
    "program": ReleasedProgram,
    "program-no-cut": lambda share, batch: ReleasedProgram(
        share, units=False, batch=batch
    ),
}


@dataclass(frozen=True)
class Options:
    """The options of every benchmark that trains; None means all data, or the task's own setting.

    `right` is how many right answers are attacked, `queries` how many masked sequences
    of 128 tokens the model runs in one pass.
    """

    data: Path = subjects.DATA
    encoder: Path | None = None
    device: str = subjects.DEVICE
    methods: list[str] = field(default_factory=lambda: ["plain"])
    seeds: list[int] = field(default_factory=lambda: [0])
    examples: int | None = None
    epochs: int | None = None
    batch: int | None = None
    rate: float | None = None
    warmup: float = 0.1
    dev: int | None = None
    right: int = 200
    attacks: list[str] = field(default_factory=lambda: list(ATTACKS)[:4])
    share: float = 0.01
    queries: int = 192
    join: list[Path] = field(default_factory=list[Path])

    @property
    def trainings(self) -> list[tuple[str, int]]:
        """Every method with every seed."""
        for name in self.methods:
            defence(name)  # refuses unknown names before hours of training
        return [(name, seed) for name in self.methods for seed in self.seeds]

    def fresh(self, seed: int, task: str = "classification") -> Loaded:
        """Return MiniLM with a new head, drawn from the seed."""
        torch.manual_seed(seed)
        return subjects.minilm(self.encoder, self.device, task=task, new_head=2)

    def sst2(self) -> tuple[list[Example], list[Example]]:
        folder = self.data / "sst2"
        return read_examples(folder / "train.tsv"), read_examples(folder / "dev.tsv")


@dataclass(frozen=True)
class Tiny(Options):
    """For quick modes: a random model, and short texts in which one word decides the label."""

    device: str = "cpu"

    def fresh(self, seed: int, task: str = "classification") -> Loaded:
        del seed
        kind = "MultipleChoice" if task == "choice" else "SequenceClassification"
        return subjects.tiny("bert", head=f"AutoModelFor{kind}")

    def sst2(self) -> tuple[list[Example], list[Example]]:
        texts = [subjects.with_a_word(number) for number in range(140)]
        return texts[:100], texts[100:]


def expect_known(option: str, given: Sequence[str], known: Collection[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise SystemExit(
            f"--{option}: no {', '.join(unknown)}; choose from {', '.join(known)}"
        )


def defence(name: str) -> Defence:
    if name.startswith("plain>"):
        _, share, later = name.split(">")
        return harden.PlainFirst(float(share), defence(later))
    if "+" in name:
        return harden.Combined(tuple(defence(part) for part in name.split("+")))
    kind, *given = name.split(":")
    if kind in ("sattend", "sattend-token") and "=" not in name:
        mode = "token" if kind == "sattend-token" else "unit"
        return harden.SAttend(float(given[0]) if given else 0.2, mode)
    if kind not in DEFENCES or not all("=" in setting for setting in given):
        raise SystemExit(f"--methods: no {name}; see benchmarks/trained.py")
    pairs = [setting.split("=") for setting in given]
    return DEFENCES.make(kind, **{name: json.loads(value) for name, value in pairs})


@dataclass(frozen=True)
class Task:
    """The data that a model is trained on, and the settings unless options override them."""

    name: str
    train: Sequence[Example]
    dev: Sequence[Example]
    epochs: int
    batch: int
    rate: float
    max_length: int = 128

    def given(self, options: Options) -> Task:
        return replace(
            self,
            train=self.train[: options.examples],
            dev=self.dev[: options.dev],
            epochs=options.epochs or self.epochs,
            batch=options.batch or self.batch,
            rate=options.rate or self.rate,
        )

    def batches(
        self, loaded: Loaded, options: Options, examples: Sequence[Example]
    ) -> Batches:
        choices = max(1, len(examples[0].choices)) if examples else 1
        size = max(1, self.queries(options) // choices)
        return Batches(loaded.model, loaded.tokenizer, examples, size, self.max_length)

    def queries(self, options: Options) -> int:
        """Return the sequences per pass; the masks' memory grows with the square of the length."""
        return max(8, options.queries * 128**2 // max(128, self.max_length) ** 2)


def fit(
    loaded: Loaded,
    examples: Sequence[Example],
    method: str,
    device: str,
    **settings: Any,
) -> Training:
    """Train in place, with matrix products in TF32, which the attacks do not use."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return harden.train(
            loaded.model,
            loaded.tokenizer,
            examples,
            defence(method),
            device=device,
            amp=device.startswith("cuda"),
            **settings,
        )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def train(loaded: Loaded, task: Task, method: str, seed: int, options: Options) -> Run:
    """Train a model, and return its run so far, with the accuracy after each epoch."""
    curve: list[float] = []
    run: Run = {
        "what": task.name,
        "method": method,
        "seed": seed,
        "curve": curve,
        "attacks": {},
    }
    settings = {
        "epochs": task.epochs,
        "rate": task.rate,
        "batch": task.batch,
        "warmup": options.warmup,
        "max_length": task.max_length,
    }
    run["settings"] = {"examples": len(task.train), **settings, "share": options.share}
    batches = task.batches(loaded, options, task.dev)
    steps = -(-len(task.train) // task.batch)

    def progress(done: int, total: int | None = None, note: str = "") -> None:
        if done % steps == 0:  # an epoch ends
            loaded.model.eval()
            curve.append(batches.accuracy())
            loaded.model.train()
            log(f"{title(run)}: {curve[-1]:.1%} after {done} of {total}: {note}")

    done = fit(
        loaded,
        task.train,
        method,
        options.device,
        **settings,
        seed=seed,
        pool=16,
        progress=progress,
    )
    loaded.model.requires_grad_(False)  # attacks differentiate only by attention
    run["training"] = done.to_dict()
    return run


def attack(loaded: Loaded, task: Task, run: Run, options: Options) -> Row:
    """Attack the first right answers, and record each of them."""
    right = right_answers(task.batches(loaded, options, task.dev))
    run["accuracy"], run["dev"] = len(right) / len(task.dev), len(task.dev)
    batches = task.batches(loaded, options, right[: options.right])
    answers = {answer["id"]: answer for answer in described(batches)}
    run["answers"] = list(answers.values())
    for name in options.attacks:
        started = time.perf_counter()
        found = batches.attack(
            ATTACKS[name](options.share, batch=task.queries(options))
        )
        seconds = time.perf_counter() - started
        run["attacks"][name] = asdict(
            Measured(
                len(found.attacked), found.flips, found.queries, seconds, found.share
            )
        )
        for outcome in found.attacked:
            answers[outcome.id]["flipped"][name] = outcome.flipped
            answers[outcome.id]["cut"][name] = outcome.share
            answers[outcome.id]["of_attacked_heads"][name] = outcome.perturbation
        log(f"{title(run)}: {name} {found.success:.1%} in {seconds:.0f} s")
    return row(run)


def right_answers(batches: Batches) -> list[Example]:
    """Return the examples that the model answers rightly, in order."""
    right: set[str] = set()
    for part, batch, labels in batches:
        hits = (batches.predicted(batch) == labels).tolist()
        right |= {example.id for example, hit in zip(part, hits, strict=True) if hit}
    return [example for example in batches.examples if example.id in right]


def described(batches: Batches) -> Iterator[dict[str, Any]]:
    """Yield margin, tokens and entropy of attention of each example, over all its choices."""
    for part, batch, labels in batches:
        question = ask(batches.model, batch, labels)
        units = survey(batches.model, question, spare="padding")
        look = Look()
        with torch.no_grad(), rewriting(batches.model, look):
            margins = question.margin(question.logits(batches.model))
        entropies = [
            entropy(a.unflatten(0, (question.size, -1)), units.at(units.exists, place))
            for (_, a), place in zip(look.maps, units.places, strict=True)
        ]
        lengths = question.inputs["attention_mask"].flatten(1).sum(1)
        each = zip(
            part,
            margins.tolist(),
            lengths.tolist(),
            torch.stack(entropies).mean(0).tolist(),
            strict=True,
        )
        for example, margin, length, nats in each:
            yield {
                "id": example.id,
                "margin": margin,
                "tokens": length,
                "entropy": nats,
                "flipped": {},
                "cut": {},
                "of_attacked_heads": {},
            }


def entropy(a: Tensor, exists: Tensor) -> Tensor:
    """Return the mean entropy (b,) in nats of maps (b, rows, heads, q, k) over real queries."""
    each = torch.special.entr(a.double().masked_fill(~exists, 0)).sum(-1)
    real = exists.any(-1)
    return (each * real).flatten(1).sum(1) / real.flatten(1).sum(1)


def title(run: Run) -> str:
    return f"{run['what']}, {run['method']}, seed {run['seed']}"


def row(run: Run) -> Row:
    answers = run.get("answers", [])
    cut = {
        name: mean(answer["of_attacked_heads"][name] for answer in answers)
        if answers
        else 0.0
        for name in run["attacks"]
    }
    flips = "; ".join(
        f"{name} {found['flips']} of {found['examples']}, {cut[name]:.1%} of attacked heads cut "
        f"({found['seconds']:.0f} s)"
        for name, found in run["attacks"].items()
    )
    curve = ", ".join(f"{value:.1%}" for value in run["curve"])
    trained = run["training"]
    details = (
        f"{flips}; by epoch {curve}; {trained['steps']} steps in {trained['seconds']:.0f} s "
        f"{trained['reason']}"
    )
    return Row(title(run), f"clean {run['curve'][-1]:.1%}", details=details, run=run)


def table(runs: Sequence[Run]) -> Iterator[Row]:
    """Yield each joined run, then a row for each task, method and training, over its seeds."""
    yield from kept(runs)

    def kind(run: Run) -> str:
        rate = run["settings"]["rate"]
        epochs = run["settings"]["epochs"]
        return f"{run['what']}, {run['method']}, rate {rate:g}, {epochs} epochs"

    def rates(own: list[Run], name: str) -> list[float]:
        found = [run["attacks"][name] for run in own if name in run["attacks"]]
        return [each["flips"] / max(1, each["examples"]) for each in found]

    for name in dict.fromkeys(map(kind, runs)):
        own = [run for run in runs if kind(run) == name]
        shown = [
            f"{attack} {spread(rates(own, attack))}"
            for attack in ATTACKS
            if rates(own, attack)
        ]
        numbers = ", ".join(dict.fromkeys(str(run["seed"]) for run in own))
        attacked = sum(
            max((found["examples"] for found in run["attacks"].values()), default=0)
            for run in own
        )
        shown.append(f"{attacked} right answers; seeds {numbers}")
        shown.append(f"best epoch {spread([max(run['curve']) for run in own])}")
        seconds, peak = (
            mean(run["training"][each] for run in own) for each in ("seconds", "peak")
        )
        shown.append(f"trained in {seconds:.0f} s, {peak / 2**20:.0f} MiB")
        clean = spread([run["curve"][-1] for run in own])
        yield Row(name, f"clean {clean}", details="; ".join([*shown, *settings(own)]))


def spread(found: Sequence[float]) -> str:
    if not found:
        return "not measured"
    low = min(found)
    high = max(found)
    return f"{mean(found):.1%}" + (f" ({low:.1%}–{high:.1%})" if low < high else "")


def settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings of the runs, and whether they differ."""
    known = (run.get("settings", {}) for run in runs)
    lines = [
        ", ".join(f"{name} {value}" for name, value in given.items()) for given in known
    ]
    ways = [line for line in dict.fromkeys(lines) if line]
    return ways if len(ways) < 2 else ["settings differ: " + " | ".join(ways)]


def joined(files: Sequence[Path]) -> list[Run]:
    """Read the runs of `--json` files, each with its commit and machine, or plain lists of runs."""
    runs: list[Run] = []
    for file in files:
        data = json.loads(file.read_text("utf-8"))
        data = {"runs": data} if isinstance(data, list) else data
        made = {name: data[name] for name in ("commit", "machine") if name in data}
        runs += [made | run for run in data["runs"]]
    return runs


def kept(runs: Sequence[Run]) -> Iterator[Row]:
    """Yield a row for each joined run, so that the new record contains it."""
    for run in runs:
        if "commit" in run:
            name = ", ".join(
                str(run[key]) for key in ("what", "method", "ranking") if key in run
            )
            yield Row(f"{name}, seed {run['seed']}", "joined", run=run)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
