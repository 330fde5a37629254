"""Search a text by relaxing it to embeddings, for leaks that no closed form reads.

`TokenSearch` takes the model and a leak, such as attention maps of a deeper layer, and
proposes token ids.

A leak such as the maps of one layer holds fewer numbers than the embeddings, so the
prior decides. The search minimises over `a` in `e = mean + a·factor`, with a standard
normal prior on `a` (L-BFGS, one forward and one backward pass a step), from `a = 0`. At
first mean and factor are those of the whole vocabulary. Every tokenizer in use sorts
its tokens by frequency, so a token is weighted by `1/(id + V/30)`, Zipf's law: the
search starts among the words that texts are made of.

The prior pulls the result away from the truth. So tokens are compared by direction, in
the prior's own coordinates, and those that agree best are tried (trials.py). If the
best text does not explain the leak, the prior narrows to the mean and covariance of the
candidates at each position, weighted by their agreement, and the search starts again.
It takes at most `rounds` times `passes` passes and `sweeps` sweeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core.numerics import LinAlgError
from keyhole.core.tensors import normalized
from keyhole.recover.attack import Proposal, Proposals, Target
from keyhole.recover.layers.trials import Comparison, Tried, substitute
from keyhole.recover.leaks import Leak

_FLAT = 30  # the first V/30 tokens of a table are taken to be about equally frequent
_LEAST_VARIANCE = 1e-6  # of the largest: directions in which tokens do not differ
_DOUBT = 0.2  # the share of the vocabulary's spread that a narrowed prior keeps
_NARROWED = 384  # tokens at each position that make the next round's prior
_SHARPNESS = 30.0  # the weight of a token's agreement in the first round
_GROWTH = 1.3  # the factor by which that weight grows with each round
_PULL = 1e-4  # the prior's weight in the loss


@dataclass(frozen=True)
class TokenSearch:
    """Limits of the search: `rounds` of at most `passes` passes, each followed by trials.

    In at most `sweeps` sweeps, `candidates` tokens are tried at each position. The
    search ends when a round gives the same text as the one before.
    """

    rounds: int = 8
    passes: int = 60
    candidates: int = 24
    sweeps: int = 4

    def each(self, target: Target, leaks: Sequence[Leak]) -> Proposals:
        """Search each leak alone, with the special tokens where the tokenizer puts them."""
        vocabulary = Vocabulary.of(target)
        for number, leak in enumerate(leaks):
            known = target.framed(leak.length or 0)
            yield number, self(Comparison.of(target, leak), vocabulary, known)

    def __call__(
        self,
        comparison: Comparison,
        vocabulary: Vocabulary,
        known: Tensor,
    ) -> Proposal:
        """Return the text that explains the leak best; `known` (n,) has its known ids, or -1."""
        prior = Prior(vocabulary.mean.expand(len(known), -1), vocabulary.factor)
        best = Tried(known.clamp(min=0), float("inf"), 0)
        before = best.ids
        passes = 0
        forwards = 0
        for number in range(self.rounds):
            relaxed, spent = relax(comparison, prior, known, self.passes)
            agreement = vocabulary.agreement(relaxed, _SHARPNESS * _GROWTH**number)
            candidates = agreement.topk(min(_NARROWED, agreement.shape[-1])).indices.T
            ids = torch.where(known >= 0, known, candidates[0])
            start = ids
            # Once the relaxation gives nothing new, the best text is tried with all
            # candidates.
            stuck = torch.equal(ids, before)
            if stuck:
                start = best.ids
            else:
                candidates = candidates[: self.candidates]
            tried = substitute(comparison, start, candidates, known, self.sweeps)
            passes += spent
            forwards += tried.forwards
            before = ids
            best = min(best, tried, key=lambda text: text.loss)
            if stuck or best.loss <= comparison.tolerance:
                break
            prior = Prior.among(vocabulary, agreement)
        return Proposal(
            best.ids.tolist(),
            passes=passes + forwards,
            forwards=forwards,
            note=f"loss {best.loss:.1e} in {passes} passes and {forwards} trials",
        )


class Vocabulary(NamedTuple):
    """The token table as a distribution: mean (e,), factor (e, e), directions of tokens (V, e).

    The directions have length one, in the coordinates in which the prior is isotropic.
    """

    table: Tensor
    log_frequency: Tensor
    mean: Tensor
    factor: Tensor
    whiten: Tensor
    directions: Tensor

    @classmethod
    def of(cls, target: Target) -> Vocabulary:
        table = target.table
        weight = 1.0 / (target.tokens + len(table) / _FLAT)
        weight[_never(target)] = 0.0
        weight = weight / weight.sum()
        mean = weight @ table
        off = (table - mean) * weight.sqrt()[:, None]
        variance, axes = torch.linalg.eigh((off.T @ off).double())
        spread = variance.clamp(min=_LEAST_VARIANCE * float(variance.max())).sqrt()
        whiten = (axes / spread).to(table)
        return cls(
            table,
            weight.clamp(min=1e-30).log(),
            mean,
            (axes * spread).T.to(table),
            whiten,
            normalized((table - mean) @ whiten),
        )

    def agreement(self, embeddings: Tensor, sharpness: float) -> Tensor:
        """Return log-weights (n, V) of the tokens at each position, for embeddings (n, e)."""
        directions = normalized((embeddings - self.mean) @ self.whiten)
        return sharpness * (directions @ self.directions.T) + self.log_frequency


def _never(target: Target) -> list[int]:
    """Return ids that no text holds: special tokens, and the unused entries of BERT's table."""
    words = target.tokenizer.convert_ids_to_tokens(range(target.vocabulary))
    special = target.special
    return [
        number
        for number, word in enumerate(words)
        if number in special or str(word).startswith("[unused")
    ]


class Prior(NamedTuple):
    """A normal distribution at each position: means (n, e), factors (n, r, e) or one (r, e)."""

    means: Tensor
    factors: Tensor

    @classmethod
    def among(cls, vocabulary: Vocabulary, agreement: Tensor) -> Prior:
        """Return the prior of the tokens that agree best, weighted by their agreement."""
        best = agreement.topk(min(_NARROWED, agreement.shape[-1]), -1)
        weights = best.values.softmax(-1)
        words = vocabulary.table[best.indices]
        means = torch.einsum("nk,nke->ne", weights, words)
        among = (words - means[:, None]) * weights.sqrt()[..., None]
        # The right token may not be among them, so part of the vocabulary's spread
        # remains.
        beyond = (_DOUBT * vocabulary.factor).expand(len(means), -1, -1)
        return cls(means, torch.cat([among, beyond], 1))

    def embed(self, coordinates: Tensor) -> Tensor:
        if self.factors.ndim == 2:
            return self.means + coordinates @ self.factors
        return self.means + torch.einsum("nr,nre->ne", coordinates, self.factors)


def relax(
    comparison: Comparison,
    prior: Prior,
    known: Tensor,
    passes: int,
) -> tuple[Tensor, int]:
    """Return embeddings (n, e) near the prior that explain the leak, and the passes that took.

    `known` (n,) holds the ids that are certain, and -1 at other positions.
    """
    fixed = comparison.target.table[known.clamp(min=0)]
    free = (known < 0)[:, None]
    at = fixed.new_zeros(len(known), prior.factors.shape[-2], requires_grad=True)
    search = torch.optim.LBFGS(
        [at],
        max_iter=passes,
        max_eval=passes,
        history_size=min(50, passes),
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    spent = 0

    def embed() -> Tensor:
        return torch.where(free, prior.embed(at), fixed)

    def evaluate() -> Tensor:
        nonlocal spent
        spent += 1
        search.zero_grad()
        loss = comparison.loss(embed()[None]).sum()
        loss = loss + _PULL * (at * free).square().mean()
        if spent == 1 and not loss.isfinite():
            raise LinAlgError(
                "what the model gives of its own embeddings is not finite"
            )
        loss.backward()
        return loss

    search.step(evaluate)
    return embed().detach(), spent
