"""Text from one vector, by token statistics of a corpus and a search (ours).

One vector stands for a whole text: a pooled embedding, or the last state of a causal model, which
its next-token logits give away (final_state.py). The encoder is run once over a corpus that the
attacker has; without one, over the corpus that ships. That gives the odds of each token for a
vector, n-grams and the nearest lines (counts.py). They guide a search that changes several tokens
at once, each chosen by what it does alone (sum_search.py). No model is trained. On a GPU all
vectors are searched at once; on a CPU one by one, with fewer tries each. A last state says most
about how a text ends, and a prompt may end anywhere: so for last states, beginnings of lines are
counted as well as whole lines.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from keyhole.core.errors import expect_count
from keyhole.core.journal import digest
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embeddings.counts import SHIPPED, Counted, corpus_texts, effort
from keyhole.recover.embeddings.encoder import Encoder, Texts, matrix_half
from keyhole.recover.embeddings.final_state import vectors_of
from keyhole.recover.embeddings.judge import may_be
from keyhole.recover.embeddings.pooling import likely_prefix
from keyhole.recover.embeddings.sum_search import MayBe, Notify, SumSearch
from keyhole.recover.leaks import Leak, Pooled

_BATCH_SIZE = {"cuda": 256, "cpu": 1}  # vectors that are searched at once
_SAME = 1e-6  # 1 − cosine
_SOME = 12  # lines that show which words stand before every text
_ENOUGH = 100  # lines that are counted in any case


@dataclass(frozen=True)
class CountedReader:
    """Count a `corpus` (a file of texts, or texts) and search with the counts.

    `max_length` is the number of tokens, special ones left out, up to which texts are looked for.
    `counted`: counts made before, by `ready`, so that the corpus is not counted again.
    """

    corpus: str | Path | Sequence[str] = SHIPPED
    max_length: int = 34
    search: SumSearch = field(default_factory=SumSearch)
    counted: Counted | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        expect_count("max_length", self.max_length)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        vectors, exposure = vectors_of(target.model, leaks)
        counted = self.counted
        if counted is None:
            prefix = self._prefix(target, exposure, vectors) if isinstance(leaks[0], Pooled) else ""
            counted = self._count(_encoder(target, exposure, prefix))
        encoder = counted.encoder
        max_length, specials = self._max_length(encoder), len(encoder.before + encoder.after)
        counting = 0 if self.counted else encoder.passes // len(leaks)
        size = _BATCH_SIZE[encoder.device.type]
        for start in range(0, len(leaks), size):
            batch = range(start, min(start + size, len(leaks)))
            goals = encoder.directions(vectors[list(batch)].to(encoder.device))
            lengths = [leaks[number].length or max_length + specials for number in batch]
            readings = self.search(
                encoder, goals, counted, max(1, min(max_length, max(lengths) - specials)),
                self._notify(target, len(batch)),
                _plausibility(target, encoder, [leaks[number] for number in batch]),
            )  # fmt: skip
            for number, reading in zip(batch, readings, strict=True):
                tokens = reading.tokens
                if leaks[number].length is None:
                    tokens = _shortest(encoder, tokens)
                ids = [*encoder.before, *tokens, *encoder.after]
                passes, loss = reading.passes, 1 - reading.cosine
                yield number, Proposal(ids, passes, passes, counting, self.note, loss)

    @property
    def note(self) -> str:
        """What it reads with, for a person to read."""
        if self.corpus == SHIPPED:
            return "read with counts of the corpus that ships"
        return "read with counts of the corpus, nothing learnt"

    @property
    def settings(self) -> dict[str, Any]:
        """What it counts and how it searches, as JSON values."""
        return {
            "search": asdict(self.search),
            "corpus": digest(corpus_texts(self.corpus)),
            "max_length": self.max_length,
        }

    def ready(self, target: Target, exposure: Exposure, prefix: str = "") -> CountedReader:
        """A copy that has counted the corpus already, to be called many times.

        `prefix` are words that stand before every text, of the corpus too.
        """
        return replace(self, counted=self._count(_encoder(target, exposure, prefix)))

    def _prefix(self, target: Target, exposure: Exposure, vectors: Tensor) -> str:
        lines = corpus_texts(self.corpus)[:_SOME]
        return likely_prefix(target.model, target.tokenizer, lines, vectors, exposure)

    def _count(self, encoder: Encoder) -> Counted:
        progress = encoder.target.track("counting the corpus", 1)
        tokenized = encoder.target.tokenizer(
            corpus_texts(self.corpus), add_special_tokens=False, truncation=False
        )
        lines = [ids for ids in tokenized["input_ids"] if ids]
        max_length = self._max_length(encoder)
        if self.corpus == SHIPPED:  # a corpus of one's own is counted whole
            lines = lines[: max(_ENOUGH, round(len(lines) * effort(encoder.target)))]
        if encoder.exposure.pooling == "last":
            lines += beginnings(lines, max_length)
        counted = Counted.of(encoder, lines, max_length)
        progress(1)
        return counted

    def _notify(self, target: Target, count: int) -> Notify | None:
        """What shows progress within a batch; a batch of one text needs nothing."""
        if count == 1:
            return None
        progress = target.track("search for texts", count)
        return lambda rounds, read, _: progress(read, note=f"read, {rounds} rounds")

    def _max_length(self, encoder: Encoder) -> int:
        specials = len(encoder.before + encoder.after)
        return min(self.max_length, encoder.target.parts.max_length - specials)


def _encoder(target: Target, exposure: Exposure, prefix: str) -> Encoder:
    """Of texts that begin with the words of `prefix`, which the search leaves as they are."""
    before, after = target.frame()
    words = target.tokenizer(prefix, add_special_tokens=False)["input_ids"] if prefix else []
    return Encoder(target, exposure, matrix_half(), ([*before, *words], after))


def beginnings(lines: Sequence[list[int]], max_length: int, seed: int = 0) -> list[list[int]]:
    """Each line, cut after a random number of tokens up to `max_length`."""
    stream = random.Random(seed)  # noqa: S311 - no secret
    return [line[: stream.randint(1, min(len(line), max_length))] for line in lines]


def _plausibility(target: Target, encoder: Encoder, leaks: Sequence[Leak]) -> MayBe | None:
    """A test whether a text may be the one behind a pooled embedding; None for other leaks."""
    if not isinstance(leaks[0], Pooled):
        return None

    def may_be_text(number: int, tokens: list[int]) -> bool:
        ids = [*encoder.before, *tokens, *encoder.after]
        return may_be(target, cast("Pooled", leaks[number]), ids)

    return may_be_text


def _shortest(encoder: Encoder, tokens: list[int]) -> list[int]:
    """One token for a token repeated, if both give the same state (docs/text.md)."""
    if encoder.exposure.pooling != "last" or len(tokens) < 2 or len(set(tokens)) > 1:
        return tokens
    texts = Texts.of([tokens, tokens[:1]], len(tokens), encoder.device)
    repeated, alone = encoder.vectors(texts)
    return tokens[:1] if float(1 - repeated @ alone) < _SAME else tokens
