"""Prompts from the next-token logits of a causal model: how many come back exactly, by length.

SmolLM2-135M-Instruct (`--model FOLDER` or `FILE.gguf`) is run on the first 1–24 tokens of texts of
HellaSwag's and DREAM's development sets. Their logits give the last state, and that is searched
with counts of the training texts of both, cut the same way; the length is unknown. `--steps 1,4`
are the logits of one next token, and of the first four together. Exact means the very same tokens.
Made for a GPU; `--lengths 1-3,4-6` takes some lengths alone. `--quick` takes a random-weight model.

For comparison: SODA (arXiv 2507.01693), also from logits and with the weights, reports 79.5% of
short prompts exact and none from 15 tokens on; other models and other texts, so no comparison of
methods.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import show
import subjects
from keyhole.models import Exposure, Loaded, capture
from keyhole.recover import Logits
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import Counted
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.embeddings.final_state import vectors_of
from keyhole.recover.embeddings.reader import beginnings
from keyhole.recover.embeddings.sum_search import SumSearch
from show import Row

MAX_LENGTH = 24
SODA = 15  # tokens from which it finds none


@dataclass(frozen=True, eq=False)
class Setting:
    """What is read: a model, beginnings of texts that the attacker has, prompts, how it is done."""

    loaded: Loaded
    corpus: Sequence[list[int]]
    prompts: Sequence[list[int]]
    search: SumSearch
    max_length: int = MAX_LENGTH


def run(
    quick: bool,
    data: Path = subjects.DATA,
    model: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 100,
    passes: int | None = None,
    steps: list[int] = [1, 4],  # noqa: B006 - read, never changed
    lengths: str = "1-3,4-6,7-10,11-14,15-24",
) -> Iterator[Row]:
    if quick:
        loaded = subjects.tiny("llama", words=96, head="AutoModelForCausalLM")
        lines = subjects.random_lines(loaded, 100, 1, 3)
        encoded = loaded.tokenizer(lines, add_special_tokens=False)["input_ids"]
        setting = Setting(loaded, beginnings(encoded, 3), encoded[:20], SumSearch(passes=400), 3)
        steps, lengths, texts = [1, 2], "1-1,2-3", 3
    else:
        loaded = subjects.smollm2(model, device, task="causal")
        words = loaded.tokenizer
        secrets = [*subjects.hellaswag(data, "dev"), *utterances(data, "dev")]
        random.Random(0).shuffle(secrets)
        lines = words(
            [*subjects.hellaswag(data), *utterances(data, "train")], add_special_tokens=False
        )
        corpus = beginnings([ids for ids in lines["input_ids"] if ids], MAX_LENGTH)
        prompts = words(secrets, add_special_tokens=False)["input_ids"]
        setting = Setting(loaded, corpus, prompts, SumSearch(passes=passes))
    for count in steps:
        yield from rows(setting, count, subjects.lengths(lengths), texts)


def utterances(data: Path, part: str) -> list[str]:
    """The turns of DREAM's dialogues without the speaker (`W: `)."""
    return [turn.split(": ", 1)[-1] for turn in subjects.turns(data, part)]


def rows(
    setting: Setting, steps: int, lengths: Sequence[tuple[int, int]], texts: int
) -> Iterator[Row]:
    loaded, chance = setting.loaded, random.Random(1)
    target = Target.of(loaded.model, loaded.tokenizer)
    encoder = Encoder(target, Exposure("pooled", pooling="last", steps=steps))
    name = f"{Path(loaded.name).name}, logits of {steps} next token{'s' if steps > 1 else ''}"
    started = time.perf_counter()
    counted = Counted.of(encoder, setting.corpus, setting.max_length)
    words = f"{len(setting.corpus):,} lines, {time.perf_counter() - started:.0f} s"
    yield Row(f"{name}: corpus counted", words)
    for least, most in lengths:
        chosen = [ids for ids in setting.prompts if len(ids) >= least]
        prompts = [ids[: chance.randint(least, most)] for ids in chosen[:texts]]
        what = f"{name}, {least}–{most} tokens, length unknown"
        yield measure(what, setting, counted, prompts, most)


def measure(
    what: str, setting: Setting, counted: Counted, prompts: list[list[int]], most: int
) -> Row:
    encoder, search = counted.encoder, setting.search
    leaked, _ = vectors_of(setting.loaded.model, leaks(setting.loaded, prompts, encoder))
    goals = encoder.directions(leaked.to(encoder.device))
    true = encoder.vectors(Texts.of(prompts, setting.max_length, encoder.device))
    error = float((1 - (true * goals).sum(-1)).max())  # of the right texts: what arriving is
    started = time.perf_counter()
    readings = search(encoder, goals, counted, setting.max_length)
    seconds = time.perf_counter() - started
    answers = [reading.tokens for reading in readings]
    exact = sum(map(list.__eq__, answers, prompts))
    arrived = sum(reading.cosine > 1 - search.arrived for reading in readings)
    decode = setting.loaded.tokenizer.decode
    others = "".join(
        f"; {decode(reading.tokens)!r} for {decode(prompt)!r}"
        for reading, prompt in zip(readings, prompts, strict=True)
        if reading.cosine > 1 - search.arrived and reading.tokens != prompt
    )
    passes = statistics.mean(reading.passes for reading in readings)
    published = "none" if most >= SODA else "79.5%"
    row = Row(
        what,
        f"{exact} of {len(prompts)} exact, {arrived - exact} others that give the state",
        "0 others",
        arrived <= exact,
        details=f"SODA, other models and texts: {published}; token F1 "
        f"{statistics.mean(map(subjects.f1, answers, prompts)):.3f}; the right texts' 1 − cosine "
        f"<= {error:.0e}; {passes:,.0f} passes and {seconds / len(prompts):.2f} s a prompt{others}",
    )
    return show.itemised(row, [
        {"tokens": len(prompt), "exact": reading.tokens == prompt, "cosine": reading.cosine,
         "f1": subjects.f1(reading.tokens, prompt), "passes": reading.passes}
        for reading, prompt in zip(readings, prompts, strict=True)
    ])  # fmt: skip


def leaks(loaded: Loaded, prompts: list[list[int]], encoder: Encoder) -> list[Logits]:
    """What the model answers to each prompt."""
    exposure = Exposure("logits", steps=encoder.exposure.steps)
    made: list[Logits] = []
    for prompt in prompts:
        ids = torch.tensor([[*encoder.before, *prompt, *encoder.after]], device=encoder.device)
        with torch.no_grad():
            made.append(Logits(capture(loaded.model, exposure, ids=ids)["values"][0].cpu()))
    return made


if __name__ == "__main__":
    show.main(run)
