"""Text from a pooled embedding, by what a corpus says of tokens and their order (ours).

The encoder is run once over a corpus that the attacker has. Which tokens a vector speaks of
(embedding/bag.py), what follows what (embedding/ngrams.py) and the lines nearest to it then guide
a search by sums of single changes (embedding/sum_search.py). Nothing is learnt. On a GPU all
vectors are searched at once; on a CPU one after the other, with fewer tries for each, which reads
texts of up to about 16 tokens. Where nobody gives a corpus, it is the one that ships.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from keyhole.bounds import expect_count
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embedding.corpus import corpus_texts
from keyhole.recover.embedding.counted import SHIPPED, Counted
from keyhole.recover.embedding.scoring import Encoder, matrix_half
from keyhole.recover.embedding.sum_search import Said, SumSearch
from keyhole.recover.leaks import Leak, Pooled
from keyhole.resume import digest

_TOGETHER = {"cuda": 256, "cpu": 1}  # vectors


@dataclass(frozen=True)
class CountedReader:
    """Count a `corpus` (a file of texts, or texts) and search with the counts.

    `longest` is the number of tokens, special ones left out, up to which texts are looked for.
    `counted` are counts that were made before (`learnt` gives them): then nothing is counted.
    """

    corpus: str | Path | Sequence[str] = SHIPPED
    longest: int = 34
    search: SumSearch = field(default_factory=SumSearch)
    counted: Counted | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        expect_count("longest", self.longest)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        target.count.begin(range(len(leaks)))
        counted = self.counted or self._count(Encoder(target, leaks[0].exposure, matrix_half()))
        encoder = counted.encoder
        longest, frame = self._longest(encoder), len(encoder.before + encoder.after)
        once = 0 if self.counted else encoder.passes // len(leaks)
        for some in _groups(leaks, encoder.device.type):
            goals = torch.stack([cast("Pooled", leaks[number]).values for number in some])
            goals = encoder.directions(goals.to(encoder.device))
            lengths = [leaks[number].length or longest + frame for number in some]
            most = max(1, min(longest, max(lengths) - frame))
            readings = self.search(encoder, goals, counted, most, self._said(target, len(some)))
            for number, reading in zip(some, readings, strict=True):
                ids = [*encoder.before, *reading.tokens, *encoder.after]
                passes, loss = reading.passes, 1 - reading.cosine
                yield number, Proposal(ids, passes, passes, once, self.note, loss)

    @property
    def note(self) -> str:
        """What it reads with, in words."""
        if self.corpus == SHIPPED:
            return "read with counts of the corpus that ships"
        return "read with counts of the corpus, nothing learnt"

    @property
    def settings(self) -> dict[str, Any]:
        """What it counts, and how it searches, as JSON can write it."""
        return {
            "search": asdict(self.search),
            "corpus": digest(corpus_texts(self.corpus)),
            "longest": self.longest,
        }

    def learnt(self, target: Target, exposure: Exposure, file: Path | None = None) -> CountedReader:
        """The same with its counts, for many calls; `file` is not needed: counting is quick."""
        del file
        return replace(self, counted=self._count(Encoder(target, exposure, matrix_half())))

    def _count(self, encoder: Encoder) -> Counted:
        words = encoder.target.tokenizer
        progress = encoder.target.track("counting the corpus", 1)
        lines = words(corpus_texts(self.corpus), add_special_tokens=False, truncation=False)[
            "input_ids"
        ]
        counted = Counted.of(encoder, [ids for ids in lines if ids], self._longest(encoder))
        progress(1)
        return counted

    def _said(self, target: Target, count: int) -> Said | None:
        """Progress of a search for many texts; one alone is a step of the whole."""
        if count == 1:
            return None
        progress = target.track("search for texts", count)
        return lambda rounds, read, _: progress(read, note=f"read, {rounds} rounds")

    def _longest(self, encoder: Encoder) -> int:
        frame = len(encoder.before + encoder.after)
        return min(self.longest, encoder.target.parts.longest - frame)


def _groups(leaks: Sequence[Leak], device: str) -> Iterator[range]:
    """Which leaks are searched together: hundreds on a GPU, each on its own on a CPU."""
    size = _TOGETHER[device]
    return (range(start, min(start + size, len(leaks))) for start in range(0, len(leaks), size))
