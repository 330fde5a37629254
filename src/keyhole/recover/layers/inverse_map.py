"""Learn a linear map from hidden states back to token embeddings, from the weights alone.

Searches of encoders need a start: `inverse_map` takes the model and a leak,
`InverseMap.estimate` returns an embedding for each row, and `TokenTable` the tokens
nearest to it.

The attacker holds the weights, and so can run texts through the model. Ridge regression
over their positions gives

    e ≈ h_ℓ M + b        (one M and b for all positions, one pair for each layer ℓ).

Half of the texts are random: half of their tokens are uniform over the vocabulary, half
log-uniform over the ids, because tokenizers number frequent tokens first. The other
half are sentences of the corpus that ships. In a text most heads attend mainly to full
stops and commas; in random tokens any token may take that part.

Read by cosine (TokenTable), the estimates name most tokens before any pass over the
text itself; the lower the layer, the more. The covariance of the regression's error
shows in which directions an estimate may still be wrong. Its root is the preconditioner
of the search (encoder.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core.numerics import with_ridge
from keyhole.core.tensors import append_ones, normalized, seeded
from keyhole.models.capture import capture
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import SHIPPED, corpus_texts
from keyhole.recover.leaks import Leak

_LENGTHS = (12, 20, 28, 36)
_BATCH = 2048  # tokens in one pass
_SIMILAR = 4  # similar tokens that `most_similar` returns
_CHUNK = 2**25  # similarities in memory at a time
_ROUNDING = 1e-7  # of a cosine in float32
_KNOWN = 4096  # corpus tokens that a tokenizer must know for sentences to be used


class InverseMap(NamedTuple):
    """`estimate(h) = h M + b`; `root` (e, e) is the square root of its error's covariance."""

    M: Tensor
    b: Tensor
    root: Tensor
    passes: int

    def estimate(self, states: Tensor) -> Tensor:
        return states @ self.M + self.b


def inverse_map(
    target: Target,
    leak: Leak,
    tokens: int,
    seed: int,
) -> InverseMap:
    """Return the map for a leak's exposure, fitted on about `tokens` random tokens; remembered."""
    key = (leak.exposure, tokens, seed)
    return target.remembered(
        "inverse map", key, lambda: _fit(target, leak, tokens, seed)
    )


def random_texts(
    target: Target,
    count: int,
    length: int,
    stream: torch.Generator,
) -> Tensor:
    """Return random token ids (count, length) inside the tokenizer's special tokens."""
    plain = sorted(set(range(target.vocabulary)) - target.special)
    shape = (count, length)
    ranks = torch.rand(shape, generator=stream) * math.log(len(plain))
    frequent = (ranks.exp() - 1).long().clamp(max=len(plain) - 1)
    uniform = torch.randint(len(plain), shape, generator=stream)
    is_uniform = torch.rand(shape, generator=stream) < 0.5
    ids = torch.tensor(plain)[torch.where(is_uniform, uniform, frequent)]
    before, after = target.frame()
    if length > len(before) + len(after):
        ids[:, : len(before)] = torch.tensor(before, dtype=torch.long)
        ids[:, length - len(after) :] = torch.tensor(after, dtype=torch.long)
    return ids.to(target.device)


def _sentences(target: Target) -> Tensor:
    """Return the tokens of the corpus that ships, without special and unknown tokens."""
    texts = corpus_texts(SHIPPED)
    lines = target.tokenizer(texts, add_special_tokens=False)["input_ids"]
    special = target.special
    return torch.tensor([id_ for line in lines for id_ in line if id_ not in special])


def _texts(
    target: Target,
    count: int,
    length: int,
    stream: torch.Generator,
) -> Tensor:
    """Return texts (count, length), half of them sentences if the tokenizer knows the words."""
    ids = random_texts(target, count, length, stream)
    tokens = target.remembered("sentences", "", lambda: _sentences(target))
    before, after = (len(side) for side in target.frame())
    inside = length - before - after
    if inside > 0 and len(tokens) >= _KNOWN:
        shape = (count // 2, 1)
        starts = torch.randint(len(tokens) - inside + 1, shape, generator=stream)
        sentences = tokens[starts + torch.arange(inside)].to(ids.device)
        ids[: count // 2, before : length - after] = sentences
    return ids


@torch.no_grad()
def _fit(
    target: Target,
    leak: Leak,
    tokens: int,
    seed: int,
) -> InverseMap:
    parts = target.parts
    table = target.table
    stream = seeded(seed)
    width = leak.rows(leak.tensors).shape[-1]
    # The sums of the products of (h, 1, e) with each other.
    size = width + 1 + table.shape[1]
    products = table.new_zeros(size, size, dtype=torch.float64)
    passes = 0
    samples = 0
    lengths = sorted({min(length, parts.max_length) for length in _LENGTHS})
    before, after = (len(side) for side in target.frame())
    at_once = tokens // (2 * len(lengths))  # so that every length is run twice
    at_once = min(_BATCH, parts.at_once(lengths[-1]), at_once)
    for length in itertools.cycle(lengths):
        if samples >= tokens:
            break
        ids = _texts(target, max(1, at_once // length), length, stream)
        states = leak.rows(capture(target.model, leak.exposure, ids=ids)).float()
        inside = slice(None)
        if length > before + after:
            inside = slice(before, length - after)
        h = states[:, inside].flatten(0, 1)
        e = table[ids[:, inside].flatten()]
        rows = torch.cat([append_ones(h), e], -1)
        products += (rows.T @ rows).double()
        samples += len(e)
        passes += len(ids)
    gram = products[: width + 1, : width + 1]
    cross = products[: width + 1, width + 1 :]
    energy = products[width + 1 :, width + 1 :]
    weights = torch.linalg.solve(with_ridge(gram), cross)
    left = energy - weights.T @ cross - cross.T @ weights + weights.T @ gram @ weights
    sizes, axes = torch.linalg.eigh(left / samples)
    root = (axes * sizes.clamp(min=float(1e-3 * sizes.max())).sqrt()) @ axes.T
    return InverseMap(weights[:-1].float(), weights[-1].float(), root.float(), passes)


class TokenTable(NamedTuple):
    """Finds the token that a vector means: the one whose embedding has the largest cosine with it.

    Encoders normalise their embeddings (LayerNorm) first. So a hidden state determines
    the direction of an embedding but hardly its length, and a distance would depend on
    the length. `directions` are the table's vectors less their mean, with length one.
    """

    vectors: Tensor
    centre: Tensor
    directions: Tensor

    @classmethod
    def of(cls, table: Tensor, without: list[int]) -> TokenTable:
        """Return the table; ids in `without` (padding) are never the nearest."""
        vectors = table.float()
        centre = vectors.mean(0)
        directions = normalized(vectors - centre)
        directions[without] = 0.0
        return cls(vectors, centre, directions)

    def nearest(
        self,
        estimates: Tensor,
        count: int = 1,
        among: Tensor | None = None,
    ) -> Tensor:
        """Return the `count` ids of largest cosine (m, count) for estimates (m, e), best first.

        If `among` is given, only its ids count.
        """
        _, indices = self._best(estimates, count, among)
        return indices if among is None else among[indices]

    def meant(self, estimates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest ids (m,) for estimates (m, e), and the doubt about each (m,).

        The doubt is the ratio of squared distances on the unit sphere to the nearest
        and to the second token: 1 if both are equally near.
        """
        cosines, ids = self._best(estimates, 2)
        away = (1 - cosines).clamp(min=_ROUNDING)
        return ids[:, 0], away[:, 0] / away[:, -1]

    def _best(
        self,
        estimates: Tensor,
        count: int,
        among: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Return the largest cosines (m, count) and their rows in the table."""
        table = self.directions if among is None else self.directions[among]
        directions = normalized(estimates - self.centre)
        parts = directions.split(max(1, _CHUNK // len(table)))
        best = [(part @ table.T).topk(min(count, len(table)), -1) for part in parts]
        return map(torch.cat, zip(*best, strict=True))


def most_similar(table: Tensor, text: Tensor) -> Tensor:
    """Return for each token of a text the tokens (k, n) with the most similar embeddings."""
    directions = normalized(table.float())
    count = min(_SIMILAR, len(table) - 1)
    others: list[Tensor] = []
    for part in text.split(64):
        cosines = directions[part] @ directions.T
        others.append(cosines.scatter_(1, part[:, None], -2.0).topk(count).indices)
    return torch.cat(others).T
