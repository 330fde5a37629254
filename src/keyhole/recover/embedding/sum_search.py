"""The search for the texts behind vectors, many at once, by sums of single changes (ours).

In a round every island (islands.py) gives one text. All of its single changes that promise
something are run through the encoder (likely_tokens.py, singles.py), sets of changes whose effects
add up to what is missing are found without it (sums.py) and run, then sets that go on from the best
of those as they really are. Then pieces of good texts change places (orders.py). It begins with the
lines of the corpus that are nearest. A vector leaves as soon as a text gives it back to rounding,
so that the hard ones get the machine to themselves; one that was stored with fewer digits, where
other texts may come as near, once its best text may be the one (`may_be`) and has stood for some
rounds.

Nothing is learnt: it needs the encoder, and counts of a corpus (counted.py). It runs alike on a GPU
with hundreds of vectors and on a CPU with one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keyhole.recover.embedding.counted import Counted
from keyhole.recover.embedding.islands import Islands, Parents
from keyhole.recover.embedding.likely_tokens import LikelyTokens, Luck, Shares
from keyhole.recover.embedding.orders import exchanged
from keyhole.recover.embedding.scoring import Encoder, Texts
from keyhole.recover.embedding.singles import Singles
from keyhole.recover.embedding.sums import Effects, Sets

Said = Callable[[int, int, int], None]  # rounds, arrived, passes
MayBe = Callable[[int, list[int]], bool]  # the number of a vector, a text
_BASE, _MOST = 1000, 3000  # candidates for a text, in the first rounds and in the last
_CALM = 20  # rounds after which there are the most
_SETTLED = 5  # rounds that the best text of a vector has stood
_PASSES = {"cuda": 1_000_000, "cpu": 12_000}
_AT_ONCE = {"cuda": 200, "cpu": 4}  # islands whose changes are run together
# Attention without the kernels that are planned anew for each shape: here every call has its own.
_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Reading:
    """The best text for a vector, and what it took."""

    tokens: list[int]
    cosine: float
    passes: int


@dataclass(frozen=True)
class SumSearch:
    """How much is tried: about `passes` for a vector at most, by default what suits the device."""

    passes: int | None = None
    rounds: int = 1000
    trust: tuple[float, ...] = (0.6, 2.0)  # in the n-grams, of each island: see islands.py
    kept: int = 24  # texts of an island
    nearest: int = 8  # lines of the corpus that each begins with
    shares: Shares = Shares()  # noqa: RUF009 - frozen
    width: int = 32  # of the beam over sets of changes
    depth: int = 5  # changes that are added at a time
    tried: int = 64  # sets that are run
    orders: int = 150  # exchanges that are run, twice
    arrived: float = 1e-6  # 1 − cosine
    seed: int = 0

    def __call__(
        self, encoder: Encoder, goals: Tensor, counted: Counted, longest: int,
        said: Said | None = None, may_be: MayBe | None = None,
    ) -> list[Reading]:  # fmt: skip
        """Texts of at most `longest` tokens for vectors (v, d) as the encoder compares them."""
        with sdpa_kernel(_KERNELS), torch.no_grad():
            islands = self._search(encoder, goals, counted, longest, said, may_be)
        texts = Texts(islands.best_ids, islands.best_lengths)
        return [
            Reading(texts.tokens(row), float(islands.best[row]), int(islands.passes[row]))
            for row in range(len(goals))
        ]

    def _search(
        self, encoder: Encoder, goals: Tensor, counted: Counted, longest: int, said: Said | None,
        may_be: MayBe | None,
    ) -> Islands:  # fmt: skip
        generator = torch.Generator(encoder.device).manual_seed(self.seed)
        trust = goals.new_tensor(self.trust)
        islands = Islands(encoder, counted.ngrams, goals, trust, self.kept, longest, generator)
        likely = LikelyTokens.of(counted, goals)
        count = len(self.trust)
        lines, vector = counted.nearest(goals, self.nearest * count, longest)
        turn = torch.arange(len(vector), device=vector.device) % count
        islands.take(lines, vector * count + turn)
        for number in range(self.rounds):
            rows = self._open(islands, torch.arange(len(islands.vector), device=encoder.device))
            if said:
                done = len(goals) - len(rows) // len(self.trust)
                said(number, done, int(islands.passes.sum()))
            if not len(rows):
                break
            base = round(_BASE * (_MOST / _BASE) ** min(1.0, number / _CALM))
            for some in _parts(rows):
                self._add_up(islands, likely, some, base)
            for among in (1, 4):
                rows = self._open(islands, rows)
                for some in _parts(rows):
                    texts, born = exchanged(
                        islands.leading(some, among), counted.ngrams, self.orders, generator
                    )
                    islands.take(texts, some[born])
            islands.renew(rows)
            if may_be is not None:
                self._leave(islands, may_be)
        return islands

    def _leave(self, islands: Islands, may_be: MayBe) -> None:
        """Vectors leave whose best text has just stood for long enough, and may be the one."""
        texts = Texts(islands.best_ids, islands.best_lengths)
        for row in islands.stood(_SETTLED).tolist():
            if may_be(row, texts.tokens(row)):
                islands.left[row] = True

    def _open(self, islands: Islands, rows: Tensor) -> Tensor:
        """The islands whose vector has no text yet and passes left."""
        most = self.passes or _PASSES[rows.device.type]
        is_open = (islands.best < 1 - self.arrived) & (islands.passes < most) & ~islands.left
        return rows[is_open[islands.vector[rows]]]

    def _add_up(self, islands: Islands, likely: LikelyTokens, rows: Tensor, base: int) -> None:
        """Run single changes of one text of each island, then sets of them, twice."""
        parents, encoder = islands.parents(rows), islands.encoder
        goals = islands.goals[islands.vector[rows]]
        off = goals - parents.vectors
        luck = Luck(parents.turns, islands.generator)
        own = encoder.next_log_p(parents.texts) if encoder.speaks else None
        singles = likely.singles(
            parents.texts, off, islands.vector[rows], luck, islands.longest, base, self.shares, own
        )
        prior = islands.trust[rows] * off.square().sum(-1)  # what log p counts for in ‖off‖²
        effects = Effects.of(singles, *_effects(islands, singles, rows, parents), prior)
        sets = Sets.none(off)
        for _ in range(2):
            if not len(self._open(islands, rows)):
                break
            changes = effects.grown(sets, self.width, self.depth, self.tried)
            sets = self._tried(islands, singles, rows, changes)

    def _tried(self, islands: Islands, singles: Singles, rows: Tensor, changes: Tensor) -> Sets:
        """Run texts with sets of changes (p, w, k): the best half of a beam, as they are."""
        p, w = changes.shape[:2]
        parent = torch.arange(p, device=rows.device).repeat_interleave(w)
        texts, fits = singles.applied(parent, changes.flatten(0, 1))
        fits &= (changes >= 0).any(-1).flatten()
        goals = islands.goals[islands.vector[rows]]
        vectors = goals.new_zeros(p * w, goals.shape[1])
        vectors[fits], _ = islands.take(texts[fits], rows[parent[fits]])
        vectors = vectors.view(p, w, -1)
        cosines = (vectors * goals[:, None]).sum(-1).where(fits.view(p, w), -2.0)
        best = cosines.topk(min(self.width // 2, w), dim=1)
        chosen = best.indices[..., None]
        return Sets(
            changes.gather(1, chosen.expand(-1, -1, changes.shape[-1])),
            goals[:, None] - vectors.gather(1, chosen.expand(-1, -1, goals.shape[1])),
            best.values > -2,
        )


def _effects(
    islands: Islands, singles: Singles, rows: Tensor, parents: Parents
) -> tuple[Tensor, Tensor]:
    """Run every single change: what it adds to the vector of its text (p, N, d), and to log p."""
    parent, change = singles.allowed.nonzero().unbind(1)
    texts, _ = singles.applied(parent, change[:, None])
    vectors, likelihoods = islands.take(texts, rows[parent])
    moves = vectors.new_zeros(*singles.allowed.shape, vectors.shape[1])
    likelier = vectors.new_zeros(singles.allowed.shape)
    moves[parent, change] = vectors - parents.vectors[parent]
    likelier[parent, change] = likelihoods - parents.likelihoods[parent]
    return moves, likelier


def _parts(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(_AT_ONCE[rows.device.type]) if len(rows) else ()
