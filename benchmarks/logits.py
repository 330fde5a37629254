"""Prompts from the next-token logits of a causal model: how many come back exactly, by length.

SmolLM2-135M-Instruct (`--model FOLDER` or `FILE.gguf`) is run on the first 1–24 tokens of texts of
HellaSwag's and DREAM's development sets. Their logits give the last state, and that is searched
with a reader learnt for `--seconds` from the training texts of both, cut the same way; the length
is unknown. `--steps 1,4` are the logits of one next token, and of the first four together. Exact
means the very same tokens. Made for a GPU; `--lengths 1-3,4-6` takes some lengths alone, and
`--reader FILE` keeps what was learnt for another run. `--quick` takes a random-weight model.

Beside it: SODA (arXiv 2507.01693), also from logits and with the weights, reports 79.5% of short
prompts exact and none from 15 tokens on; other models and other texts, so no comparison of methods.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import show
import texts
from keyhole.models import Exposure, Loaded, capture
from keyhole.recover import Logits
from keyhole.recover.attack import Target
from keyhole.recover.embedding.corpus import Corpus
from keyhole.recover.embedding.learn import Learning
from keyhole.recover.embedding.reader import Reader, Size
from keyhole.recover.embedding.scoring import Encoder, Texts
from keyhole.recover.embedding.search import Search
from keyhole.recover.final_state import vectors_of
from show import Row

OPTIONS = texts.options(texts=100)
OPTIONS.add_argument("--seconds", type=float, default=300)
OPTIONS.add_argument("--rounds", type=int, default=30)
OPTIONS.add_argument("--batch", type=int, default=1024)
OPTIONS.add_argument("--steps", type=texts.listed, default=[1, 4])
OPTIONS.add_argument("--lengths", default="1-3,4-6,7-10,11-14,15-24")
OPTIONS.add_argument("--reader", type=Path)
CHOSEN = texts.chosen(OPTIONS)
LONGEST = 24
SODA = 15  # tokens from which it finds none


@dataclass(frozen=True, eq=False)
class Setting:
    """What is read: a model, texts that the attacker has, prompts, and what is spent."""

    loaded: Loaded
    corpus: Sequence[str]
    prompts: Sequence[list[int]]
    learning: Learning
    search: Search
    reader: Path | None = None


def run(quick: bool) -> list[Row]:
    return texts.collect(small() if quick else full(), strict=quick)


def full() -> Iterator[texts.Part]:
    loaded, data = texts.smollm2(CHOSEN, task="causal"), Path(CHOSEN.data)
    words, chance = loaded.tokenizer, random.Random(0)
    corpus = cut(words, [*texts.hellaswag(data), *said(data, "train")], chance)
    secrets = [*texts.hellaswag(data, "dev"), *said(data, "dev")]
    chance.shuffle(secrets)
    encoded = words(secrets, add_special_tokens=False)["input_ids"]
    size, batch = Size(longest=LONGEST), CHOSEN.batch
    learning = Learning(CHOSEN.seconds, batch=batch, size=size, pool=48 * batch)
    lengths = [tuple(map(int, part.split("-"))) for part in CHOSEN.lengths.split(",")]
    setting = Setting(loaded, corpus, encoded, learning, Search(CHOSEN.rounds), CHOSEN.reader)
    for steps in CHOSEN.steps:
        yield from parts(setting, steps, [(least, most) for least, most in lengths])


def small() -> Iterator[texts.Part]:
    loaded = texts.tiny("llama", words=96, head="AutoModelForCausalLM")
    chance = random.Random(0)
    words = [token for token in loaded.tokenizer.get_vocab() if token not in texts.SPECIAL]
    lines = [" ".join(chance.choices(words, k=chance.randint(1, 3))) for _ in range(100)]
    prompts = loaded.tokenizer(lines[:20], add_special_tokens=False)["input_ids"]
    learning = Learning(steps=20, batch=32, size=Size(32, 1, 2, 3), pool=32, every=10)
    search = Search(rounds=3, trust=(0.0, 1e-3), kept=4, first=8, pieces=4)
    setting = Setting(loaded, lines, prompts, learning, search)
    for steps in (1, 2):
        yield from parts(setting, steps, [(1, 1), (2, 3)], few=3)


def said(data: Path, part: str) -> list[str]:
    """What is said in DREAM's dialogues, without who says it (`W: `)."""
    return [turn.split(": ", 1)[-1] for turn in texts.turns(data, part)]


def cut(words: Any, lines: Sequence[str], chance: random.Random) -> list[str]:
    """Each line up to a random token: prompts are the beginnings of texts."""
    encoded = words(list(lines), add_special_tokens=False)["input_ids"]
    short = [ids[: chance.randint(1, LONGEST)] for ids in encoded if ids]
    return words.batch_decode(short)


def parts(
    setting: Setting, steps: int, lengths: Sequence[tuple[int, int]], few: int | None = None
) -> Iterator[texts.Part]:
    loaded, chance = setting.loaded, random.Random(1)
    target = Target.of(loaded.model, loaded.tokenizer)
    encoder = Encoder(target, Exposure("pooled", pooling="last", steps=steps))
    name = f"{loaded.name}, logits of {steps} next token{'s' if steps > 1 else ''}"
    readers: list[Reader] = []

    def learnt() -> Iterator[Row]:
        reader, row = learn(setting, encoder, name)
        readers.append(reader)
        yield row

    yield f"{name}: a reader learnt", learnt
    for least, most in lengths:
        chosen = [ids for ids in setting.prompts if len(ids) >= least]
        prompts = [ids[: chance.randint(least, most)] for ids in chosen[: few or CHOSEN.texts]]
        what = f"{name}, {least}–{most} tokens, length unknown"
        yield (
            what,
            lambda w=what, p=prompts, m=most: [measure(w, setting, encoder, readers[0], p, m)],
        )


def learn(setting: Setting, encoder: Encoder, name: str) -> tuple[Reader, Row]:
    """A reader of this encoder's vectors: learnt, or as an earlier run left it."""
    started, learning = time.perf_counter(), setting.learning
    words = setting.loaded.tokenizer
    lines = Corpus.of(words, setting.corpus, learning.size.longest, encoder.table)
    steps = encoder.exposure.steps
    file = None if setting.reader is None else setting.reader.with_suffix(f".{steps}.pt")
    if file is not None and file.is_file():
        reader = learning.blank(encoder, lines)
        reader.load_state_dict(torch.load(file, map_location=encoder.device, weights_only=True))
        return reader.eval(), Row(f"{name}: a reader learnt", f"before, in {file}")
    losses: list[float] = []
    reader = learning(encoder, lines, lambda _share, _steps, loss: losses.append(loss))
    if file is not None:
        torch.save(reader.state_dict(), file)
    nats = f"{statistics.mean(losses[-20:]):.2f} nats a token" if losses else "not measured"
    spent = f"{len(setting.corpus):,} lines, {50 * len(losses):,} steps"
    seconds = f"{time.perf_counter() - started:.0f} s"
    return reader, Row(f"{name}: a reader learnt", nats, details=f"{spent}, {seconds}")


def measure(
    what: str, setting: Setting, encoder: Encoder, reader: Reader, prompts: list[list[int]],
    most: int,
) -> Row:  # fmt: skip
    longest = setting.learning.size.longest
    leaked, _ = vectors_of(setting.loaded.model, leaks(setting.loaded, prompts, encoder))
    goals = encoder.directions(leaked.to(encoder.device))
    true = encoder.vectors(Texts.of(prompts, longest, encoder.device))
    error = float((1 - (true * goals).sum(-1)).max())  # of the right texts: what arriving is
    started, before = time.perf_counter(), encoder.passes
    pools = setting.search(encoder, goals, reader, longest)
    seconds = time.perf_counter() - started
    best = Texts(pools.best_ids, pools.best_lengths)
    answers = [best.tokens(row) for row in range(len(prompts))]
    right = [answer == prompt for answer, prompt in zip(answers, prompts, strict=True)]
    arrived = (pools.best > 1 - setting.search.arrived).tolist()
    others = sum(there and not same for there, same in zip(arrived, right, strict=True))
    published = "none" if most >= SODA else "79.5%"
    return Row(
        what,
        f"{sum(right)} of {len(prompts)} exact, {others} others that give the state",
        details=f"SODA, other models and texts: {published}; token F1 "
        f"{statistics.mean(map(texts.f1, answers, prompts)):.3f}; the right texts' 1 − cosine "
        f"<= {error:.0e}; {(encoder.passes - before) // len(prompts):,} passes and "
        f"{seconds / len(prompts):.2f} s a prompt",
    )


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
    show.main(run, __doc__)
