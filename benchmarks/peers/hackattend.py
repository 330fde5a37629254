"""HackAttend's released program and Keyhole's `ReleasedProgram` on the same inputs, mask by mask.

The program runs from its authors' repository:

    git clone https://github.com/liongkj/HackAttend git -C HackAttend checkout 98a1d52
    python -m venv hackattend-env hackattend-env/bin/pip install torch==2.13.0
    transformers==4.30.2 "numpy<2" pandas matplotlib \
        tabulate wandb
    python benchmarks/peers/hackattend.py --checkout HackAttend --python
    hackattend-env/bin/python

It needs models with as many heads as layers. These are the classifier that ships, on
the first `--texts` sentences of SST-2's dev set that it gets right, and for multiple
choice its encoder with a random head, on the first `--questions` questions of HellaSwag
(4 choices) and DREAM (3), where its own answer counts as right. Both programs run in
one thread and in float64, so that rounding does not decide between two units;
`--questions` sentences are repeated in float32. `--texts 0` and `--questions 0` leave a
part out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).resolve().parent.parent))

import show
import subjects
from keyhole.data import Batch, Example, encode, read_examples
from keyhole.disrupt import HackAttend, ReleasedProgram
from keyhole.models import Loaded, load_model
from keyhole.models.demo import FOLDER
from show import Row

REPOSITORY = "https://github.com/liongkj/HackAttend"
COMMIT = "98a1d52"
SIDE = Path(__file__).with_name("hackattend_side.py")
POSITIONS = 128


def run(
    quick: bool,
    checkout: Path | None = None,
    python: Path = Path(sys.executable),
    data: Path = subjects.DATA,
    texts: int = 100,
    questions: int = 10,
    share: float = 0.01,
) -> Iterator[Row]:
    folder = subjects.checkout(checkout, REPOSITORY, COMMIT)
    torch.set_num_threads(1)
    texts, questions = (3, 2) if quick else (texts, questions)
    for what, file, count, precision in (
        ("SST-2", "sst2/dev.tsv", texts, torch.float64),
        ("HellaSwag", "hellaswag/dev.jsonl", questions, torch.float64),
        ("DREAM", "dream/dev.json", questions, torch.float64),
        ("SST-2", "sst2/dev.tsv", min(texts, questions), torch.float32),
    ):
        if not count:
            continue
        loaded = opened(choices=what != "SST-2")
        loaded.model.to(precision)
        batch = first_right(loaded, read_examples(data / file), count)
        theirs = program(loaded, batch, share, folder, python)
        name = f"{what}, {str(precision).removeprefix('torch.')}"
        yield from compared(name, loaded, batch, theirs, share)


def opened(choices: bool) -> Loaded:
    """Return the classifier that ships, or its encoder with a random head for multiple choice."""
    loaded = load_model(FOLDER, task="classification", device="cpu")
    if not choices:
        return loaded
    from transformers import BertForMultipleChoice

    torch.manual_seed(0)
    model = BertForMultipleChoice(loaded.model.config).eval().requires_grad_(False)
    model.bert.load_state_dict(loaded.model.bert.state_dict())
    return replace(loaded, model=model)


def first_right(loaded: Loaded, examples: list[Example], count: int) -> Batch:
    """Return the first examples that the model answers rightly (any, in multiple choice)."""
    width = len(examples[0].choices)
    batch, labels = encode(
        loaded.tokenizer,
        [each for each in examples if len(each.choices) == width][: 4 * count],
        max_length=POSITIONS,
    )
    del batch["special_tokens_mask"]
    with torch.no_grad():
        answers = loaded.model(**batch).logits.argmax(-1)
    labels = answers if width else labels
    chosen = (answers == labels).nonzero().flatten()[:count]
    more = (0, POSITIONS - batch["input_ids"].shape[-1])
    padded = {
        name: torch.nn.functional.pad(value[chosen], more)
        for name, value in batch.items()
    }
    segments = padded.get("token_type_ids", torch.zeros_like(padded["input_ids"]))
    return {**padded, "token_type_ids": segments, "labels": labels[chosen]}


def program(
    loaded: Loaded, batch: Batch, share: float, checkout: Path, python: Path
) -> list[dict[str, Any]]:
    """Run the released program in its own Python, and return its answers."""
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.save_pretrained(folder)
        inputs = {name: value.contiguous() for name, value in batch.items()}
        save_file(inputs, Path(folder) / "inputs.safetensors")
        precision = str(loaded.model.dtype).removeprefix("torch.")
        done = subprocess.run(
            [python, SIDE, checkout, folder, str(share), precision],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def compared(
    name: str, loaded: Loaded, batch: Batch, theirs: list[dict[str, Any]], share: float
) -> Iterator[Row]:
    inputs = dict(batch)
    labels = inputs.pop("labels")
    items: list[dict[str, Any]] = []
    for number, peer in enumerate(theirs):
        part = {key: value[number : number + 1] for key, value in inputs.items()}
        label = labels[number : number + 1]
        found, seconds = show.timed(
            lambda part=part, label=label: ReleasedProgram(share)(
                loaded.model, part, label
            )
        )
        (ours,) = found.outcomes
        (greedy,) = HackAttend.as_released(share)(loaded.model, part, label).outcomes
        closed, wanted = (
            {tuple(unit) for unit in cut} for cut in (ours.cut, peer["closed"])
        )
        items.append(
            {
                "tokens": int(part["attention_mask"].sum()),
                "right": [peer["right"], ours.right],
                "flipped": [peer["flipped"], ours.flipped, greedy.flipped],
                "queries": [peer["queries"], ours.steps],
                "closed": [len(wanted), len(closed)],
                "differ": len(closed ^ wanted),
                "seconds": [peer["seconds"], seconds],
                "of attacked heads": ours.perturbation,
            }
        )
    total = len(items)
    alike = {
        key: sum(item[key][0] == item[key][1] for item in items)
        for key in ("right", "flipped", "queries")
    }
    flips = sum(item["flipped"][0] for item in items)
    asked = sum(item["queries"][0] for item in items)
    times = [sum(item["seconds"][side] for item in items) for side in (0, 1)]
    same = sum(item["differ"] == 0 for item in items)
    greedy = sum(item["flipped"][0] == item["flipped"][2] for item in items)
    units = sum(item["closed"][0] for item in items)
    cut = sum(item["of attacked heads"] for item in items) / total
    yield Row(
        f"{name}: identical masks",
        f"{same} of {total}",
        "all",
        same == total,
        f"{units} units closed; {cut:.1%} of attacked heads' units cut at a stated {share:.0%}; "
        f"`as_released` flips alike in {greedy}",
        run={"what": name, "items": items},
    )
    yield show.every(
        f"{name}: same numbers of queries", alike["queries"], total, f"{asked} in all"
    )
    yield show.every(
        f"{name}: same verdicts", alike["flipped"], total, f"{flips} flips"
    )
    yield Row(
        f"{name}: seconds, program over ours",
        f"{times[0] / times[1]:.1f}",
        "> 1",
        times[0] > times[1],
        f"{times[0]:.0f} s and {times[1]:.0f} s",
        promise=False,
    )


if __name__ == "__main__":
    show.main(run)
