"""Short texts from pooled sentence embeddings on a CPU: how many come back exactly.

Sentences of SST-2's development set of 4–9 tokens (`--tokens 10-16` others; special ones not
counted; none that is a line of the training set) are searched from their vectors of MiniLM (or
another `--encoder`) alone, their length unknown, with counts instead of a learnt reader. Rows: the
order of tokens from the same domain (SST-2's training set), from another one (HellaSwag and DREAM,
which then also give the first guess), and none; with and without the first guess, the bag of tokens
that a vector speaks of; both from the corpus that ships, which is what people get without one of
their own. `--texts` sentences for the first and the last row, a fifth as many for the others
(`--rows 1,3` takes some of the five); the 22 that settings were chosen on come last. Seconds are of
the wall clock, with the CPU's in brackets. `--quick` takes a random-weight model.
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
import texts
from keyhole.data import read_texts
from keyhole.models import Loaded
from keyhole.recover.attack import Target
from keyhole.recover.attacks.counted_reader import CountedReader
from keyhole.recover.embedding.climb import Climb
from keyhole.recover.embedding.counted import SHIPPED, Counted
from keyhole.recover.embedding.ngrams import NGrams
from keyhole.recover.embedding.scoring import Encoder, Texts, matrix_half
from show import Row

OPTIONS = texts.options(texts=50)
OPTIONS.set_defaults(device="cpu")
OPTIONS.add_argument("--passes", type=int, default=Climb().passes)
OPTIONS.add_argument("--rows", type=texts.listed, default=[1, 2, 3, 4, 5])
OPTIONS.add_argument("--tokens", default="4-9", help="how long the sentences are")
CHOSEN = texts.chosen(OPTIONS)
LEAST, MOST = map(int, CHOSEN.tokens.split("-"))
LONGEST = CountedReader(corpus=()).longest  # that is looked for, as the attack does


@dataclass(frozen=True)
class Case:
    """A row: where counts come from, whether the order of tokens and the first guess are used."""

    what: str
    corpus: Sequence[str]
    order: bool = True
    guess: bool = True
    percent: int | None = None  # to reach
    texts: int = 0


def run(quick: bool) -> list[Row]:
    return texts.collect(small() if quick else full(), strict=quick)


def full() -> Iterator[texts.Part]:
    data = Path(CHOSEN.data)
    reviews = read_texts(data / "sst2" / "train.tsv")
    others = [*texts.hellaswag(data), *texts.turns(data)]
    few = max(1, CHOSEN.texts // 5)
    to_reach = 80 if MOST <= 9 else None
    cases = [
        Case("same domain's order, first guess", reviews, percent=to_reach, texts=CHOSEN.texts),
        Case("another domain's order, first guess", others, texts=few),
        Case("no order, first guess", reviews, order=False, texts=few),
        Case("same domain's order, no first guess", reviews, guess=False, texts=few),
        Case("the corpus that ships", read_texts(SHIPPED), texts=CHOSEN.texts),
    ]
    cases = [cases[row - 1] for row in CHOSEN.rows]
    secrets = read_texts(data / "sst2" / "dev.tsv")
    search = Climb(passes=CHOSEN.passes)
    yield from parts(texts.minilm(CHOSEN), cases, secrets, (LEAST, MOST), search)


def small() -> Iterator[texts.Part]:
    loaded = texts.tiny("bert", words=96)
    generator = random.Random(0)
    words = [token for token in loaded.tokenizer.get_vocab() if token not in texts.SPECIAL]
    lines = [" ".join(generator.choices(words, k=generator.randint(1, 3))) for _ in range(120)]
    cases = [
        Case("order, first guess", lines[4:], texts=4),
        Case("no order, no first guess", lines[4:], order=False, guess=False, texts=2),
    ]
    yield from parts(loaded, cases, lines[:4], (1, 3), Climb(passes=400))


def parts(
    loaded: Loaded, cases: Sequence[Case], secrets: Sequence[str], lengths: tuple[int, int],
    search: Climb,
) -> Iterator[texts.Part]:  # fmt: skip
    encoder = Encoder(Target.of(loaded.model, loaded.tokenizer), half=matrix_half())

    def tokens(lines: Sequence[str]) -> list[list[int]]:
        stripped = [line.strip() for line in lines if line.strip()]
        return loaded.tokenizer(stripped, add_special_tokens=False)["input_ids"]

    least, most = lengths
    fitting = [ids for ids in tokens(secrets) if least <= len(ids) <= most]
    known = {tuple(ids) for case in cases for ids in tokens(case.corpus)}
    fresh = [ids for ids in fitting if tuple(ids) not in known]
    random.Random(0).shuffle(fresh)
    words = f"{len(fresh)} of {len(fitting)} sentences of {least}–{most} tokens"
    details = f"{len(fitting) - len(fresh)} are lines of the corpus, and left out"
    yield "sentences", lambda: [Row(f"{loaded.name}: sentences", words, details=details)]
    for case in cases:
        yield (
            case.what,
            lambda case=case: [measure(case, encoder, tokens(case.corpus), fresh, search)],
        )


def measure(
    case: Case, encoder: Encoder, lines: list[list[int]], secrets: list[list[int]], search: Climb
) -> Row:
    clock = _Clock()
    ngrams = None if case.order else NGrams.uniform(len(encoder.table))
    counted = Counted.of(encoder, lines, ngrams, case.guess)
    counting = clock.words()
    secrets = secrets[: case.texts]
    clock, before = _Clock(), encoder.passes
    exact = wrong = 0
    shared: list[float] = []
    for secret in secrets:
        goal = encoder.vectors(Texts.of([secret], len(secret))).cpu()[0]
        reading = search(encoder, goal, counted, LONGEST)
        exact += reading.tokens == secret
        wrong += reading.tokens != secret and reading.cosine > 1 - search.arrived
        shared.append(texts.f1(reading.tokens, secret))
    passes = (encoder.passes - before) // len(secrets)
    share = f"{exact} of {len(secrets)} exact, {wrong} that give the vector and are others"
    enough = case.percent is None or exact >= case.percent / 100 * len(secrets)
    return Row(
        case.what,
        share,
        f">= {case.percent}% exact, 0 wrong" if case.percent else "0 wrong",
        enough and not wrong,
        f"token F1 {statistics.mean(shared):.3f}; {passes:,} passes and "
        f"{clock.words(len(secrets))} a text; counted in {counting}; "
        f"{torch.get_num_threads()} threads",
    )


class _Clock:
    """Seconds of the wall clock and of the processor: they differ on a machine that is shared."""

    def __init__(self) -> None:
        self._since = time.perf_counter(), time.process_time()

    def words(self, count: int = 1) -> str:
        wall, processor = time.perf_counter() - self._since[0], time.process_time() - self._since[1]
        return f"{wall / count:.1f} s ({processor / count:.1f} s of the CPU)"


if __name__ == "__main__":
    show.main(run, __doc__)
