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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from keyhole.bounds import expect_count
from keyhole.files import exists
from keyhole.models.capture import Exposure
from keyhole.models.loading import identity
from keyhole.progress import Track
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.embedding.corpus import Corpus, corpus_texts
from keyhole.recover.embedding.learn import Learning
from keyhole.recover.embedding.reader import Reader
from keyhole.recover.embedding.saved import load_reader, save_reader
from keyhole.recover.embedding.scoring import Encoder
from keyhole.recover.embedding.search import Search
from keyhole.recover.final_state import vectors_of
from keyhole.recover.leaks import Leak
from keyhole.results import environment
from keyhole.resume import Run, digest

FIX = "give --force to learn anew, or remove this file"


@dataclass(frozen=True)
class EmbeddingReader:
    """Learn a reader from a `corpus` (a file of texts, or texts) and search with it.

    `longest` is the number of tokens, special ones left out, up to which texts are looked for.
    `reader` is one that was learnt before (`learnt` gives it): then nothing is learnt.
    """

    corpus: str | Path | Sequence[str]
    longest: int = 34
    learning: Learning = field(default_factory=Learning)
    search: Search = field(default_factory=Search)
    reader: Reader | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        expect_count("longest", self.longest)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        vectors, exposure = vectors_of(target.model, leaks)
        reader = self.reader or self._learn(Encoder(target, exposure), target.track)
        encoder = reader.encoder
        learning = 0 if self.reader else encoder.passes
        before = encoder.passes
        goals = encoder.directions(vectors.to(encoder.device))
        progress = target.track("search for texts", self.search.rounds)
        pools = self.search(
            encoder, goals, reader, reader.size.longest,
            lambda rounds, read, _: progress(rounds, note=f"rounds, {read} of {len(leaks)} read"),
        )  # fmt: skip
        each = (encoder.passes - before) // len(leaks)
        for number in range(len(leaks)):
            length = int(pools.best_lengths[number])
            inside = pools.best_ids[number, :length].tolist()
            ids = [*encoder.before, *inside, *encoder.after]
            loss = 1 - float(pools.best[number])
            yield number, Proposal(ids, each, each, learning // len(leaks), loss=loss)

    @property
    def settings(self) -> dict[str, Any]:
        """What it learns from, and how it learns and searches, as JSON can write it."""
        return {"search": asdict(self.search), **self._learns_from()}

    def made_from(self, target: Target, exposure: Exposure) -> Run:
        """All that the reader follows from."""
        return {
            "run": "embedding reader", "keyhole": environment()["keyhole"],
            "encoder": identity(target.model), "pooling": exposure.pooling, **self._learns_from(),
        }  # fmt: skip

    def learnt(
        self, target: Target, exposure: Exposure, file: Path | None = None
    ) -> EmbeddingReader:
        """The same with its reader, for many calls; `file` keeps it, and one there is taken."""
        encoder = Encoder(target, exposure)
        run = self.made_from(target, exposure)
        if file is not None and exists(file):
            blank = self._learning(encoder).blank(encoder, self._corpus(encoder))
            return replace(self, reader=load_reader(file, blank, run, FIX))
        reader = self._learn(encoder, target.track)
        if file is not None:
            save_reader(file, reader, run)
        return replace(self, reader=reader)

    def _learn(self, encoder: Encoder, track: Track) -> Reader:
        learning = self._learning(encoder)
        total, unit = learning.steps or max(1, round(learning.seconds)), "seconds"
        progress = track("learning to read", total)
        if learning.steps is not None:
            unit = "steps"
        return learning(
            encoder, self._corpus(encoder),
            lambda share, _, loss: progress(int(share * total), note=f"{unit}, loss {loss:.2f}"),
        )  # fmt: skip

    def _learning(self, encoder: Encoder) -> Learning:
        size = replace(self.learning.size, longest=self._longest(encoder))
        return replace(self.learning, size=size)

    def _corpus(self, encoder: Encoder) -> Corpus:
        words, longest = encoder.target.tokenizer, self._longest(encoder)
        return Corpus.of(words, corpus_texts(self.corpus), longest, encoder.table)

    def _longest(self, encoder: Encoder) -> int:
        frame = len(encoder.before + encoder.after)
        return min(self.longest, encoder.target.parts.longest - frame)

    def _learns_from(self) -> dict[str, Any]:
        return {
            "corpus": digest(corpus_texts(self.corpus)), "longest": self.longest,
            "learning": asdict(self.learning),
        }  # fmt: skip
