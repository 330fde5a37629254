"""Text from a pooled embedding on a CPU, by what a corpus says of tokens and their order (ours).

The encoder is run once over a corpus that the attacker has. Which tokens a vector speaks of
(embedding/bag.py), what follows what (embedding/ngrams.py) and the lines nearest to it then propose
texts, and a best-first search (embedding/climb.py) runs the encoder on a few thousand of them. It
reads short texts, of up to about ten tokens; for longer ones a reader is learnt on a GPU
(embedding_reader.py). Where nobody gives a corpus, it is the one that ships.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from keyhole.bounds import expect_count
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embedding.climb import Climb
from keyhole.recover.embedding.corpus import corpus_texts
from keyhole.recover.embedding.counted import SHIPPED, Counted
from keyhole.recover.embedding.scoring import Encoder, matrix_half
from keyhole.recover.leaks import Leak, Pooled
from keyhole.resume import digest


@dataclass(frozen=True)
class CountedReader:
    """Count a `corpus` (a file of texts, or texts) and search with the counts.

    `longest` is the number of tokens, special ones left out, up to which texts are looked for.
    `counted` are counts that were made before (`learnt` gives them): then nothing is counted.
    """

    corpus: str | Path | Sequence[str] = SHIPPED
    longest: int = 18
    search: Climb = field(default_factory=Climb)
    counted: Counted | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        expect_count("longest", self.longest)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        target.count.begin(range(len(leaks)))
        counted = self.counted or self._count(Encoder(target, leaks[0].exposure, matrix_half()))
        encoder = counted.encoder
        frame = len(encoder.before + encoder.after)
        longest = min(self.longest, target.parts.longest - frame)
        once = 0 if self.counted else encoder.passes // len(leaks)
        for number, leak in enumerate(leaks):
            goal = encoder.directions(cast("Pooled", leak).values.to(encoder.device)).cpu()
            most = longest if leak.length is None else max(1, min(longest, leak.length - frame))
            reading = self.search(encoder, goal, counted, most)
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
        counted = Counted.of(encoder, [ids for ids in lines if ids])
        progress(1)
        return counted
