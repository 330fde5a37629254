"""Encoder passes that it takes to read a text: ours against a search by the gradient's moves.

The older search (measured first, and described in docs/embeddings.md) knows the length of a text.
It has four islands of eight texts; in each of 40 rounds every text gives about 1,400 substitutions
out of the 128 best tokens by gradient at each place, 500 out of the 64 that fit best between their
neighbours by bigrams of the corpus, 400 moves of a segment, 500 tokens left out with another put in
elsewhere, and 300 pairs of substitutions. The best 96 of an island are run exactly, eight are kept
with noise on their scores that is annealed away; an island that stands still begins anew, at random
or from the best text with a third of its tokens replaced. It stops at a cosine of 0.99999.

Ours does not know the length. Both get the same sentences of SST-2's development set, of `--tokens`
tokens, and the same corpus. `--quick` takes a random-weight model.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import show
import subjects
from keyhole.data import read_texts
from keyhole.models import Loaded
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.changes import gumbel
from keyhole.recover.embeddings.counts import Counted, NGrams
from keyhole.recover.embeddings.encoder import Encoder, Texts, matrix_half
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch
from show import Row


@dataclass(frozen=True)
class GradientSearch:
    """How many texts are kept and tried in each round, for one vector."""

    rounds: int = 40
    populations: int = 4
    kept: int = 8
    by_gradient: int = 1400
    by_order: int = 500
    segments: int = 400
    displaced: int = 500
    pairs: int = 300
    exact: int = 96  # of an island, that are run exactly
    heat: float = 0.01
    patience: int = 6
    arrived: float = 1e-5

    def __call__(
        self, encoder: Encoder, goal: Tensor, length: int, ngrams: NGrams, seed: int = 0
    ) -> tuple[list[int], int]:
        """The tokens found, and the passes it took."""
        before = encoder.passes
        state = _State(encoder, goal, ngrams, length, seed)
        pools = [state.anew(self.kept) for _ in range(self.populations)]
        best, nearest = pools[0][0], -2.0
        peaks, still = [-2.0] * self.populations, [0] * self.populations
        for number in range(self.rounds):
            heat = self.heat * max(0.0, 1 - number / (0.8 * self.rounds))
            for island, pool in enumerate(pools):
                pools[island], top = self._round(state, pool, heat)
                if top > nearest:
                    best, nearest = state.nearest, top
                still[island] = 0 if top > peaks[island] + 1e-4 else still[island] + 1
                peaks[island] = max(peaks[island], top)
                if still[island] >= self.patience:
                    half = number % 2 == 0
                    pools[island] = state.anew(self.kept) if half else state.shaken(best, self.kept)
                    peaks[island], still[island] = -2.0, 0
                if nearest > 1 - self.arrived:
                    return best.tolist(), encoder.passes - before
        return best.tolist(), encoder.passes - before

    def _round(self, state: _State, pool: Tensor, heat: float) -> tuple[Tensor, float]:
        """The next pool (kept, n) of an island, and its largest cosine."""
        steep, fitting = state.by_gradient(pool), state.by_order(pool)
        children = torch.cat(
            [
                pool,
                state.replaced(pool, steep, self.by_gradient),
                state.replaced(pool, fitting, self.by_order),
                state.moved(pool, self.segments),
                state.displaced(pool, torch.cat([steep, fitting], -1), self.displaced),
                state.replaced(pool, steep, self.pairs, times=2),
            ]
        ).unique(dim=0)
        cosines = state.cosines(children, fast=True)
        few = children[cosines.topk(min(self.exact, len(children))).indices]
        cosines = state.cosines(few)
        state.nearest = few[cosines.argmax()]
        chance = torch.randn(cosines.shape, generator=state.generator, device=cosines.device)
        kept = (cosines + heat * chance).topk(min(self.kept, len(few))).indices
        return few[kept], float(cosines.max())


class _State:
    """One vector, and moves of texts (p, n) of its length."""

    def __init__(
        self, encoder: Encoder, goal: Tensor, ngrams: NGrams, length: int, seed: int
    ) -> None:
        self.encoder, self.goal, self.ngrams, self.n = encoder, goal, ngrams, length
        self.generator = torch.Generator(encoder.device).manual_seed(seed)
        size = len(encoder.table)
        self.words = torch.arange(size, device=encoder.device)
        self.barred = torch.zeros(size, dtype=torch.bool, device=encoder.device)
        self.barred[[*encoder.before, *encoder.after, encoder.pad]] = True
        self.nearest = torch.zeros(length, dtype=torch.long, device=encoder.device)

    def anew(self, count: int) -> Tensor:
        """Texts of frequent tokens at random."""
        odds = self.ngrams.ends[:-1].log().masked_fill(self.barred, -torch.inf)
        odds = odds.expand(count * self.n, -1)
        return (odds + gumbel(odds, self.generator)).argmax(-1).view(count, self.n)

    def shaken(self, text: Tensor, count: int) -> Tensor:
        """A text with a third of its tokens replaced."""
        hit = self._luck(count, self.n) < 1 / 3
        return torch.where(hit, self.anew(count), text)

    def cosines(self, ids: Tensor, fast: bool = False) -> Tensor:
        return self.encoder.vectors(self._texts(ids), fast=fast).float() @ self.goal

    def by_gradient(self, pool: Tensor) -> Tensor:
        """The best 128 tokens (p, n, 128) at each place."""
        _, slopes = self.encoder.slopes(self._texts(pool), self.goal.expand(len(pool), -1))
        gains = slopes @ self.encoder.table.T.to(slopes.dtype)
        gains = gains.masked_fill(self.barred, -torch.inf)
        return gains.topk(min(128, gains.shape[-1]), dim=-1).indices

    def by_order(self, pool: Tensor) -> Tensor:
        """The 64 tokens (p, n, 64) that fit best between their neighbours."""
        row = self.ngrams.framed(self._texts(pool))
        shape = (*pool.shape, len(self.words))
        words = self.words.expand(shape)
        left, right = (side[..., None].expand(shape) for side in (row[:, :-2], row[:, 2:]))
        fit = self.ngrams.pairs(left, words) + self.ngrams.pairs(words, right)
        fit = fit.masked_fill(self.barred, -torch.inf)
        return fit.topk(min(64, fit.shape[-1]), dim=-1).indices

    def replaced(self, pool: Tensor, tokens: Tensor, count: int, times: int = 1) -> Tensor:
        """`count` texts of each, tokens replaced by one of those (p, n, m) for their places."""
        rows = self._each(pool, count)
        ids = pool[rows]
        for _ in range(times):
            places = self._whole(self.n, len(rows))
            chosen = tokens[rows, places, self._whole(tokens.shape[-1], len(rows))]
            ids = ids.scatter(1, places[:, None], chosen[:, None])
        return ids

    def moved(self, pool: Tensor, count: int) -> Tensor:
        """A segment of 1–7 tokens goes to another place."""
        rows = self._each(pool, count)
        size = 1 + self._whole(min(7, self.n), len(rows))
        start = (self._luck(len(rows)) * (self.n - size + 1)).long()
        goes = (self._luck(len(rows)) * (self.n - size + 1)).long()
        places = torch.arange(self.n, device=pool.device).expand(len(rows), -1)
        inside = (places >= start[:, None]) & (places < (start + size)[:, None])
        rest = places - size[:, None] * (places >= (start + size)[:, None])
        shift = size[:, None] * (rest >= goes[:, None])
        target = torch.where(inside, places - start[:, None] + goes[:, None], rest + shift)
        return torch.empty_like(pool[rows]).scatter(1, target, pool[rows])

    def displaced(self, pool: Tensor, tokens: Tensor, count: int) -> Tensor:
        """A token left out, and another put in elsewhere."""
        rows = self._each(pool, count)
        gone, goes = self._whole(self.n, len(rows)), self._whole(self.n, len(rows))
        places = torch.arange(self.n, device=pool.device).expand(len(rows), -1)
        target = places - (places > gone[:, None]).long()
        target = target + (target >= goes[:, None]).long()
        target = torch.where(places == gone[:, None], goes[:, None], target)
        texts_ = torch.empty_like(pool[rows]).scatter(1, target, pool[rows])
        chosen = tokens[rows, goes, self._whole(tokens.shape[-1], len(rows))]
        return texts_.scatter(1, goes[:, None], chosen[:, None])

    def _texts(self, ids: Tensor) -> Texts:
        return Texts(ids, torch.full((len(ids),), self.n, device=ids.device))

    def _each(self, pool: Tensor, count: int) -> Tensor:
        return torch.arange(len(pool), device=pool.device).repeat_interleave(count)

    def _luck(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.goal.device)

    def _whole(self, below: int, count: int) -> Tensor:
        return torch.randint(0, below, (count,), generator=self.generator, device=self.goal.device)


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 20,
    tokens: str = "10-16",
) -> Iterator[Row]:
    if quick:
        loaded = subjects.tiny("bert", words=96)
        lines = subjects.random_lines(loaded, 120, 2, 3)
        corpus, secrets, (least, most), max_length = lines[3:], lines[:3], (2, 3), 3
        older, ours = GradientSearch(3, 2, 2, 40, 20, 10, 10, 10, 8), SumSearch(passes=400)
    else:
        loaded = subjects.minilm(encoder, device)
        corpus = read_texts(data / "sst2" / "train.tsv")
        secrets = read_texts(data / "sst2" / "dev.tsv")
        ((least, most),) = subjects.lengths(tokens)
        max_length = CountedReader(corpus=()).max_length
        older, ours = GradientSearch(), SumSearch()

    def encoded(lines: Sequence[str]) -> list[list[int]]:
        stripped = [line.strip() for line in lines if line.strip()]
        return loaded.tokenizer(stripped, add_special_tokens=False)["input_ids"]

    lines = encoded(corpus)
    known = set(map(tuple, lines))
    fresh = [x for x in encoded(secrets) if least <= len(x) <= most and tuple(x) not in known]
    random.Random(0).shuffle(fresh)
    yield from compared(loaded, lines, fresh[:texts], max_length, older, ours, None if quick else 3)


def compared(
    loaded: Loaded, lines: list[list[int]], secrets: list[list[int]], max_length: int,
    older: GradientSearch, ours: SumSearch, fewer: float | None,
) -> Iterator[Row]:  # fmt: skip
    target = Target.of(loaded.model, loaded.tokenizer)
    encoder = Encoder(target, half=matrix_half())
    counted = Counted.of(encoder, lines, max_length)
    goals = encoder.vectors(Texts.of(secrets, max_length, encoder.device))
    groups = [goals] if goals.is_cuda else goals.split(1)
    readings = [
        reading for group in groups for reading in ours(encoder, group, counted, max_length)
    ]
    passes = [reading.passes for reading in readings]
    exact = sum(r.tokens == secret for r, secret in zip(readings, secrets, strict=True))
    plain = Encoder(target, half=matrix_half())  # compares vectors as they are
    goals = plain.vectors(Texts.of(secrets, max_length, plain.device))
    answers = [
        older(plain, goal, len(secret), counted.ngrams)
        for goal, secret in zip(goals, secrets, strict=True)
    ]
    reached = sum(tokens == secret for (tokens, _), secret in zip(answers, secrets, strict=True))
    took = statistics.mean(count for _, count in answers)
    mine = statistics.mean(passes)
    yield Row(
        "moves by the gradient and bigrams, length known",
        f"{reached} of {len(secrets)} exact",
        details=f"{took:,.0f} passes a text",
    )
    yield Row(
        "ours, length unknown",
        f"{exact} of {len(secrets)} exact",
        f">= as many, >= {fewer} × fewer passes" if fewer else "",
        fewer is None or (exact >= reached and took >= fewer * mine),
        f"{mine:,.0f} passes a text, {took / mine:.1f} × fewer",
    )


if __name__ == "__main__":
    show.main(run)
