"""Texts from the gradient of a batch: how many are read exactly and verified, and their ROUGE.

Sentences of SST-2 (`--split`) in `--batches` batches of each of `--sizes`, for
all-MiniLM-L6-v2 (`--encoder FOLDER`; it gets a random classification head if it has
none) and SmolLM2-135M (`--model`) with its next-token loss. `--parts
rules,decoder-rules` measures other protocols. peers/dager.py reads the same batches
with DAGER's own program.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch

import show
import subjects
from keyhole.core.errors import InputError
from keyhole.data import Example, read_examples
from keyhole.models import Loaded
from keyhole.models.anatomy import anatomy
from keyhole.recover.gradients import (
    Batch,
    Protocol,
    batch_of,
    recover_batch,
    update_of,
)
from keyhole.recover.gradients.update import epsilon_of
from show import Row

PARTS = ["encoder", "decoder", "rules", "decoder-rules"]
EPSILONS = (8, 4, 1)
NOISES = (1e-6, 1e-5, 1e-4, 1e-3)


@dataclass(frozen=True)
class Rules:
    """How an update is made, and its name in the table.

    A batch has `texts` texts, or so many that they have `widths` tokens per unit of
    model width.
    """

    name: str
    protocol: Protocol = field(default_factory=Protocol)
    hide: tuple[str, ...] = ()
    precision: str = "float32"
    texts: int = 1
    widths: float | None = None


def _noisy(noise: float) -> Rules:
    protocol = Protocol(clip=0.1, noise=noise)
    return Rules(
        f"clipped to 0.1, noise of {noise:g}: ε = {epsilon_of(noise):.1e}", protocol
    )


# Hidden (or frozen) embeddings have no gradient in the update, as in the comparison
# with DAGER.
RULES = (
    Rules("embeddings hidden", hide=("embeddings",)),
    Rules("bfloat16", precision="bfloat16"),
    Rules("bfloat16", precision="bfloat16", texts=4),
    Rules("each text clipped to 0.1: ε = ∞", Protocol(clip=0.1)),
    *(
        Rules(f"clipped to 0.1, ε = {e}", Protocol(clip=0.1, epsilon=e))
        for e in EPSILONS
    ),
    *(Rules(f"tokens of {times:g} widths", widths=times) for times in (0.5, 1, 2, 4)),
    *(Rules(f"LoRA of rank {rank}", Protocol(lora=rank)) for rank in (8, 16, 64)),
    *(
        Rules(f"LoRA of rank {rank}, first round", Protocol(lora=rank, trained=False))
        for rank in (8, 16, 64)
    ),
    *map(_noisy, NOISES),
    Rules("weights after 3 steps of 0.01", Protocol(steps=3, rate=0.01)),
    Rules("weights after 3 steps of 0.01", Protocol(steps=3, rate=0.01), texts=4),
)


def of_sizes(sizes: Sequence[int]) -> list[Rules]:
    return [Rules("", texts=size) for size in sizes]


def batches_of(
    loaded: Loaded, examples: Sequence[Example], rules: Rules, count: int
) -> Iterator[tuple[Sequence[Example], Batch]]:
    """Yield batches of consecutive examples."""
    parts = anatomy(loaded.model)
    max_length = min(128, parts.max_length)
    first = 0
    for _ in range(count):
        texts = rules.texts
        if rules.widths is not None:
            lengths = [
                len(loaded.tokenizer(each.text)["input_ids"])
                for each in examples[first:]
            ]
            total = list(accumulate(lengths))
            texts = 1 + sum(each < rules.widths * parts.width for each in total)
        chosen = examples[first : first + texts]
        first += texts
        yield chosen, batch_of(loaded.model, loaded.tokenizer, chosen, max_length)


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    model: Path | None = None,
    sizes: list[int] = [1, 8, 32, 128],  # noqa: B006 - read, never changed
    batches: int = 5,
    parts: list[str] = PARTS,
    split: Literal["dev", "train"] = "dev",
) -> Iterator[Row]:
    if quick:
        for family, head in (("bert", "SequenceClassification"), ("llama", "CausalLM")):
            loaded = subjects.tiny(family, head=f"AutoModelFor{head}")
            lines = subjects.random_lines(loaded, 8, 6, 6)
            examples = [
                Example("", number % 2, line) for number, line in enumerate(lines)
            ]
            yield from by_rules(loaded, examples, 2, of_sizes([1, 2]))
            yield from by_rules(loaded, examples, 1, RULES[:20:4])
        return
    examples = read_examples(data / "sst2" / f"{split}.tsv")
    random.Random(0).shuffle(examples)
    models = {
        "": lambda: classifier(encoder, device),
        "decoder-": lambda: subjects.smollm2(model, device, task="causal"),
    }
    for prefix, load in models.items():
        whole = prefix.removesuffix("-") or "encoder"
        rules = f"{prefix}rules"
        if whole in parts or rules in parts:
            loaded = load()
            chosen = of_sizes(sizes) if whole in parts else []
            chosen += RULES if rules in parts else ()
            yield from by_rules(loaded, examples, batches, chosen)


def classifier(encoder: Path | None, device: str) -> Loaded:
    """Return MiniLM with its own classification head, or a new one."""
    try:
        return subjects.minilm(encoder, device, task="classification")
    except InputError:
        torch.manual_seed(0)  # the new head's weights
        return subjects.minilm(encoder, device, task="classification", new_head=2)


def by_rules(
    loaded: Loaded, examples: Sequence[Example], batches: int, which: Sequence[Rules]
) -> Iterator[Row]:
    for rules in which:
        size = f"batch of {rules.texts}" if rules.widths is None else ""
        what = ", ".join(filter(None, [Path(loaded.name).name, size, rules.name]))
        yield measure(what, loaded, examples, rules, batches)


def measure(
    what: str, loaded: Loaded, examples: Sequence[Example], rules: Rules, batches: int
) -> Row:
    """Read some batches, and compare the texts with those they were made of."""
    count = batches if rules.texts < 32 else 1
    items: list[dict[str, Any]] = []
    started = time.perf_counter()
    for number, (_, batch) in enumerate(batches_of(loaded, examples, rules, count)):
        update = update_of(
            loaded.model,
            batch,
            rules.protocol,
            hide=rules.hide,
            precision=rules.precision,
        )
        recovery = recover_batch(loaded.model, loaded.tokenizer, update)
        read = [tuple(text.ids) for text in recovery.texts]
        verified = [tuple(text.ids) for text in recovery.texts if text.verified]
        ids = {id_ for text in batch.texts for id_ in text}
        items.append(
            {
                "batch": number,
                "texts": len(batch.texts),
                "tokens": sum(map(len, batch.texts)),
                "exact": sum(text in read for text in batch.texts),
                "verified": recovery.verified,
                "false": sum(text not in batch.texts for text in verified),
                "rouge": rouges(loaded, batch.texts, read),
                "known": len(ids & set(recovery.tokens)) / len(ids),
            }
        )
    seconds = (time.perf_counter() - started) / count
    scores = [score for item in items for score in item["rouge"]]
    first, second = (mean(score) for score in zip(*scores, strict=True))
    total, exact, verified, false = (
        sum(item[name] for item in items)
        for name in ("texts", "exact", "verified", "false")
    )
    tokens = [item["tokens"] for item in items]
    return Row(
        what,
        f"{exact} of {total} texts exact, {verified} verified, {false} falsely; ROUGE-1 "
        f"{first:.3f}, ROUGE-2 {second:.3f}",
        "none falsely",
        false == 0,
        f"{min(tokens)}–{max(tokens)} tokens, {mean(item['known'] for item in items):.0%} of them "
        f"known; {seconds:.1f} s",
        items=items,
    )


def rouges(
    loaded: Loaded, texts: Sequence[Sequence[int]], read: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """Return ROUGE-1 and ROUGE-2 of each text with the best read one, without special tokens."""
    special = set(loaded.tokenizer.all_special_ids)
    texts, read = (
        [[id_ for id_ in text if id_ not in special] for text in each]
        for each in (texts, read)
    )
    pairs = [
        [
            (subjects.rouge(text, other, 1), subjects.rouge(text, other, 2))
            for other in read
        ]
        for text in texts
    ]
    return [max(each, default=(0.0, 0.0)) for each in pairs]


if __name__ == "__main__":
    show.main(run)
