"""An attention layer, exactly, from the vectors it returns (ours).

*Provably Learning Attention with Queries* (arXiv 2601.16873) reads scores only. For one head

    O = A·(XV),  A = softmax_rows(X W Xᵀ):

V is read where A is known whatever W is; with V known, O is solved for A, and log-ratios of A
are bilinear forms of W, as many per answer as V has rank r. In queries:

    every token, causal      1 + ⌈d/r⌉        V from one sequence (vector_answers.py)
    every token              d + ⌈d/r⌉        one row of V per query, then all of W at once
    last token               d + d·⌈d/r⌉ + 2  two of them ask whether there is one head

For the last token d + d²/r is also the number of unknowns over the numbers per answer. Which of
these an oracle is, and whether it is causal, shows in the answers themselves. Several heads are
separated in the far field (vector_answers.py), for d queries more if every token answers and
(H − 1)·d + 32 or so if the last does; an answer then holds ⌊m/H⌋ forms of each head.

The plain way sends d + 1 tokens and solves one square system. Here keys are long and queries short
(vector_answers.py), so that a rank below d, masks, and scales of W from 2⁻⁸⁰ to 2⁸⁰ are the same
computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.extract.bilinear import random_orthogonal, random_units
from keyhole.extract.extraction import Step
from keyhole.extract.judge import Method
from keyhole.extract.vector_answers import VectorOracle, open_vectors, separate_values, solve_scores
from keyhole.oracle.planted import Attention
from keyhole.oracle.protocol import Oracle

_SAME = 1e-6  # relative; forms that disagree by more do not come from one head
_INDEPENDENT = 1e4  # the worst condition of values that are solved for side by side
_NONE = 1e-6  # relative; singular values of V below this are none
_ATTEMPTS = 3
_EXTRA = 4  # tokens beyond a basis, to see whether the forms are linear: free with every token


@dataclass(frozen=True)
class FullOutput(Method):
    """Exact extraction of a layer that returns vectors: one head or several."""

    seed: int = 0
    tolerance: float = 1e-8

    def expected_queries(self, dim: int) -> int | None:
        """The most that one head with invertible values takes; less if every token answers."""
        return 2 * dim + 2

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        vectors, total = open_vectors(oracle)
        stream = torch.Generator().manual_seed(self.seed)
        for step in self._search(vectors, total, stream):
            # Where every token answers, one sequence could be long enough for everything.
            numbers = vectors.outputs if not vectors.every_token else step.unknowns or 1
            yield replace(step, numbers=numbers)

    def _search(
        self, vectors: VectorOracle, total: Tensor, stream: torch.Generator
    ) -> Iterator[Step]:
        """One head if the answers can be one's, else several."""
        d, unknowns = vectors.dim, vectors.dim * (vectors.dim + vectors.outputs)
        # How many heads there are, and so how many unknowns, is open.
        first = Step(_layer(vectors, torch.zeros(1, d, d), total[None]), total.numel(), None)
        yield first
        same = max(_SAME, 16 * self.tolerance)  # of inexact answers more is to be expected
        single = _SingleHead(vectors, total, stream, same)
        if single.possible():
            yield from single.steps(unknowns)
            if single.confirmed:
                return
            yield first  # nothing but the sum of the values is known after all
        yield from _several_heads(vectors, total, stream, unknowns, same)


def _several_heads(
    vectors: VectorOracle, total: Tensor, stream: torch.Generator, unknowns: int, same: float
) -> Iterator[Step]:
    """Values, then weights. Another key is tried where two heads look like one at the first."""
    d = vectors.dim
    for attempt in range(_ATTEMPTS):
        last = attempt == _ATTEMPTS - 1
        try:
            V = separate_values(vectors, total, stream, pairs=16 * 4**attempt)
            everything = len(V) * unknowns
            yield Step(_layer(vectors, torch.zeros(len(V), d, d), V), V.numel(), everything)
            layer = _layer(vectors, _all_heads(vectors, V, stream), V)
        except Unsuccessful as end:
            if last or end.status is Status.NOT_IDENTIFIABLE:
                raise
            continue
        yield Step(layer, everything, None)
        if _agrees(vectors, layer, stream, same):
            yield Step(layer, everything, everything)
            return


class _SingleHead:
    """The attempt to read the answers as those of one head with values V."""

    def __init__(
        self, vectors: VectorOracle, V: Tensor, stream: torch.Generator, same: float
    ) -> None:
        self._vectors = vectors
        self._same = same
        self._V = V
        self._stream = stream
        self._keys, self._rank = key_basis(V)
        self.confirmed = False

    def possible(self) -> bool:
        """Could it be? With every token, wait for the forms; else ask one key and one query.

        The answer to one key points where V says it does if there is one head; but answers of one
        number point nowhere else.
        """
        if not self._rank or self._vectors.every_token:
            return bool(self._rank)
        key, x = random_units(2, self._vectors.dim, self._stream)
        answer = self._vectors.respond(key[None, None], x[None])[0, 0]
        value = key @ self._V
        weight = (answer @ value) / (value @ value)
        apart = torch.linalg.vector_norm(answer - weight * value)
        return bool(apart <= self._same * torch.linalg.vector_norm(value))

    def steps(self, unknowns: int) -> Iterator[Step]:
        d = self._vectors.dim
        X = random_orthogonal(d, self._stream)
        forms = LayerForms(self._vectors, self._V[None], list(self._keys.split(self._rank)))

        def layer(Z: Tensor) -> Attention:
            """`Z = X W Δᵀ` for the first rows of X; the others count as zero."""
            W = torch.linalg.solve(self._keys, (X[: len(Z)].mT @ Z).mT).mT
            return _layer(self._vectors, W[None], self._V[None])

        if self._vectors.every_token:
            more = random_units(_EXTRA, d, self._stream)
            Z, errors = (part[0] for part in forms.measure(torch.cat([X, more])))
            apart = (Z[d:] - (more @ X.mT) @ Z[:d]).abs() - errors[d:] - errors[:d].sum(0)
            self.confirmed = bool((apart <= self._same * Z.abs().max()).all())
            if self.confirmed:
                yield Step(layer(Z[:d]), unknowns, unknowns)
            return
        Z = torch.empty(0, d, dtype=torch.float64)
        if_one_head = unknowns if self._vectors.outputs > 1 else None  # whether there is one head
        while len(Z) < d:
            part, errors = forms.measure(X[len(Z) : 2 * len(Z) + 1])
            _require_known(errors)
            Z = torch.cat([Z, part[0]])
            yield Step(layer(Z), self._V.numel() + Z.numel(), if_one_head)
        self.confirmed = _agrees(self._vectors, layer(Z), self._stream, self._same)
        if self.confirmed:
            yield Step(layer(Z), unknowns, unknowns)


def key_basis(V: Tensor) -> tuple[Tensor, int]:
    """A basis of keys (rows) and the rank r of V: any r in a row have independent values.

    The first r are the left singular vectors u_i of V, whose values are orthogonal. Directions
    that V does not see ride on those: u_i + k.
    """
    U, sizes, _ = torch.linalg.svd(V, full_matrices=True)
    rank = int((sizes > _NONE * sizes[0]).sum())
    keys = U.mT.clone()
    if rank:
        index = torch.arange(rank, len(keys))
        keys[index] += U.mT[index % rank]
    return keys, rank


def _all_heads(vectors: VectorOracle, V: Tensor, stream: torch.Generator) -> Tensor:
    """W of every head, with as many keys side by side as their values stay independent."""
    d = vectors.dim
    keys, X = random_orthogonal(d, stream), random_orthogonal(d, stream)
    for p in range(max(1, min(d, vectors.outputs // len(V))), 0, -1):
        blocks = list(keys.split(p))
        if all(_condition(block @ V) < _INDEPENDENT for block in blocks):
            break
    else:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"the values of the {len(V)} heads depend on each other: W_h cannot be separated",
        )
    Z, errors = LayerForms(vectors, V, blocks).measure(X)
    _require_known(errors)
    return X.mT @ Z @ keys


def _agrees(vectors: VectorOracle, layer: Attention, stream: torch.Generator, same: float) -> bool:
    """One question with two keys and scores of about 1: are these the right heads?"""
    keys, x = random_units(2, vectors.dim, stream), random_units(1, vectors.dim, stream)
    z = (x @ layer.W @ keys.mT).squeeze(1)  # (H, 2)
    square = float(1 / z.abs().max().clamp(min=2.0**-80))
    weights = (square * z).exp()
    weights = weights / (vectors.references(1, 0) + weights.sum(1, keepdim=True))
    expected = torch.einsum("hj,jd,hdm->m", weights, keys, layer.V)
    answer = vectors.respond(keys.unsqueeze(0), x, square)[0, 0]
    return bool((answer - expected).abs().max() <= same * expected.abs().max())


def _condition(values: Tensor) -> float:
    sizes = torch.linalg.svdvals(values.flatten(0, 1))
    if values.shape[0] * values.shape[1] > values.shape[2]:
        return math.inf
    return float(sizes[0] / sizes[-1])


def _require_known(errors: Tensor) -> None:
    if not bool(torch.isfinite(errors).any()):
        raise Unsuccessful(
            Status.MISMATCH, "the answers leave the range that attention weights allow"
        )


def _layer(vectors: VectorOracle, W: Tensor, V: Tensor) -> Attention:
    W, V = W.to(torch.float64), V.contiguous()
    if not bool(torch.isfinite(W).all() and torch.isfinite(V).all()):
        raise Unsuccessful(Status.MISMATCH, "no finite weights explain the answers")
    return Attention(W.contiguous(), V, every_token=vectors.every_token, causal=vectors.causal)


# Bilinear forms of every head of a layer whose values are known, at a scale that suits them.
#
# `z = s²·xᵀWδ` (vector_answers.py) loses e^{|z|} to the softmax and 1/|z| to rounding, so |z|
# should come out near 1, and nobody knows the size of W beforehand. Where every token answers, each
# x is sent at a ladder of lengths within one sequence and the best rung is kept, entry by entry:
# queries cost nothing there. Where only the last token answers, the first question settles the
# scale, and only pairs that turn out saturated, or heads far weaker than the others, are asked
# again at another.

_RUNGS = 8.0 ** torch.arange(-5, 6, dtype=torch.float64)
_SOUND = 0.1  # a score known better than this tells the scale; a worse one is saturated
_LARGE, _SMALL = 8.0, 0.05  # scores outside are measured again at another scale
_PRECISION, _BLUNT = 1e-12, 4.0  # so are those that lost more than this because they are large
_TRIES = 12
_SQUARES = (2.0**-80, 2.0**80)
_SPARE = 0.5  # bounds what is asked again, as a share of all: an oracle may be anything


_Measured = tuple[Tensor, Tensor]  # forms and bounds on their errors


class LayerForms:
    """Measures `xᵀ W_h δ` for all keys δ in `blocks`; the keys of a block share a sequence."""

    def __init__(self, vectors: VectorOracle, V: Tensor, blocks: list[Tensor]) -> None:
        self._vectors = vectors
        self._V = V
        self._blocks = blocks
        self._square = 1.0
        self._settled = False
        self._asked = 0
        self._again = 0

    def measure(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        """`x_iᵀ W_h δ_j` and bounds on their errors, both (H, len(xs), number of keys)."""
        parts = [self._block(block, xs) for block in self._blocks]
        forms, errors = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        return forms.transpose(0, 1), errors.transpose(0, 1)

    def _block(self, block: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        if self._vectors.every_token:
            ends = float(_RUNGS[0]), float(_RUNGS[-1])
            return self._fitting(lambda: self._ladder(block, xs), *ends)
        if not self._settled:
            self._settled = True
            first = self._fitting(lambda: self._at(self._square, block, xs[:1]), 1.0, 1.0)
            measured = [first, *([self._at(self._square, block, xs[1:])] if len(xs) > 1 else [])]
            forms, errors = (torch.cat(parts) for parts in zip(*measured, strict=True))
        else:
            forms, errors = self._at(self._square, block, xs)
        self._asked += len(xs)
        self._mend(block, xs, forms, errors)
        return forms, errors

    def _at(self, square: float, block: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        """Forms and errors (k, H, p) from one question each, all at one scale."""
        zeros = len(block) - 1  # as much weight on the references as on the keys
        answers = self._vectors.respond(block.unsqueeze(0), xs, square, zeros)[0]
        references = self._vectors.references(len(xs), zeros)
        z, errors = solve_scores(answers, block @ self._V, references)
        return z / square, errors / square

    def _fitting(self, measure: Callable[[], _Measured], low: float, high: float) -> _Measured:
        """Measured again until the scale, times `low` to `high`, fits."""
        forms, errors = measure()
        for _ in range(_TRIES):
            if not self._move(forms, errors, low * self._square, high * self._square):
                break
            forms, errors = measure()
        return forms, errors

    def _ladder(self, block: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        lengths = _RUNGS[:, None, None]
        forms, errors = self._at(self._square, block, (lengths * xs).flatten(0, 1))
        forms = forms.unflatten(0, (-1, len(xs))) / lengths.unsqueeze(3)
        errors = errors.unflatten(0, (-1, len(xs))) / lengths.unsqueeze(3)
        best = errors.argmin(0, keepdim=True)
        return forms.gather(0, best)[0], errors.gather(0, best)[0]

    def _move(self, forms: Tensor, errors: Tensor, low: float, high: float) -> bool:
        """Shift the scale if the forms do not fit between `low` and `high`; False if they do."""
        step = max(64.0, high / low)
        sound = errors * low <= _SOUND
        largest = float(forms[sound].abs().max()) if bool(sound.any()) else math.inf
        if largest * low > _LARGE:
            wanted = self._square / step
        elif largest * high < _SMALL:
            wanted = self._square * min(step**2, 1 / max(largest * high, 1e-99))
        else:
            return False
        wanted = 4.0 ** round(math.log(min(max(wanted, _SQUARES[0]), _SQUARES[1]), 4))
        moved, self._square = wanted != self._square, wanted
        return moved

    def _mend(self, block: Tensor, xs: Tensor, forms: Tensor, errors: Tensor) -> None:
        """Ask again, at another scale, what was saturated or too faint; keep the better."""
        for factor in (1 / 8, 1 / 64, 2.0**-12, 2.0**-18):
            z = forms.abs() * self._square
            blunt = (errors > _PRECISION * forms.abs().amax((0, 2), keepdim=True)) & (z > _BLUNT)
            self._repeat(self._square * factor, blunt.flatten(1).any(1), block, xs, forms, errors)
        sound = torch.where(errors * self._square < _SOUND, forms.abs(), 0.0)
        for head in range(len(self._V) if len(self._V) > 1 else 0):
            faint = float(sound[:, head].max()) * self._square
            if 0.0 < faint < _SMALL:
                everyone = torch.ones(len(xs), dtype=torch.bool)
                square = self._square / max(faint, 2.0**-30)
                self._repeat(square, everyone, block, xs, forms, errors)

    def _repeat(
        self, square: float, rows: Tensor, block: Tensor, xs: Tensor, forms: Tensor, errors: Tensor
    ) -> None:
        count = int(rows.sum())
        if not 0 < count <= 16 + _SPARE * self._asked * len(self._V) - self._again:
            return
        self._again += count
        fresh, bounds = self._at(square, block, xs[rows])
        better = bounds < errors[rows]
        forms[rows] = torch.where(better, fresh, forms[rows])
        errors[rows] = torch.where(better, bounds, errors[rows])
