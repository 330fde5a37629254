"""Learning a reader from the encoder itself, run on a corpus: minutes on a GPU.

Every step draws texts, runs the encoder on them and on guesses, and asks the reader for the text.
A third have no guess; the others have a damaged copy of the text or, once the reader writes
something sensible, what it wrote itself, so that it learns to mend its own mistakes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.recover.embedding.corpus import Corpus, damaged
from keyhole.recover.embedding.reader import Reader, Size
from keyhole.recover.embedding.scoring import Encoder, Texts

Lengths = tuple[int, int]  # from, to
_ROOM = 2  # tokens by which a guess may be longer than the texts of its batch
_SAMPLES = 4  # texts for each number of a vector, to see how vectors vary
_BLANK = 0.4  # of the texts drawn have no guess
Said = Callable[[float, int, float], None]  # the share of the time, steps, loss


@dataclass(frozen=True, eq=False)
class Examples:
    """Goals (b, d), guesses, some of no tokens, and the texts that are to be written."""

    goals: Tensor
    guesses: Texts
    texts: Texts

    @property
    def parts(self) -> tuple[Tensor, Texts, Texts]:
        return self.goals, self.guesses, self.texts

    def and_(self, other: Examples, rows: Tensor) -> Examples:
        """These and some rows of others."""
        return Examples(
            torch.cat([self.goals, other.goals[rows]]),
            Texts.cat([self.guesses, other.guesses[rows]]),
            Texts.cat([self.texts, other.texts[rows]]),
        )


@dataclass(frozen=True)
class Learning:
    """How a reader is learnt: for so many `seconds` or `steps`, in batches of so many texts."""

    seconds: float = 300.0
    steps: int | None = None  # instead of seconds
    batch: int = 1024
    rate: float = 1e-3
    size: Size = Size()  # noqa: RUF009 - frozen
    own: float = 0.25  # of the time: from here on the reader's own texts are among the guesses
    pool: int = 49152  # of them at a time
    every: int = 250  # steps: then they are written anew
    seed: int = 0

    def __call__(self, encoder: Encoder, corpus: Corpus, said: Said | None = None) -> Reader:
        device = encoder.device
        generator = torch.Generator(device).manual_seed(self.seed)
        reader = self.blank(encoder, corpus)
        blocks = list(reader.blocks)
        if device.type == "cuda":
            blocks = [torch.compile(block, dynamic=False) for block in blocks]
        optimizer = torch.optim.AdamW(
            reader.parameters(), lr=self.rate, betas=(0.9, 0.98), weight_decay=0.01,
            fused=device.type == "cuda",
        )  # fmt: skip
        pools: dict[Lengths, Examples] = {}
        started, steps = time.perf_counter(), 0
        while (share := self._share(started, steps)) < 1:
            if share > self.own and steps % self.every == 0:
                for lengths in self.lengths():
                    pools[lengths] = self._own(reader, encoder, corpus, lengths, pools, generator)
            lengths = self.lengths()[steps % len(self.lengths())]
            examples = self._examples(encoder, corpus, lengths, pools, generator)
            with torch.autocast(device.type, torch.bfloat16):
                loss = reader.loss(*examples.parts, blocks)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = self.rate * _schedule(share, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps += 1
            if said and steps % 50 == 0:
                said(share, steps, float(loss.detach()))
        return reader.eval()

    def blank(self, encoder: Encoder, corpus: Corpus) -> Reader:
        """A reader that has learnt nothing, of vectors compared as they vary over the corpus."""
        torch.manual_seed(self.seed)
        generator = torch.Generator(encoder.device).manual_seed(self.seed)
        vector = encoder.vectors(corpus.draw(2, generator)).shape[-1]
        encoder.whiten(corpus.draw(_SAMPLES * vector, generator))
        return Reader(encoder, vector, self.size).to(encoder.device)

    def _share(self, started: float, steps: int) -> float:
        """How much of the learning is done."""
        if self.steps is not None:
            return steps / self.steps
        return (time.perf_counter() - started) / self.seconds

    def lengths(self) -> list[Lengths]:
        """Texts of like length are learnt from together: padding is work for nothing."""
        parts = min(4, self.size.longest)
        edges = [self.size.longest * part // parts for part in range(parts + 1)]
        return [(a + 1, b) for a, b in itertools.pairwise(edges)]

    def _examples(
        self, encoder: Encoder, corpus: Corpus, lengths: Lengths,
        pools: dict[Lengths, Examples], generator: torch.Generator,
    ) -> Examples:  # fmt: skip
        """A batch: texts with no guess, with a damaged one, and with the reader's own."""
        own = self.batch // 2 if lengths in pools else 0
        texts = corpus.draw(self.batch - own, generator, lengths)
        goals = encoder.vectors(texts, fast=True)
        guesses = damaged(texts, corpus, generator).padded(lengths[1] + _ROOM)
        blank = torch.rand(len(texts), generator=generator, device=goals.device) < _BLANK
        guesses = Texts(guesses.ids, guesses.lengths.where(~blank, 0))
        examples = Examples(goals, guesses, texts)
        if not own:
            return examples
        pool = pools[lengths]
        rows = torch.randint(0, len(pool.texts), (own,), generator=generator, device=goals.device)
        return examples.and_(pool, rows)

    def _own(
        self, reader: Reader, encoder: Encoder, corpus: Corpus, lengths: Lengths,
        pools: dict[Lengths, Examples], generator: torch.Generator,
    ) -> Examples:  # fmt: skip
        """Texts with what the reader writes for them: half anew, half mending what it wrote."""
        size = self.pool // len(self.lengths())
        kept = size // 2 if lengths in pools else 0
        texts = corpus.draw(size - kept, generator, lengths)
        goals = encoder.vectors(texts, fast=True)
        width = lengths[1] + _ROOM
        fresh = Examples(goals, write_all(reader, goals, None, generator).padded(width), texts)
        if not kept:
            return fresh
        before, rows = pools[lengths], torch.arange(kept, device=goals.device)
        goals, guesses, texts = before.goals[rows], before.guesses[rows], before.texts[rows]
        mended = write_all(reader, goals, guesses, generator).padded(width)
        return fresh.and_(Examples(goals, mended, texts), rows)


def _schedule(share: float, steps: int) -> float:
    """The learning rate, of its peak: a short climb, then half a cosine over the time given."""
    return min(1.0, (steps + 1) / 200) * max(0.02, 0.5 * (1 + math.cos(math.pi * share)))


def write_all(
    reader: Reader, goals: Tensor, guesses: Texts | None, generator: torch.Generator,
    kept: Tensor | None = None, at_once: int = 16384,
) -> Texts:  # fmt: skip
    """What the reader writes for many rows, each with another heat, in parts that fit memory."""
    parts: list[Texts] = []
    heat = torch.rand(len(goals), generator=generator, device=goals.device)
    with torch.autocast(goals.device.type, torch.bfloat16, enabled=goals.is_cuda):
        for rows in torch.arange(len(goals), device=goals.device).split(at_once):
            some = None if guesses is None else guesses[rows]
            first = None if kept is None else kept[rows]
            parts.append(reader.write(goals[rows], some, heat[rows], generator, first))
    return Texts.cat(parts)
