"""Attacks and defences by task: HellaSwag, DREAM, pairs and SST-2. It needs a GPU.

MiniLM (`--encoder`) is trained on all of each task's data with each method and seed;
then the first `--right` right answers are attacked (trained.py). `pairs` is made from
HellaSwag: does this ending belong to this context? Each context occurs once with its
own ending and once with that of another context of the same activity ("Preparing pasta:
…"), so that neither alone predicts the label.

`--parts factors` analyses the runs, its own or those of `--join FILE …`. For each
attack that flips some answers and not others, it reports the share that flipped in each
quarter of the answers by margin, number of tokens or entropy of attention, and how
often a flipped answer has a larger value than one that did not flip (ties count half;
at 50% the factor predicts nothing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

import show
import subjects
import trained
from keyhole.data import Example, read_examples
from show import Row
from trained import Options, Run, Task, Tiny

PARTS = ("attacks", "factors")
# Folder, file extension, head, and the training: epochs, batch size, rate, max_length.
TASKS = {
    "hellaswag": ("hellaswag", "jsonl", "choice", 5, 32, 5e-5, 160),
    "dream": ("dream", "json", "choice", 6, 32, 5e-5, 256),
    "pairs": ("hellaswag", "jsonl", "classification", 5, 64, 5e-5, 160),
    "sst2": ("sst2", "tsv", "classification", 2, 128, 1e-4, 128),
}
FACTORS = ("margin", "tokens", "entropy")
OUTCOMES = ("strongest", "strongest-tenth", "as-released")


def run(
    quick: bool,
    options: Options = Options(methods=["plain", "sattend:0.2", "strongest"]),  # noqa: B008
    tasks: list[str] = list(TASKS),  # noqa: B006 - read, never changed
    parts: list[str] = list(PARTS),  # noqa: B006
) -> Iterator[Row]:
    trained.expect_known("tasks", tasks, TASKS)
    trained.expect_known("parts", parts, PARTS)
    trained.expect_known("attacks", options.attacks, trained.ATTACKS)
    if quick:
        tasks = ["hellaswag", "pairs"]
        parts = list(PARTS)
        attacks = ["random", "strongest", "program-no-cut"]
        options = Tiny(epochs=2, batch=8, right=4, share=0.05, attacks=attacks)
    runs = trained.joined(options.join)
    if options.join:
        yield from trained.table(runs)
    else:
        for name in tasks if "attacks" in parts else ():
            for row in of_task(name, quick, options):
                runs += [row.run] if row.run else []
                yield row
    if "factors" in parts:
        yield from by_factor(runs)


def of_task(name: str, quick: bool, options: Options) -> Iterator[Row]:
    folder, ending, head, epochs, batch, rate, length = TASKS[name]
    if quick:
        texts = [made_up(name, number) for number in range(64)]
        train = texts[:40]
        dev = texts[40:]
    else:
        train, dev = (
            read_examples(options.data / folder / f"{part}.{ending}")
            for part in ("train", "dev")
        )
        if name == "pairs":
            train = paired(train)
            dev = paired(dev)
    task = Task(name, train, dev, epochs, batch, rate, length).given(options)
    for method, seed in options.trainings:
        loaded = options.fresh(seed, head)
        known = trained.train(loaded, task, method, seed, options)
        yield trained.attack(loaded, task, known, options)


def paired(examples: Sequence[Example]) -> list[Example]:
    """Pair every context with its own ending (1) and with that of the next in its group (0)."""

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
    # Shuffled, so that the first examples are a sample of all groups.
    order = torch.randperm(
        len(pairs), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return [pairs[number] for number in order]


def made_up(name: str, number: int) -> Example:
    """Return an example of random words for the quick mode."""
    stream = torch.Generator().manual_seed(number)
    lines = [
        " ".join(
            map(subjects.word, torch.randint(150, (8,), generator=stream).tolist())
        )
        for _ in range(5)
    ]
    if name == "pairs":
        return Example(str(number), number % 2, lines[0], lines[1])
    return Example(str(number), number % 3, lines[0], choices=tuple(lines[1:4]))


def by_factor(runs: Sequence[Run]) -> Iterator[Row]:
    """Yield how flips depend on each factor, for each task, method and attack."""
    for what, method in dict.fromkeys((run["what"], run["method"]) for run in runs):
        own = [run for run in runs if (run["what"], run["method"]) == (what, method)]
        for outcome in OUTCOMES:
            values, flipped = answers(own, outcome)
            if len(flipped):
                yield from described(f"{what}, {method}, {outcome}", values, flipped)


def answers(runs: Sequence[Run], outcome: str) -> tuple[Tensor, Tensor]:
    """Return factors (answers, 3) and flips (answers,) of all answers with this outcome."""
    known = [answer for run in runs for answer in run.get("answers", [])]
    known = [answer for answer in known if outcome in answer["flipped"]]
    values = [[float(answer[name]) for name in FACTORS] for answer in known]
    flips = [float(answer["flipped"][outcome]) for answer in known]
    return (
        torch.tensor(values, dtype=torch.float64).view(-1, len(FACTORS)),
        torch.tensor(flips, dtype=torch.float64),
    )


def described(name: str, values: Tensor, flipped: Tensor) -> Iterator[Row]:
    if flipped.min() == flipped.max():
        what = "all flip" if flipped[0] else "none flips"
        yield Row(
            name, f"{what}: nothing to compare", details=f"{len(flipped)} answers"
        )
        return
    for number, factor in enumerate(FACTORS):
        shares = ", ".join(
            f"{share:.0%}" for share in quarters(values[:, number], flipped)
        )
        details = (
            f"larger where flipped: {larger(values[:, number], flipped):.0%}; median "
            f"{values[:, number].median():.3g}; {len(flipped)} answers"
        )
        yield Row(f"{name}: flips by quarter of {factor}", shares, details=details)


def quarters(values: Tensor, flipped: Tensor) -> list[float]:
    """Return the share that flipped in each quarter of the answers, smallest values first."""
    parts = flipped[values.argsort(stable=True)].tensor_split(4)
    return [float(part.mean()) for part in parts if len(part)]


def larger(values: Tensor, flipped: Tensor) -> float:
    """Return how often a flipped answer has a larger value than one that did not flip."""
    gaps = values[flipped > 0][:, None] - values[flipped == 0]
    return float((gaps > 0).double().mean() + (gaps == 0).double().mean() / 2)


if __name__ == "__main__":
    show.main(run)
