"""The first guess: which tokens are in the text behind a vector, wherever they stand (ours).

Linear discriminant analysis, one token against the rest. The vectors of texts that hold token t
are taken as Gaussian around μ + δ_t, all with one covariance C, so the log-odds that t is in the
text behind the vector e are linear in e:

    log odds_t(e) = δ_tᵀC⁻¹(e − μ) − δ_tᵀC⁻¹δ_t / 2 + log(share of the texts that hold t)

δ_t is a mean over the texts of a corpus that hold t. Most tokens are in few texts or in none, so it
is drawn towards what the encoder says of the token alone: B·(vector of the text "t"; for last
states, of texts that end in t), where the linear map B is fitted to the tokens that are frequent.
All of it is counted and solved for, from one run of the encoder over corpus and vocabulary. Being
linear it also reads differences: what `missing` says of e − e′ are the tokens that a guess with
vector e′ lacks (or has too many of).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.numerics import with_ridge
from keyhole.recover.embedding.scoring import Encoder, Texts

_DRAWN = 8.0  # texts that the guess from the token alone is worth
_SEEN = 0.1  # texts that a token without any counts as
_RIDGE = 0.05  # of the mean variance, added to C


@dataclass(frozen=True, eq=False)
class Bag:
    """The log-odds of every token, vectors (b, d) @ `weights` (d, V) + `offset` (V,)."""

    weights: Tensor
    offset: Tensor

    def odds(self, vectors: Tensor) -> Tensor:
        return vectors @ self.weights + self.offset

    def missing(self, differences: Tensor) -> Tensor:
        return differences @ self.weights

    @classmethod
    def of(cls, texts: Texts, vectors: Tensor, own: Tensor) -> Bag:
        """From texts and their vectors, and from the vector (V, d) of each token by itself."""
        size = len(own)
        rows, tokens = _held(texts)
        vectors = vectors.double()
        middle = vectors.mean(0)
        centred = vectors - middle
        held = torch.bincount(tokens, minlength=size).double()
        sums = centred.new_zeros(size, centred.shape[1]).index_add_(0, tokens, centred[rows])
        means = sums / held.clamp(min=1)[:, None]
        expected = _fitted(own.double(), means, held)
        offsets = (sums + _DRAWN * expected) / (held + _DRAWN)[:, None]
        covariance = with_ridge(centred.T @ centred / len(centred), _RIDGE)
        weights = torch.linalg.solve(covariance, offsets.T)
        share = ((held + _SEEN) / len(texts)).log()
        offset = share - (offsets.T * weights).sum(0) / 2 - middle @ weights
        return cls(weights.float(), offset.float())

    @classmethod
    def blank(cls, encoder: Encoder, texts: Texts, width: int) -> Bag:
        """A bag that reads nothing in a vector: how frequent tokens are."""
        size = len(encoder.table)
        _, tokens = _held(texts)
        share = ((torch.bincount(tokens, minlength=size) + _SEEN) / len(texts)).log()
        return cls(share.new_zeros(width, size), share)


def _held(texts: Texts) -> tuple[Tensor, Tensor]:
    """Every token of every text once: (row, token) in two columns."""
    size = int(texts.ids.max()) + 1
    rows = torch.arange(len(texts), device=texts.ids.device)[:, None].expand(texts.ids.shape)
    keys = (rows * size + texts.ids)[texts.mask].unique()
    return keys // size, keys % size


def alone(encoder: Encoder) -> Tensor:
    """The vector (V, d) of each token as a text of its own."""
    tokens = torch.arange(len(encoder.table), device=encoder.device)
    return encoder.vectors(Texts(tokens[:, None], torch.ones_like(tokens)), fast=True)


def _fitted(own: Tensor, means: Tensor, held: Tensor) -> Tensor:
    """The means that the tokens' own vectors tell, by a ridge that trusts frequent tokens."""
    inputs = torch.cat([own, own.new_ones(len(own), 1)], 1)
    trusted = inputs * (held / (held + _DRAWN))[:, None]
    square = trusted.T @ inputs
    square.diagonal().add_(1.0)
    return inputs @ torch.linalg.solve(square, trusted.T @ means)
