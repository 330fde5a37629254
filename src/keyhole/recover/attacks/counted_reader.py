"""Text from a pooled embedding on a CPU, by what a corpus says of tokens and their order (ours).

The encoder is run once over a corpus that the attacker has. Which tokens a vector speaks of
(embedding/bag.py), what follows what (embedding/ngrams.py) and the lines nearest to it then propose
texts, and a best-first search (embedding/climb.py) runs the encoder on a few thousand of them. It
reads short texts, of up to about ten tokens; for longer ones a reader is learnt on a GPU
(embedding_reader.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from torch.nn.functional import normalize

from keyhole.bounds import expect_count
from keyhole.data import read_texts
from keyhole.errors import InputError
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embedding.climb import Climb
from keyhole.recover.embedding.counted import Counted
from keyhole.recover.embedding.scoring import Encoder, matrix_half
from keyhole.recover.leaks import Leak, Pooled


@dataclass(frozen=True)
class CountedReader:
    """Count a `corpus` (a file of texts, or texts) and search with the counts.

    `longest` is the number of tokens, special ones left out, up to which texts are looked for.
    """

    corpus: str | Path | Sequence[str]
    longest: int = 12
    search: Climb = field(default_factory=Climb)

    def __post_init__(self) -> None:
        expect_count("longest", self.longest)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        encoder = Encoder(target, leaks[0].exposure, half=matrix_half())
        longest = min(self.longest, target.parts.longest - len(encoder.before + encoder.after))
        target.count.begin(range(len(leaks)))
        lines = target.tokenizer(self._texts(), add_special_tokens=False, truncation=False)
        counted = Counted.of(encoder, [ids for ids in lines["input_ids"] if ids])
        once = encoder.passes // len(leaks)
        note = "read with counts of the corpus, nothing learnt"
        for number, leak in enumerate(leaks):
            goal = normalize(cast("Pooled", leak).values.float().cpu(), dim=-1)
            reading = self.search(encoder, goal, counted, longest)
            ids = [*encoder.before, *reading.tokens, *encoder.after]
            passes, loss = reading.passes, 1 - reading.cosine
            yield number, Proposal(ids, passes, passes, once, note, loss)

    def _texts(self) -> list[str]:
        texts = self.corpus
        if isinstance(texts, str | Path):
            texts = read_texts(texts)
        texts = [text.strip() for text in texts if text.strip()]
        if not texts:
            raise InputError(f"expected texts to count, got none in {self.corpus}")
        return texts
