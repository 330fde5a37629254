"""What the search in embeddings rests on: single changes add up, and which tokens are promising.

In sentences of SST-2's development set of `--tokens` tokens, k are replaced by tokens of the
training set at random. The first row says how many of a sentence's tokens the first guess holds (in
its 20 best, and so on). Putting one of them right moves the vector; rows say how well the sum of
these moves points to the vector of the sentence itself. Other rows say on which rank of the
vocabulary the right token of a wrong place stands: by the gradient of the cosine, and by what the
search takes (token odds, what is missing, bigrams). Vectors are whitened in both. `--quick` takes a
random-weight model.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import show
import subjects
from keyhole.data import read_texts
from keyhole.models import Loaded
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.changes import FAR
from keyhole.recover.embeddings.counts import Counted
from keyhole.recover.embeddings.encoder import Encoder, Texts, matrix_half
from show import Row


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 40,
    tokens: str = "17-24",
) -> Iterator[Row]:
    if quick:
        loaded = subjects.tiny("bert", words=96)
        lines = subjects.random_lines(loaded, 120, 4, 6)
        yield from measured(loaded, lines[4:], lines[:4], (4, 6), (2,), texts)
        return
    lines = read_texts(data / "sst2" / "train.tsv")
    secrets = read_texts(data / "sst2" / "dev.tsv")
    (lengths,) = subjects.lengths(tokens)
    loaded = subjects.minilm(encoder, device)
    yield from measured(loaded, lines, secrets, lengths, (2, 3, 5, 8), texts)


def measured(
    loaded: Loaded, lines: Sequence[str], secrets: Sequence[str], lengths: tuple[int, int],
    wrong: Sequence[int], texts: int,
) -> Iterator[Row]:  # fmt: skip
    encode = loaded.tokenizer
    corpus = [x for x in encode(list(lines), add_special_tokens=False)["input_ids"] if x]
    encoder = Encoder(Target.of(loaded.model, loaded.tokenizer), half=matrix_half())
    counted = Counted.of(encoder, corpus, lengths[1])
    ids = encode(list(secrets), add_special_tokens=False)["input_ids"]
    fitting = [x for x in ids if lengths[0] <= len(x) <= lengths[1]]
    random.Random(0).shuffle(fitting)
    few = fitting[:texts]
    yield first_guess_row(counted, few)
    for k in wrong:
        yield from rows(counted, corpus, few, k)


def first_guess_row(counted: Counted, secrets: list[list[int]]) -> Row:
    goals = counted.encoder.vectors(
        Texts.of(secrets, max(map(len, secrets)), counted.encoder.device)
    )
    odds = counted.token_odds.odds(goals)
    ranks = [
        int((row > row[token]).sum())
        for row, secret in zip(odds, secrets, strict=True)
        for token in set(secret)
    ]
    shares = (
        f"{sum(r < k for r in ranks) / len(ranks):.0%} among {k}" for k in (20, 50, 100, 1000)
    )
    row = Row("tokens of a text among the best of the first guess", ", ".join(shares))
    return show.itemised(row, [{"rank": rank} for rank in ranks])


def rows(
    counted: Counted, corpus: list[list[int]], secrets: list[list[int]], k: int
) -> Iterator[Row]:
    draw, encoder = random.Random(k), counted.encoder
    cosines: list[float] = []
    ranks: dict[str, list[int]] = {"the gradient": [], "what the search takes": []}
    for secret in secrets:
        places = draw.sample(range(len(secret)), k)
        guess = list(secret)
        for place in places:
            guess[place] = draw.choice(draw.choice(corpus))
        righted = [[*guess[:p], secret[p], *guess[p + 1 :]] for p in places]
        some = Texts.of([secret, guess, *righted], len(secret), encoder.device)
        vectors = encoder.vectors(some)
        off, sums = vectors[0] - vectors[1], (vectors[2:] - vectors[1]).sum(0)
        cosines.append(float(torch.cosine_similarity(off, sums, dim=0)))
        _, slopes = encoder.slopes(some[1:2], vectors[:1])
        gains = slopes[0] @ encoder.table.T.to(slopes.dtype)
        promise = FAR.odds * counted.token_odds.odds(
            vectors[0]
        ) + FAR.missing * counted.token_odds.missing(off)
        row = counted.ngrams.framed(some[1:2])[0]
        words = torch.arange(len(promise), device=row.device)
        for place in (p for p in places if guess[p] != secret[p]):
            pairs = counted.ngrams.pairs(row[place].expand_as(words), words)
            pairs = pairs + counted.ngrams.pairs(words, row[place + 2].expand_as(words))
            for name, scores in (
                ("the gradient", gains[place]),
                ("what the search takes", promise + FAR.order * pairs),
            ):
                ranks[name].append(int((scores > scores[secret[place]]).sum()))
    words_ = f"cosine {statistics.mean(cosines):.3f}"
    row = Row(f"{k} tokens wrong: sum of the right changes against what is missing", words_)
    yield show.itemised(row, [{"cosine": cosine} for cosine in cosines])
    for name, found in ranks.items():
        median = statistics.median(found)
        share = sum(rank < 64 for rank in found) / len(found)
        words_ = f"median rank {median:,.0f} of {len(counted.encoder.table):,}"
        details = f"{share:.0%} among the first 64"
        row = Row(f"{k} tokens wrong: the right token by {name}", words_, details=details)
        yield show.itemised(row, [{"rank": rank} for rank in found])


if __name__ == "__main__":
    show.main(run)
