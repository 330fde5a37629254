"""Text from one vector, by a reader that was learnt from the encoder on a corpus (ours).

One vector stands for a whole text: a pooled embedding, or the last state of a causal model, which
its next-token logits give away (final_state.py). But the weights are known and the true text gives
the vector back to rounding: a search with a perfect test for having arrived (embedding/search.py).
What makes it short is a reader (embedding/reader.py), learnt in minutes from texts that the
attacker has. The nearer those are to the texts behind the vectors, the more it reads; none of them
has to be among them. On a CPU it takes small encoders and short texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from keyhole.bounds import expect_count
from keyhole.data import read_texts
from keyhole.errors import InputError
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embedding.corpus import Corpus
from keyhole.recover.embedding.learn import Learning
from keyhole.recover.embedding.scoring import Encoder
from keyhole.recover.embedding.search import Search
from keyhole.recover.final_state import vectors_of
from keyhole.recover.leaks import Leak

_SAMPLES = 4  # texts for each number of a vector, to see how vectors vary


@dataclass(frozen=True)
class EmbeddingReader:
    """Learn a reader from a `corpus` (a file of texts, or texts) and search with it.

    `longest` is the number of tokens, special ones left out, up to which texts are looked for.
    """

    corpus: str | Path | Sequence[str]
    longest: int = 34
    learning: Learning = field(default_factory=Learning)
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        expect_count("longest", self.longest)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        vectors, exposure = vectors_of(target.model, leaks)
        encoder = Encoder(target, exposure)
        longest = min(self.longest, target.parts.longest - len(encoder.before + encoder.after))
        corpus = Corpus.of(target.tokenizer, self._texts(), longest, encoder.table)
        if target.parts.causal:
            generator = torch.Generator(encoder.device).manual_seed(self.learning.seed)
            encoder.whiten(corpus.draw(_SAMPLES * vectors.shape[1], generator))
        size = replace(self.learning.size, longest=longest)
        reader = replace(self.learning, size=size)(encoder, corpus)
        learning = encoder.passes
        goals = encoder.directions(vectors.to(encoder.device))
        pools = self.search(encoder, goals, reader, longest)
        each = (encoder.passes - learning) // len(leaks)
        for number in range(len(leaks)):
            length = int(pools.best_lengths[number])
            inside = pools.best_ids[number, :length].tolist()
            ids = [*encoder.before, *inside, *encoder.after]
            loss = 1 - float(pools.best[number])
            yield number, Proposal(ids, each, each, learning // len(leaks), loss=loss)

    def _texts(self) -> Sequence[str]:
        texts = self.corpus
        if isinstance(texts, str | Path):
            texts = read_texts(texts)
        if not any(text.strip() for text in texts):
            raise InputError(f"expected texts to learn from, got none in {self.corpus}")
        return texts
