"""Text from one vector, by token statistics of a corpus and a search (ours).

One vector stands for a whole text: a pooled embedding, or the last state of a causal
model, which follows from its next-token logits (final_state.py). The encoder is run
once over the attacker's corpus, or else over the corpus that ships. That gives the odds
of each token for a vector, n-grams, and the nearest lines (counts.py). With these, a
search changes several tokens at once, each chosen by what it does alone
(sum_search.py). No model is trained. On a GPU all vectors are searched at once; on a
CPU one by one, with fewer passes each. A last state depends most on the end of a text,
and a prompt may end anywhere: so for last states, beginnings of lines are counted as
well as whole lines.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from keyhole.core.errors import expect_count
from keyhole.core.journal import digest
from keyhole.core.progress import silent
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Proposal, Proposals, Target
from keyhole.recover.embeddings.counts import SHIPPED, Counted, corpus_texts, effort
from keyhole.recover.embeddings.encoder import Encoder, Texts, matrix_half
from keyhole.recover.embeddings.final_state import vectors_of
from keyhole.recover.embeddings.judge import may_be
from keyhole.recover.embeddings.pooling import likely_prefix
from keyhole.recover.embeddings.sum_search import MayBe, SumSearch
from keyhole.recover.leaks import Leak, Pooled

_BATCH_SIZE = {"cuda": 256, "cpu": 1}  # vectors that are searched at once
_SAME = 1e-6  # 1 − cosine of two vectors that count as equal
_SOME = 12  # lines that show which prefix stands before every text
_ENOUGH = 100  # lines that are counted in any case


@dataclass(frozen=True)
class CountedReader:
    """Count a `corpus` (a file of texts, or texts) and search with the counts.

    `max_length` is the largest number of tokens of a text, special ones left out.
    `counted` are counts that `ready` made before.
    """

    corpus: str | Path | Sequence[str] = SHIPPED
    max_length: int = 34
    search: SumSearch = field(default_factory=SumSearch)
    counted: Counted | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        expect_count("max_length", self.max_length)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Proposals:
        vectors, exposure = vectors_of(target.model, leaks)
        pooled = isinstance(leaks[0], Pooled)
        counted = self.counted
        if counted is None:
            prefix = self._prefix(target, exposure, vectors) if pooled else ""
            counted = self._count(target, exposure, prefix)
        encoder = counted.encoder
        max_length = self._max_length(encoder)
        specials = len(encoder.before + encoder.after)
        counting = 0 if self.counted else encoder.passes // len(leaks)
        size = _BATCH_SIZE[encoder.device.type]
        for start in range(0, len(leaks), size):
            batch = leaks[start : start + size]
            goals = encoder.directions(vectors[start : start + size].to(encoder.device))
            longest = max(leak.length or max_length + specials for leak in batch)
            progress = silent
            if len(batch) > 1:
                progress = target.track("search for texts", len(batch))
            readings = self.search(
                encoder,
                goals,
                counted,
                max(1, min(max_length, longest - specials)),
                progress,
                _plausibility(target, encoder, batch) if pooled else None,
            )
            for number, reading in enumerate(readings):
                tokens = reading.tokens
                if batch[number].length is None:
                    tokens = _shortest(encoder, tokens)
                ids = [*encoder.before, *tokens, *encoder.after]
                passes = reading.passes
                proposal = Proposal(ids, passes, passes, counting, self.note)
                yield start + number, proposal

    @property
    def note(self) -> str:
        """What the text was read with, in words."""
        if self.corpus == SHIPPED:
            return "read with counts of the corpus that ships"
        return "read with counts of the corpus, nothing learnt"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the search and the digest of the corpus, as JSON values."""
        return {
            "search": asdict(self.search),
            "corpus": digest(corpus_texts(self.corpus)),
            "max_length": self.max_length,
        }

    def ready(
        self,
        target: Target,
        exposure: Exposure,
        prefix: str = "",
    ) -> CountedReader:
        """Return a copy that has counted the corpus already, to be called many times.

        `prefix` stands before every text, including those of the corpus.
        """
        return replace(self, counted=self._count(target, exposure, prefix))

    def _prefix(
        self,
        target: Target,
        exposure: Exposure,
        vectors: Tensor,
    ) -> str:
        lines = corpus_texts(self.corpus)[:_SOME]
        return likely_prefix(target.model, target.tokenizer, lines, vectors, exposure)

    def _count(
        self,
        target: Target,
        exposure: Exposure,
        prefix: str,
    ) -> Counted:
        """Count the corpus, with a prefix that the search leaves as it is."""

        def tokenized(texts: list[str]) -> list[list[int]]:
            return target.tokenizer(texts, add_special_tokens=False, truncation=False)[
                "input_ids"
            ]

        before, after = target.frame()
        words = tokenized([prefix])[0] if prefix else []
        encoder = Encoder(target, exposure, matrix_half(), ([*before, *words], after))
        progress = target.track("counting the corpus", 1)
        lines = [ids for ids in tokenized(corpus_texts(self.corpus)) if ids]
        max_length = self._max_length(encoder)
        if self.corpus == SHIPPED:  # any other corpus is counted whole
            lines = lines[: max(_ENOUGH, round(len(lines) * effort(target)))]
        if exposure.pooling == "last":
            lines += beginnings(lines, max_length)
        counted = Counted.of(encoder, lines, max_length)
        progress(1)
        return counted

    def _max_length(self, encoder: Encoder) -> int:
        specials = len(encoder.before + encoder.after)
        return min(self.max_length, encoder.target.parts.max_length - specials)


def beginnings(lines: Sequence[list[int]], max_length: int) -> list[list[int]]:
    """Return each line, cut after a random number of tokens up to `max_length`."""
    stream = random.Random(0)  # noqa: S311 - no secret
    return [line[: stream.randint(1, min(len(line), max_length))] for line in lines]


def _plausibility(
    target: Target,
    encoder: Encoder,
    leaks: Sequence[Leak],
) -> MayBe:
    """Return a test whether a text may be the one behind a pooled embedding."""

    def may_be_text(number: int, tokens: list[int]) -> bool:
        ids = [*encoder.before, *tokens, *encoder.after]
        return may_be(target, cast("Pooled", leaks[number]), ids)

    return may_be_text


def _shortest(encoder: Encoder, tokens: list[int]) -> list[int]:
    """Return one token for a repeated token, if both give the same state (docs/text.md)."""
    if encoder.exposure.pooling != "last" or len(tokens) < 2 or len(set(tokens)) > 1:
        return tokens
    texts = Texts.of([tokens, tokens[:1]], len(tokens), encoder.device)
    repeated, alone = encoder.vectors(texts)
    return tokens[:1] if 1 - repeated @ alone < _SAME else tokens
