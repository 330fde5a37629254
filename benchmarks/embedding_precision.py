"""Texts from embeddings in the precisions that stores keep them in: how many are read and proved.

Sentences of SST-2's development set are searched from their vectors of MiniLM (or another
`--encoder`) as a store keeps them: rounded, or with noise of a share of their spread that is known
to the attacker. The whole way is taken, from the leak to the judge: exact means the very same
tokens, verified that the judge says so, false that it says so of another text. Counts are made of
the same domain's training set; lengths are unknown. `--tokens` is how long sentences are, `--texts`
how many of them, `--passes` what is spent on each at most. `--quick` takes a random-weight model.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import show
import subjects
from keyhole.data import read_texts
from keyhole.models import Exposure, Loaded
from keyhole.recover import Pooled, recover_texts
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch
from show import Row
from stored_forms import Change, changes, vectors_of

FORMS = ("float32", "float16", "8 bits, a scale", "4 bits", "1 bit", "%, stated")


@dataclass(frozen=True, eq=False)
class Setting:
    """A model, the corpus, the texts that are looked for, by length, and what is spent."""

    loaded: Loaded
    corpus: Sequence[str]
    secrets: dict[str, list[list[int]]]
    search: SumSearch
    max_length: int = 34


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 50,
    passes: int | None = None,
    tokens: str = "4-9,10-16",
) -> Iterator[Row]:
    if quick:
        loaded = subjects.tiny("bert", words=96)
        lines = subjects.random_lines(loaded, 120, 1, 3)
        secrets = {"1–3 tokens": loaded.tokenizer(lines[:2])["input_ids"]}
        yield from rows(Setting(loaded, lines[2:], secrets, SumSearch(passes=400), max_length=3))
        return
    loaded = subjects.minilm(encoder, device)
    corpus = read_texts(data / "sst2" / "train.tsv")
    known = {line.strip() for line in corpus}
    fresh = [line for line in read_texts(data / "sst2" / "dev.tsv") if line.strip() not in known]
    encoded = loaded.tokenizer(fresh)["input_ids"]
    random.Random(0).shuffle(encoded)
    secrets = {
        f"{least}–{most} tokens": [ids for ids in encoded if least <= len(ids) - 2 <= most][:texts]
        for least, most in subjects.lengths(tokens)
    }
    yield from rows(Setting(loaded, corpus, secrets, SumSearch(passes=passes)))


def rows(setting: Setting) -> Iterator[Row]:
    loaded = setting.loaded
    target = Target.of(loaded.model, loaded.tokenizer)
    some = loaded.tokenizer(list(setting.corpus[:512]))["input_ids"]
    forms = changes(vectors_of(target, some), (), 0, (1,))
    reader = CountedReader(list(setting.corpus), setting.max_length, setting.search)
    started = time.perf_counter()
    reader = reader.ready(target, Exposure("pooled"))
    spent = f"{len(setting.corpus):,} lines, {time.perf_counter() - started:.0f} s"
    yield Row(f"{loaded.name}: corpus counted", spent)
    for length, secrets in setting.secrets.items():
        for name, change in forms.items():
            if any(part in name for part in FORMS):
                yield measure(f"{length}, {name}", loaded, reader, change, secrets)


def measure(
    what: str, loaded: Loaded, reader: CountedReader, change: Change, secrets: list[list[int]]
) -> Row:
    leaks = [
        change(
            replace(cast("Pooled", subjects.leak_of(loaded, ids, Exposure("pooled"))), tokens=None)
        )
        for ids in secrets
    ]
    started = time.perf_counter()
    made = recover_texts(loaded.model, loaded.tokenizer, leaks, method=reader)
    seconds = (time.perf_counter() - started) / len(secrets)
    pairs = list(zip(made, secrets, strict=True))
    exact = sum(recovery.ids == ids for recovery, ids in pairs)
    verified = sum(recovery.verified and recovery.ids == ids for recovery, ids in pairs)
    false = sum(recovery.verified and recovery.ids != ids for recovery, ids in pairs)
    shared = statistics.mean(subjects.f1(recovery.ids[1:-1], ids[1:-1]) for recovery, ids in pairs)
    passes = statistics.mean(recovery.passes for recovery in made)
    return Row(
        what,
        f"{exact} of {len(secrets)} exact, {verified} of them verified, {false} false",
        "0 false",
        false == 0,
        f"token F1 {shared:.3f}; {passes:,.0f} passes and {seconds:.2f} s a text",
    )


if __name__ == "__main__":
    show.main(run)
