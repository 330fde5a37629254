"""The search for the texts behind many vectors at once.

Every vector has a few islands, each with a pool of the best texts so far. In a round the reader
mends the best of them, several times with different luck, anew from a place in the middle of some;
the best of all is changed by single moves (moves.py), with the tokens that the reader and the
gradient point at; all are run through the encoder, in half precision on a GPU, and the best that
differ are kept and run exactly. Noise on the scores, less of it in each round, keeps a pool from
closing in too early; every few rounds the worst island forgets what it had. A vector leaves as soon
as a text gives it back within its precision, so that the hard ones get the machine to themselves.

The cosine alone leads into heaps of the right words in no sensible order, from which no single move
leads out. So each island scores texts by cos + λ·log p, with the reader's log p of the text given
the vector alone and a λ of its own, from zero on: they keep different texts, and exchange them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keyhole.recover.embedding import moves
from keyhole.recover.embedding.islands import best_of_each
from keyhole.recover.embedding.learn import write_all
from keyhole.recover.embedding.luck import gumbel
from keyhole.recover.embedding.reader import Reader
from keyhole.recover.embedding.scoring import Encoder, Texts

Said = Callable[[int, int, int], None]  # rounds, arrived, passes
_NONE = -2.0  # the cosine of no text
_SET_BACK = 0.05  # of a cosine
_STEEP = 0.5  # standard deviations over the vocabulary: noise on what the gradient promises
# Attention without the kernels that are planned anew for each shape: here every call has its own.
_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(eq=False)
class Pools:
    """The best k texts of each island, v·i rows; those of one vector stand together."""

    goals: Tensor  # (v·i, d)
    ids: Tensor  # (v·i, k, n)
    lengths: Tensor  # (v·i, k)
    cosines: Tensor  # (v·i, k), -2 where there is no text yet
    likelihoods: Tensor  # (v·i, k), log p
    trust: Tensor  # (v·i,), λ
    islands: int
    best: Tensor = field(init=False)  # (v,) the largest cosine so far, and its text
    best_ids: Tensor = field(init=False)
    best_lengths: Tensor = field(init=False)

    @classmethod
    def empty(cls, goals: Tensor, trust: tuple[float, ...], kept: int, longest: int) -> Pools:
        islands = len(trust)
        rows = goals.repeat_interleave(islands, 0)
        v = len(rows)
        ids = torch.zeros(v, kept, longest, dtype=torch.long, device=goals.device)
        pools = cls(
            rows, ids, torch.ones_like(ids[..., 0]), goals.new_full((v, kept), _NONE),
            goals.new_zeros(v, kept), goals.new_tensor(trust).repeat(len(goals)), islands,
        )  # fmt: skip
        pools.best = goals.new_full((len(goals),), _NONE)
        pools.best_ids = ids[::islands, 0].clone()
        pools.best_lengths = torch.ones_like(pools.best_ids[:, 0])
        return pools

    @property
    def scores(self) -> Tensor:
        """cos + λ·log p (v·i, k), in descending order."""
        return self.cosines + self.trust[:, None] * self.likelihoods

    def texts(self, rows: Tensor, best: int) -> Texts:
        """The best texts of some islands, one after the other."""
        return Texts(self.ids[rows, :best].flatten(0, 1), self.lengths[rows, :best].flatten())

    def note(self) -> None:
        """Keep the best text of every vector, whatever becomes of its island."""
        top, place = self.cosines.view(-1, self.islands, self.cosines.shape[1]).flatten(1).max(1)
        better = top > self.best
        kept = self.cosines.shape[1]
        row = torch.arange(len(top), device=top.device) * self.islands + place // kept
        self.best = torch.where(better, top, self.best)
        self.best_ids[better] = self.ids[row, place % kept][better]
        self.best_lengths[better] = self.lengths[row, place % kept][better]

    def open_(self, arrived: float) -> Tensor:
        """The rows whose vector has no text yet."""
        return (self.best < 1 - arrived).repeat_interleave(self.islands).nonzero().flatten()


@dataclass(frozen=True)
class Search:
    """How much is tried: `rounds`, islands with pools, and how many proposals of each kind."""

    rounds: int = 30
    trust: tuple[float, ...] = (0.0, 5e-4, 1e-3, 2e-3)  # in the reader's log p, of each island
    kept: int = 8
    first: int = 64  # texts that the reader writes for an island without a guess
    mended: int = 4  # texts that it writes for each of …
    of: int = 4  # … so many of the best
    tokens: int = 16  # that are tried at each place: of the reader, and half as many by gradient
    put_in: int = 6
    pieces: int = 32
    weighed: int = 64  # children of an island whose log p is taken: those of the largest cosine
    heat: float = 0.006  # the noise on scores in the first rounds
    again: int = 8  # rounds after which the worst island begins again
    arrived: float = 1e-6  # 1 − cosine
    seed: int = 0

    def __call__(
        self, encoder: Encoder, goals: Tensor, reader: Reader, longest: int,
        said: Said | None = None,
    ) -> Pools:  # fmt: skip
        with sdpa_kernel(_KERNELS):
            return self._search(encoder, goals, reader, longest, said)

    def _search(
        self, encoder: Encoder, goals: Tensor, reader: Reader, longest: int, said: Said | None
    ) -> Pools:
        generator = torch.Generator(encoder.device).manual_seed(self.seed)
        pools = Pools.empty(goals, self.trust, self.kept, longest)
        for number in range(self.rounds):
            rows = pools.open_(self.arrived)
            if said:
                said(number, len(goals) - len(rows) // len(self.trust), encoder.passes)
            if not len(rows):
                break
            heat = self.heat * max(0.0, 1 - number / (0.7 * self.rounds))
            if number == 0:
                each = rows.repeat_interleave(self.first)
                children = write_all(reader, pools.goals[each], None, generator), each
            else:
                if number % self.again == 0:
                    self._begin_again(pools, rows)
                children = moves.together(
                    self._mended(reader, pools, rows, generator),
                    self._neighbours(encoder, reader, pools, rows, generator),
                )
            self._take(encoder, reader, pools, *children, heat, generator)
            pools.note()
        return pools

    def _mended(
        self, reader: Reader, pools: Pools, rows: Tensor, generator: torch.Generator
    ) -> moves.Children:
        """What the reader writes for the best texts of each island, for half from a place on."""
        of = min(self.of, self.kept)
        each = rows.repeat_interleave(of * self.mended)
        guesses = pools.texts(rows, of)
        parents = torch.arange(len(guesses), device=rows.device).repeat_interleave(self.mended)
        guesses = guesses[parents]
        share = torch.rand(len(each), generator=generator, device=rows.device)
        kept = ((2 * share - 1).clamp(min=0) * guesses.lengths).long()
        return write_all(reader, pools.goals[each], guesses, generator, kept), each

    def _neighbours(
        self, encoder: Encoder, reader: Reader, pools: Pools, rows: Tensor,
        generator: torch.Generator, at_once: int = 256,
    ) -> moves.Children:  # fmt: skip
        """Neighbours of a good text of each island, others in every round."""
        parts: list[moves.Children] = []
        for some in rows.split(at_once):
            parents, goals = self._parents(pools, some, generator), pools.goals[some]
            _, slopes = encoder.slopes(parents, goals)
            gains = slopes @ encoder.table.T.to(slopes.dtype)
            gains = gains / gains.std(-1, keepdim=True).clamp(min=1e-9)
            gains = gains + _STEEP * gumbel(gains, generator)
            uphill = gains.topk(max(1, self.tokens // 2), dim=-1).indices
            with torch.autocast(goals.device.type, torch.bfloat16, enabled=goals.is_cuda):
                wished = reader.tokens(goals, parents, self.tokens, generator)
            of = len(self.trust)
            neighbour = (some // of) * of + (some + 1) % of
            texts, born = moves.together(
                moves.replaced(parents, torch.cat([wished, uphill], -1)),
                moves.inserted(parents, wished[..., : self.put_in]),
                moves.left_out(parents),
                moves.moved(parents, self.pieces, generator),
                moves.swapped(parents, self.pieces, generator),
                moves.crossed(parents, pools.texts(neighbour, 1)),
            )
            parts.append((texts, some[born]))
        return moves.together(*parts)

    def _parents(self, pools: Pools, rows: Tensor, generator: torch.Generator) -> Texts:
        """Each island's best text, or as often another good one."""
        share = torch.rand(len(rows), generator=generator, device=rows.device)
        place = ((2 * share - 1).clamp(min=0) * min(self.of, self.kept)).long()
        place = place.where(pools.cosines[rows, place] > _NONE, 0)
        return Texts(pools.ids[rows, place], pools.lengths[rows, place])

    def _begin_again(self, pools: Pools, rows: Tensor) -> None:
        """The worst island of each vector forgets its texts but one, which counts for little."""
        tops = pools.cosines[:, 0].view(-1, len(self.trust))
        worst = torch.arange(len(tops), device=rows.device) * len(self.trust) + tops.argmin(1)
        worst = worst[torch.isin(worst, rows)]
        pools.cosines[worst, 1:] = _NONE
        pools.cosines[worst, 0] -= _SET_BACK

    def _take(
        self, encoder: Encoder, reader: Reader, pools: Pools, texts: Texts, rows: Tensor,
        heat: float, generator: torch.Generator,
    ) -> None:  # fmt: skip
        """Score texts, each for its island; keep the best that differ, run exactly."""
        cosines = (encoder.vectors(texts, fast=True) * pools.goals[rows]).sum(-1)
        touched, places = best_of_each(rows, cosines, self.weighed)
        shape, inside = places.shape, places.clamp(min=0)
        new = texts[inside.flatten()]
        goals = pools.goals[touched]
        with torch.autocast(goals.device.type, torch.bfloat16, enabled=goals.is_cuda):
            each = goals.repeat_interleave(shape[1], 0)
            likelihoods = reader.log_likelihood(each, new).view(shape)
        ids = torch.cat([pools.ids[touched], new.ids.view(*shape, -1)], 1)
        lengths = torch.cat([pools.lengths[touched], new.lengths.view(shape)], 1)
        likelihoods = torch.cat([pools.likelihoods[touched], likelihoods], 1)
        cosines = torch.cat([pools.cosines[touched], cosines[inside].where(places >= 0, _NONE)], 1)
        cosines = cosines.where(~_repeated(ids, lengths, cosines), _NONE)
        luck = torch.randn(cosines.shape, generator=generator, device=cosines.device)
        scores = cosines + pools.trust[touched][:, None] * likelihoods + heat * luck
        order = scores.where(cosines > _NONE, -torch.inf).argsort(-1, descending=True)
        order = order[:, : self.kept]
        order[:, -1] = cosines.argmax(-1)  # the nearest is kept whatever its luck
        ids = ids.gather(1, order[..., None].expand(-1, -1, ids.shape[-1]))
        lengths, likelihoods = lengths.gather(1, order), likelihoods.gather(1, order)
        exact = encoder.vectors(Texts(ids.flatten(0, 1), lengths.flatten()))
        exact = (exact.view(*order.shape, -1) * goals[:, None]).sum(-1)
        exact = exact.where(cosines.gather(1, order) > _NONE, _NONE)
        order = (exact + pools.trust[touched][:, None] * likelihoods).argsort(-1, descending=True)
        pools.cosines[touched] = exact.gather(1, order)
        pools.likelihoods[touched] = likelihoods.gather(1, order)
        pools.lengths[touched] = lengths.gather(1, order)
        pools.ids[touched] = ids.gather(1, order[..., None].expand_as(ids))


def _repeated(ids: Tensor, lengths: Tensor, scores: Tensor) -> Tensor:
    """Which of the texts (r, c, n) of a row stand there already, before them."""
    generator = torch.Generator(ids.device).manual_seed(1)
    weights = torch.randint(1, 2**40, (ids.shape[-1],), generator=generator, device=ids.device)
    keys = (ids * weights).sum(-1) * 64 + lengths
    same = keys[:, :, None] == keys[:, None, :]
    steps = torch.arange(ids.shape[1], device=ids.device)
    earlier = steps[None, :, None] > steps[None, None, :]
    return (same & earlier & (scores[:, None, :] > _NONE)).any(-1)
