"""Texts from pooled sentence embeddings: how many come back exactly, by length.

A reader is learnt for `--seconds` from the training texts of SST-2 (twice), HellaSwag and DREAM,
then sentences of SST-2's development set are searched from their vectors alone, their length
unknown: up to `--texts` of 4–9, 10–16, 17–24 and 25–32 tokens (special ones not counted). Exact
means the very same tokens; a text that gives the vector back within 1e-6 and is another would be
counted as wrong. Made for a GPU. `--quick` takes a random-weight model of 100 words.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import show
import texts
from keyhole.data import read_texts
from keyhole.models import Loaded
from keyhole.recover.attack import Target
from keyhole.recover.embedding.corpus import Corpus
from keyhole.recover.embedding.learn import Learning
from keyhole.recover.embedding.reader import Reader, Size
from keyhole.recover.embedding.scoring import Encoder, Texts
from keyhole.recover.embedding.search import Search
from show import Row

OPTIONS = texts.options(texts=100)
OPTIONS.add_argument("--seconds", type=float, default=400)
OPTIONS.add_argument("--rounds", type=int, default=40)
OPTIONS.add_argument("--more", type=Path, action="append", help="texts to learn from besides")
CHOSEN = texts.chosen(OPTIONS)
LENGTHS = {(4, 9): 98, (10, 16): 95, (17, 24): 80, (25, 32): 60}  # and percent to reach
LONGEST = 34


def run(quick: bool) -> list[Row]:
    return texts.collect(small() if quick else full(), strict=quick)


def full() -> Iterator[texts.Part]:
    loaded, data = texts.minilm(CHOSEN), Path(CHOSEN.data)
    reviews = read_texts(data / "sst2" / "train.tsv")
    more = [text for file in CHOSEN.more or [] for text in read_texts(file)]
    corpus = [*reviews, *reviews, *texts.hellaswag(data), *texts.turns(data), *more]
    secrets = read_texts(data / "sst2" / "dev.tsv")
    learning = Learning(CHOSEN.seconds, size=Size(longest=LONGEST))
    yield from parts(loaded, corpus, secrets, learning, Search(CHOSEN.rounds), LENGTHS)


def small() -> Iterator[texts.Part]:
    loaded = texts.tiny("bert", words=96)
    generator = random.Random(0)
    words = [token for token in loaded.tokenizer.get_vocab() if token not in texts.SPECIAL]
    lines = [" ".join(generator.choices(words, k=generator.randint(1, 3))) for _ in range(100)]
    learning = Learning(steps=20, batch=32, size=Size(32, 1, 2, 3), pool=32, every=10)
    search = Search(rounds=3, trust=(0.0, 1e-3), kept=4, first=8, pieces=4)
    yield from parts(loaded, lines, lines[:4], learning, search, {(1, 3): 0})


def parts(
    loaded: Loaded, corpus: Sequence[str], secrets: Sequence[str], learning: Learning,
    search: Search, lengths: dict[tuple[int, int], int],
) -> Iterator[texts.Part]:  # fmt: skip
    encoder = Encoder(Target.of(loaded.model, loaded.tokenizer))
    longest = learning.size.longest
    readers: list[Reader] = []

    def learnt() -> Iterator[Row]:
        started = time.perf_counter()
        lines = Corpus.of(loaded.tokenizer, corpus, longest, encoder.table)
        losses: list[float] = []
        readers.append(learning(encoder, lines, lambda _share, _steps, loss: losses.append(loss)))
        words = f"{statistics.mean(losses[-20:]):.2f} nats a token" if losses else "not measured"
        details = f"{len(corpus):,} lines, {time.perf_counter() - started:.0f} s"
        yield Row(f"{loaded.name}: a reader learnt", words, details=details)
        unseen, seen = (
            nats(loaded, encoder, readers[0], some)
            for some in (secrets, corpus[:: len(corpus) // 100 + 1])
        )
        yield Row(
            f"{loaded.name}: what it loses for a token of texts outside the corpus",
            f"{unseen:.2f} nats, {seen:.2f} inside",
            details="the larger the difference, the more it recalls instead of reading",
        )

    yield "a reader learnt", learnt
    encoded = loaded.tokenizer(list(secrets), add_special_tokens=False)["input_ids"]
    for (least, most), percent in lengths.items():
        fitting = [ids for ids in encoded if least <= len(ids) <= most]
        random.Random(0).shuffle(fitting)
        what = f"{loaded.name}, mean-pooled, {least}–{most} tokens, length unknown"
        few = fitting[: CHOSEN.texts]
        yield (
            what,
            lambda w=what, f=few, p=percent: [
                measure(w, encoder, readers[0], f, replace(search), longest, p)
            ],
        )


def nats(loaded: Loaded, encoder: Encoder, reader: Reader, lines: Sequence[str]) -> float:
    longest = reader.size.longest
    encoded = loaded.tokenizer(list(lines), add_special_tokens=False)["input_ids"]
    some = Texts.of([ids for ids in encoded if 0 < len(ids) <= longest], longest, encoder.device)
    chances = reader.log_likelihood(encoder.vectors(some), some)
    return -float(chances.sum() / (some.lengths + 1).sum())


def measure(
    what: str, encoder: Encoder, reader: Reader, secrets: list[list[int]], search: Search,
    longest: int, percent: int,
) -> Row:  # fmt: skip
    goals = encoder.vectors(Texts.of(secrets, longest, encoder.device))
    started, before = time.perf_counter(), encoder.passes
    pools = search(encoder, goals, reader, longest)
    seconds = time.perf_counter() - started
    best = Texts(pools.best_ids, pools.best_lengths)
    answers = [best.tokens(row) for row in range(len(secrets))]
    exact = sum(map(list.__eq__, answers, secrets))
    arrived = int((pools.best > 1 - search.arrived).sum())
    shared = statistics.mean(map(texts.f1, answers, secrets))
    return Row(
        what,
        f"{exact} of {len(secrets)} exact, {arrived - exact} that give the vector and are others",
        f">= {percent}% exact",
        exact >= percent / 100 * len(secrets) and arrived <= exact,
        f"token F1 {shared:.3f}; {(encoder.passes - before) // len(secrets):,} passes and "
        f"{seconds / len(secrets):.2f} s a text",
    )


if __name__ == "__main__":
    show.main(run, __doc__)
