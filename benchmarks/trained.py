"""What benchmarks that train a model and then attack it share: curve, attacks, answers, table.

A run is what one model (a task's, a family's) trained with one method and one seed gave: `what`,
`method`, `seed`, `settings`, `curve` (accuracy on the dev set after each epoch), `training`,
`attacks` (flips of right answers), and `answers`: for every right answer that was attacked its
margin, its number of tokens, the entropy of attention, and what each attack did to it. One process
may do one run, many beside each other; `--join FILE FILE …` makes the table of what they wrote.

Attacks: `random`, `as-released` and `strongest` cut `--share` of each head, `strongest-tenth` a
tenth of that share, of all units of the model: where every answer flips, it still tells them apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import methods
import seeds
import subjects
from keyhole import harden
from keyhole.data import Example
from keyhole.disrupt import Disruption, HackAttend
from keyhole.disrupt.batches import Batches
from keyhole.disrupt.tasks import ask
from keyhole.disrupt.units import Look, survey
from keyhole.harden import Measured
from keyhole.models.masking import rewriting
from seeds import spread, tell
from show import Row

_USUAL = 128  # tokens of a text, for which --queries is meant
RUNS: list[dict[str, Any]] = []
ATTACKS = ("random", "as-released", "strongest", "strongest-tenth")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, default=subjects.ROOT.parent / "shared" / "data")
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", default="plain")
    parser.add_argument("--seeds", type=subjects.listed, default=[0])
    parser.add_argument("--examples", type=int, help="to train on; all by default")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--warmup", type=float, default=0.1)
    parser.add_argument("--dev", type=int, help="examples of the dev set; all by default")
    parser.add_argument("--right", type=int, default=200, help="right answers that are attacked")
    parser.add_argument("--attacks", type=subjects.some_of(ATTACKS), default=ATTACKS)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument(
        "--queries", type=int, default=192, help="masked sequences of 128 tokens in one pass"
    )
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    return parser


def chosen(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what show.main reads itself."""
    given, rest = parser.parse_known_args()
    rest += ["--json", str(given.json)] if given.json else []
    return given, [*rest, "--quick"] if given.quick else rest


def attack(name: str, share: float, queries: int) -> HackAttend:
    match name:
        case "random":
            return HackAttend.random(share, batch=queries)
        case "as-released":
            return HackAttend.as_released(share, batch=queries)
        case "strongest":
            return HackAttend.strongest(share, batch=queries)
        case _:
            return HackAttend.strongest(share / 10, "model", batch=queries)


class Curve:
    """Told of every training step: the accuracy on the dev set at the end of each epoch."""

    def __init__(self, batches: Batches, steps: int, known: dict[str, Any]) -> None:
        self.batches, self.steps, self.known = batches, steps, known
        known["curve"] = []

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        if done % self.steps:
            return
        self.batches.model.eval()
        self.known["curve"].append(self.batches.accuracy())
        self.batches.model.train()
        tell(f"{title(self.known)}: {self.known['curve'][-1]:.1%} after {done} of {total}: {note}")


def title(known: dict[str, Any]) -> str:
    return f"{known['what']}, {known['method']}, seed {known['seed']}"


class Trained:
    """One model, trained in place with one method and one seed, and all that is asked of it."""

    def __init__(
        self, given: argparse.Namespace, what: str, model: Any, words: subjects.Texts, *,
        method: str, seed: int, train: Sequence[Example], dev: Sequence[Example],
        epochs: int, batch: int, rate: float, longest: int,
    ) -> None:  # fmt: skip
        self.given, self.model, self.words, self.longest = given, model, words, longest
        self.device, self.dev = torch.device(given.device), list(dev)
        settings = {"examples": len(train), "epochs": epochs, "batch": batch, "rate": rate,
                    "warmup": given.warmup, "longest": longest, "share": given.share}  # fmt: skip
        self.known: dict[str, Any] = {
            "what": what, "method": method, "seed": seed, "settings": settings, "attacks": {},
        }  # fmt: skip
        RUNS.append(self.known)
        self._fit(train, settings)

    def _fit(self, train: Sequence[Example], settings: dict[str, Any]) -> None:
        steps = -(-settings["examples"] // settings["batch"])
        cuda = self.device.type == "cuda"
        # Matrix products round to fewer digits while it trains, not while it is attacked.
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            done = harden.train(
                self.model, self.words, train, methods.defence(self.known["method"]),
                epochs=settings["epochs"], rate=settings["rate"], batch=settings["batch"],
                warmup=settings["warmup"], seed=self.known["seed"], device=self.device, amp=cuda,
                max_length=self.longest, pool=16,
                progress=Curve(self._batches(), steps, self.known),
            )  # fmt: skip
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        self.model.requires_grad_(False)  # attacks differentiate by attention alone
        self.known["training"] = done.to_dict()
        self.keep()

    def _batches(self, examples: Sequence[Example] | None = None) -> Batches:
        examples = self.dev if examples is None else examples
        rows = max(1, len(examples[0].choices)) if examples else 1
        together = max(1, self._queries() // rows)
        return Batches(self.model, self.words, examples, together, self.longest)

    def _queries(self) -> int:
        """Sequences at a time: masks are what takes memory, and grow with the square of a text."""
        return max(8, self.given.queries * _USUAL**2 // max(_USUAL, self.longest) ** 2)

    def keep(self) -> None:
        seeds.keep_runs(self.given.json, RUNS)

    def right(self) -> list[Example]:
        """The first examples that the model gets right."""
        right = right_answers(self._batches())
        self.known["accuracy"], self.known["dev"] = len(right) / len(self.dev), len(self.dev)
        return right[: self.given.right]

    def run(self) -> Iterator[Row]:
        """Attack the right answers, and describe each of them."""
        right = self.right()
        answers = {answer["id"]: answer for answer in described(self._batches(right))}
        self.known["answers"] = list(answers.values())
        for name in self.given.attacks:
            started = time.perf_counter()
            method = attack(name, self.given.share, self._queries())
            disruption = self._batches(right).attack(method)
            seconds = time.perf_counter() - started
            self.known["attacks"][name] = asdict(measured(disruption, seconds))
            for outcome in disruption.attacked:
                answers[outcome.id]["flipped"][name] = outcome.flipped
                answers[outcome.id]["cut"][name] = outcome.share
            self.keep()
            tell(f"{title(self.known)}: {name} {disruption.success:.1%} in {seconds:.0f} s")
        yield row(self.known)


def right_answers(batches: Batches) -> list[Example]:
    """The examples that the model gets right, in their order."""
    right: set[str] = set()
    for part, batch, labels in batches:
        hits = (batches.predicted(batch) == labels).tolist()
        right |= {example.id for example, hit in zip(part, hits, strict=True) if hit}
    return [example for example in batches.examples if example.id in right]


def measured(disruption: Disruption, seconds: float) -> Measured:
    return Measured(
        len(disruption.attacked), disruption.flips, disruption.queries, seconds, disruption.share
    )


def described(batches: Batches) -> Iterator[dict[str, Any]]:
    """Margin, tokens and entropy of attention of each example; of all choices together."""
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
            part, margins.tolist(), lengths.tolist(), torch.stack(entropies).mean(0).tolist(),
            strict=True,
        )  # fmt: skip
        for example, margin, length, spread_out in each:
            yield {"id": example.id, "margin": margin, "tokens": length, "entropy": spread_out,
                   "flipped": {}, "cut": {}}  # fmt: skip


def entropy(a: Tensor, exists: Tensor) -> Tensor:
    """Of maps (b, rows, heads, q, k), in nats: the mean over heads and real queries, (b,)."""
    each = torch.special.entr(a.double().masked_fill(~exists, 0)).sum(-1)
    real = exists.any(-1)
    return (each * real).flatten(1).sum(1) / real.flatten(1).sum(1)


def row(known: dict[str, Any]) -> Row:
    flips = "; ".join(
        f"{name} {found['flips']} of {found['examples']} ({found['seconds']:.0f} s)"
        for name, found in known["attacks"].items()
    )
    curve = ", ".join(f"{value:.1%}" for value in known["curve"])
    trained = known["training"]
    details = (
        f"{flips}; by epoch {curve}; {trained['steps']} steps in {trained['seconds']:.0f} s "
        f"{trained['reason']}"
    )
    return Row(title(known), f"clean {known['curve'][-1]:.1%}", details=details)


def joined(given: argparse.Namespace) -> None:
    """The runs of `--join`, without those that ended before an epoch did."""
    RUNS.extend(run for run in seeds.read_runs(given.join, needed="training") if run["curve"])


def table() -> list[Row]:
    """One row for each model, method and way of training: mean and range over seeds."""

    def kind(run: dict[str, Any]) -> str:
        rate, epochs = run["settings"]["rate"], run["settings"]["epochs"]
        return f"{run['what']}, {run['method']}, rate {rate:g}, {epochs} epochs"

    rows: list[Row] = []
    for name in dict.fromkeys(map(kind, RUNS)):
        own = [run for run in RUNS if kind(run) == name]
        shown = [
            f"{attack} {spread(rates(own, attack))}" for attack in ATTACKS if rates(own, attack)
        ]
        numbers = ", ".join(dict.fromkeys(str(run["seed"]) for run in own))
        shown.append(f"{sum(map(_attacked, own))} right answers; seeds {numbers}")
        shown.append(f"best epoch {spread([max(run['curve']) for run in own])}")
        shown += seeds.settings(own)
        clean = spread([run["curve"][-1] for run in own])
        rows.append(Row(name, f"clean {clean}", details="; ".join(shown)))
    return rows


def _attacked(run: dict[str, Any]) -> int:
    return max((found["examples"] for found in run["attacks"].values()), default=0)


def rates(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    found = [run["attacks"][name] for run in runs if name in run["attacks"]]
    return [each["flips"] / max(1, each["examples"]) for each in found]
