"""Attention weights from answers that are vectors, with chosen keys: scores and values of heads.

With `f` as in attention.py and c = the number of zero tokens and queries, the sequence

    [Tδ_1 ; … ; Tδ_p ; 0 ; … ; 0 ; εx_1 ; … ; εx_k],    T = s·R,  ε = s/R,  R huge

gives token x_i the answer, up to rounding,

    o_i / T = Σ_h Σ_j a_hj · V_hᵀδ_j,   a_hj = e^{z_hj} / (c + Σ_j e^{z_hj}),
                                        z_hj = s²·x_iᵀ W_h δ_j.

It is the paper's `[x+δ ; x]` (proof of Theorem 4.1) with two changes. The query is so short that
its own value and its scores among queries vanish, so that any number of queries share one
sequence without disturbing each other; and since the answer is a vector, as many keys may stand
next to each other as the values `V_hᵀδ_j` are independent: their weights follow by a linear solve
and their forms by `z_hj = log(c·a_hj / (1 − Σ_j a_hj))`. Where only the last token answers, k = 1
and each query is a sequence of its own; where every token does, k queries cost one sequence.

Long keys make long answers, next to which noise or rounding of a fixed size is small: the
amplification of tolerant.py, without further queries.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import ProbeBasis, batch_rows, random_units
from keyhole.oracle.protocol import Oracle, ask

_REACH = 2.0**45  # R: its square is far beyond rounding
_EPSILON = torch.finfo(torch.float64).eps
_LEAK = 2.0**-60
_ALIKE = 1e-9  # rows that differ by less, relative to the largest, are the same row


@dataclass(frozen=True)
class VectorOracle:
    """An oracle that answers with vectors, of every token or the last, with its kind of mask."""

    oracle: Oracle
    outputs: int
    every_token: bool
    causal: bool

    @property
    def dim(self) -> int:
        return self.oracle.dim

    def respond(self, keys: Tensor, xs: Tensor, square: float = 1.0, zeros: int = 0) -> Tensor:
        """`o_i / T` for each group of keys (groups, p, d) and each x: (groups, len(xs), m)."""
        s = math.sqrt(square)
        groups, p, d = keys.shape
        asked = xs if self.every_token else xs[:1]
        tokens = torch.zeros(p + zeros + len(asked), d, dtype=torch.float64)
        if self.every_token:
            tokens[p + zeros :] = xs * (s / _REACH)
            sequences = tokens.expand(groups, -1, -1).clone()
            sequences[:, :p] = keys * (s * _REACH)
        else:
            sequences = tokens.expand(groups, len(xs), -1, -1).clone()
            sequences[:, :, :p] = (keys * (s * _REACH)).unsqueeze(1)
            sequences[:, :, -1] = xs * (s / _REACH)
            sequences = sequences.flatten(0, 1)
        answers = self.ask(sequences)
        if self.every_token:
            answers = answers[:, p + zeros :]
        return answers.reshape(groups, len(xs), self.outputs) / (s * _REACH)

    def references(self, queries: int, zeros: int) -> Tensor:
        """c, the tokens of score 0 that each of so many queries sees, itself included."""
        if not self.every_token:
            return torch.full((queries,), 1.0 + zeros, dtype=torch.float64)
        if self.causal:
            return zeros + torch.arange(1, queries + 1, dtype=torch.float64)
        return torch.full((queries,), float(zeros + queries), dtype=torch.float64)

    def ask(self, sequences: Tensor) -> Tensor:
        """Answers in batches, each of the shape that this oracle has shown."""
        rows = batch_rows(*sequences.shape[1:])
        return torch.cat([self._one_batch(part) for part in sequences.split(rows)])

    def _one_batch(self, sequences: Tensor) -> Tensor:
        answers = ask(self.oracle, sequences)
        count, length, _ = sequences.shape
        wanted = (count, length, self.outputs) if self.every_token else (count, self.outputs)
        if answers.shape != wanted:
            raise Unsuccessful(
                Status.MISMATCH,
                f"the answers change their shape: {wanted} before, {tuple(answers.shape)} now",
            )
        return answers


def open_vectors(oracle: Oracle) -> tuple[VectorOracle, Tensor]:
    """Whether every token answers, whether the mask is causal, and `Σ_h V_h` (d×m).

    A zero token's scores are all zero, so it answers with the mean of what it sees, whatever W
    is. `[0 ; e_1 ; 0 ; e_2 ; … ; 0]` then tells everything: causal zero tokens answer with running
    sums of the rows of V, which is all of V at once; others agree on the sum of all rows, and
    d − 1 one-token queries bring the rows themselves.
    """
    d = oracle.dim
    basis = _REACH * torch.eye(d, dtype=torch.float64)
    tokens = torch.zeros(1, 2 * d + 1, d, dtype=torch.float64)
    tokens[0, 1::2] = basis
    answers = ask(oracle, tokens)
    if answers.ndim not in (2, 3) or (answers.ndim == 3 and answers.shape[1] != 2 * d + 1):
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            "expected a vector for the last token or for every token, "
            f"got answers of shape {tuple(answers.shape[1:])}",
        )
    every_token = answers.ndim == 3
    means = answers[0, ::2] if every_token else answers
    causal = bool((means - means[-1]).abs().max() > _ALIKE * answers.abs().max())
    vectors = VectorOracle(oracle, answers.shape[-1], every_token, causal)
    if causal:
        # Row k of these sees 2k + 1 tokens.
        seen = 2 * torch.arange(d + 1, dtype=torch.float64).unsqueeze(1) + 1
        return vectors, (means * seen).diff(dim=0) / _REACH
    last = means[-1:] * (2 * d + 1)
    if d > 1:
        rows = vectors.ask(basis[: d - 1].unsqueeze(1)).reshape(d - 1, vectors.outputs)
        last = torch.cat([rows, last - rows.sum(0)])
    return vectors, last / _REACH


def solve_scores(answers: Tensor, values: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
    """The scores z and bounds on their rounding errors, both (…, k, H, p).

    `answers` is (…, k, m) as from `VectorOracle.respond`, `values` (H, p, m) holds the `V_hᵀδ_j`.
    """
    heads, p, _ = values.shape
    inverse = torch.linalg.pinv(values.flatten(0, 1), rtol=_EPSILON)
    weights = (answers @ inverse).unflatten(-1, (heads, p))
    size = torch.linalg.vector_norm(answers, dim=-1)[..., None, None]
    spread = torch.linalg.vector_norm(inverse, dim=0).reshape(heads, p)
    # The queries' own values, 1/R² of a key's each, are in the answers too; this allows for many.
    leak = _LEAK * torch.linalg.vector_norm(values, dim=-1).max()
    noise = _EPSILON * (size * spread + weights.abs()) + leak * spread
    rest = 1 - weights.sum(-1, keepdim=True)
    tiny = _EPSILON**2
    z = torch.log(weights.clamp(min=tiny) / rest.clamp(min=tiny) * references[:, None, None])
    errors = noise / weights.clamp(min=tiny)
    errors = errors + (noise.sum(-1, keepdim=True) + _EPSILON) / rest.clamp(min=tiny)
    return z, torch.where((weights > 0) & (rest > 0), errors, torch.inf)


# The values of several heads, separated in the far field.
#
# As in heads/far_field.py; with vector answers it is algebra instead of a search. The *gate* of a
# head is its weight on a single key δ. With δ and the query x very long every gate is 0 or 1, so
#
#     o(x, δ) = Σ_h [xᵀW_hδ > 0]·V_hᵀδ,      o(x, δ) − o(−x, δ) = Σ_h s_h(x)·V_hᵀδ,  s_h = ±1.
#
# 1. For one δ₀ and many x the differences are D = S·U with S a matrix of signs and the rows of U
#    the `V_hᵀδ₀`. Its rank is H. In the column space of D the vectors of signs are the columns of
#    S: as many as there are choices at H pivot rows, 2^(H−1), are tried.
# 2. The sum o(x) + o(−x) = Σ_h V_hᵀδ says which of ±s_h, ±V_hᵀδ₀ is meant.
# 3. Around δ₀, o is linear in δ, and the d×m matrix of that map is a sum of known V_h. H such sums
#    with independent patterns (one of them is `Σ_h V_h`, known already) are solved for all V_h.
#    Whether a gate flipped on the way shows in the value at δ₀, which step 1 knows.
#
# Heads with equal W_h are found as one (Proposition 7.1). So are here heads with W_2 = c·W_1, whose
# gates change at the same x: for c < 0 step 2 notices, for c > 0 the gate is not logistic and the
# judge rejects the result. The gate of a *constant* head, W_h = 0, never changes: its value is what
# the others leave of `Σ_h V_h`.

_ROUNDS = 4  # of more x, until their sign patterns tell the heads apart
_MOST = 16
_FAR = 2.0**60
_ZEROS = 15  # zero tokens, so that a constant head has a weight far from ½
_RESOLUTION = 1e-10  # singular values of D below this, relative to the largest, are rounding
_EXACT = 1e-6  # how far from ±1 a sign may be computed
_STEPS = (2.0**-6, 2.0**-9, 2.0**-12, 2.0**-15)  # away from δ₀ in step 3, until no gate flips


@dataclass(frozen=True)
class _Gates:
    """What one key shows of H heads: which x open which gate, and the values behind them."""

    open: Tensor  # (pairs, H) of 0 and 1
    values: Tensor  # (H, m): V_hᵀδ₀
    constant: bool  # is there a head with W = 0 as well?


def separate_values(
    vectors: VectorOracle, total: Tensor, stream: torch.Generator, pairs: int = 16
) -> Tensor:
    """`V_h` of all heads, (H, d, m), from `Σ_h V_h` and far-field answers.

    `pairs` of x and −x are asked at a time; the more alike two heads are, the more are needed.
    """
    key = random_units(1, vectors.dim, stream)[0]
    # Where every token answers, queries next to each other cost nothing.
    pairs = 256 if vectors.every_token else pairs
    xs, gates = _at_one_key(vectors, key @ total, key, stream, pairs)
    V = _solve_maps(_LinearMaps(vectors, total, ProbeBasis.draw(key, stream), gates), xs)
    return torch.cat([V, (total - V.sum(0)).unsqueeze(0)]) if gates.constant else V


def _far_field(vectors: VectorOracle, keys: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
    """Answers (keys, xs, m), and the weight of a key in each if its score is 0."""
    answers = vectors.respond((keys * _FAR).unsqueeze(1), xs, zeros=_ZEROS) / _FAR
    return answers, 1 / (1 + vectors.references(len(xs), _ZEROS))


def _at_one_key(
    vectors: VectorOracle, whole: Tensor, key: Tensor, stream: torch.Generator, pairs: int
) -> tuple[Tensor, _Gates]:
    """Steps 1 and 2, with as many x as it takes until just H vectors of signs fit."""
    xs = torch.empty(0, vectors.dim, dtype=torch.float64)
    D = torch.empty(0, vectors.outputs, dtype=torch.float64)
    totals = torch.empty_like(D)
    heads, signs = 0, xs
    for _ in range(_ROUNDS):
        more = random_units(pairs, vectors.dim, stream)
        apart, total = _pairs(vectors, whole, key, more)
        xs = torch.cat([xs, more])
        D, totals = torch.cat([D, apart]), torch.cat([totals, total])
        left, sizes, _ = torch.linalg.svd(D, full_matrices=False)
        heads = int((sizes > _RESOLUTION * sizes[0]).sum())
        if heads > _MOST:
            break
        signs = _sign_vectors(left[:, :heads])
        if signs.shape[1] <= heads < len(xs) / 2:
            break
    if not (0 < heads == signs.shape[1] == int(torch.linalg.matrix_rank(signs))):
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"the far field has rank {heads}, but {signs.shape[1]} gates fit: heads outnumber the "
            f"dimensions, the outputs or {_MOST}, or their values depend on each other",
        )
    return xs, _orient(signs, least_squares(signs, D), totals.mean(0), whole)


def _pairs(vectors: VectorOracle, whole: Tensor, key: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
    """`o(x) − o(−x)` and `o(x) + o(−x)` for each x, without a constant head."""
    answers, flat = _far_field(vectors, key.unsqueeze(0), torch.stack([xs, -xs], 1).flatten(0, 1))
    answers, flat = answers[0].unflatten(0, (-1, 2)), flat.unflatten(0, (-1, 2))
    if not bool(answers.any() | whole.any()):
        raise Unsuccessful(
            Status.NOT_IDENTIFIABLE, "V = 0: every answer is zero, whatever W may be"
        )
    # A constant head has the weight `flat`, and the value that the others leave of the whole.
    twice = flat.sum(1, keepdim=True)
    total = (answers.sum(1) - twice * whole) / (1 - twice)
    constant = whole - total.mean(0)
    return answers[:, 0] - answers[:, 1] - (flat[:, :1] - flat[:, 1:]) * constant, total


def _orient(signs: Tensor, U: Tensor, total: Tensor, whole: Tensor) -> _Gates:
    """Step 2: the sign of each pair of s_h and value, by the sum `total` of the values.

    `whole` is that sum with the value of a constant head, if there is one.
    """
    size = torch.maximum(U.abs().max(), whole.abs().max())
    rows = least_squares(U.mT, total.unsqueeze(1))[:, 0]
    odd = (rows.abs() - 1).abs().max() + (rows @ U - total).abs().max() / size
    if not bool(odd < _EXACT):
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            "the answers to long tokens do not add up: two heads may have opposite scores, which "
            "two tokens cannot tell",
        )
    constant = bool((total - whole).abs().max() > _EXACT * size)
    rows = rows.sign()
    return _Gates((signs * rows + 1) / 2, rows.unsqueeze(1) * U, constant)


def _sign_vectors(basis: Tensor) -> Tensor:
    """All vectors of ±1 in the span of the columns, up to sign."""
    heads = basis.shape[1]
    rows = _pivots(basis * math.sqrt(len(basis)), heads, basis[:0])
    if len(rows) < heads:
        return basis[:, :0]
    choices = torch.tensor(list(itertools.product((1.0, -1.0), repeat=heads)), dtype=torch.float64)
    choices = choices[: len(choices) // 2]  # the first sign is +: each only once
    vectors = basis @ torch.linalg.solve(basis[rows], choices.mT)
    return vectors[:, ((vectors.abs() - 1).abs() < _EXACT).all(0)].round()


def _pivots(rows: Tensor, count: int, before: Tensor) -> list[int]:
    """Up to `count` rows, each the furthest from the span of `before` and those chosen so far."""
    chosen: list[int] = []
    rows = rows - rows @ torch.linalg.pinv(before) @ before if len(before) else rows
    for _ in range(min(count, len(rows))):
        norms = torch.linalg.vector_norm(rows, dim=1)
        if not bool(norms.max() > _EXACT):
            break
        chosen.append(int(norms.argmax()))
        unit = rows[chosen[-1]] / norms.max()
        rows = rows - torch.outer(rows @ unit, unit)
    return chosen


def _solve_maps(around: _LinearMaps, xs: Tensor) -> Tensor:
    """V_h of all heads but a constant one: linear maps at enough x, nearer δ₀ if gates flip."""
    gates = around.gates
    heads = gates.open.shape[1]
    ones = torch.ones(1, heads, dtype=torch.float64)
    known = ones[:0] if gates.constant else ones
    maps, weights = around.total.unsqueeze(0)[: len(known)], known
    for step in _STEPS:
        left = torch.ones(len(xs), dtype=torch.bool)
        while len(weights) < heads and bool(left.any()):
            wanted = _pivots(gates.open * left.unsqueeze(1), heads - len(weights), weights)
            if not wanted:
                break
            # Queries next to each other cost nothing where every token answers.
            rows = left.nonzero()[:, 0] if around.vectors.every_token else torch.tensor(wanted)
            left[rows] = False
            fresh, patterns = around.linear_maps(xs, rows, step)
            best = _pivots(patterns, heads - len(weights), weights)
            maps, weights = torch.cat([maps, fresh[best]]), torch.cat([weights, patterns[best]])
    if len(weights) < heads:
        raise Unsuccessful(Status.MISMATCH, "the far field is not linear around a key")
    return torch.linalg.solve(weights, maps.flatten(1)).unflatten(1, around.total.shape)


@dataclass(frozen=True)
class _LinearMaps:
    """Around δ₀ every x has a linear map of δ, `o − w·Σ_h V_hᵀδ = Σ_h (open_h − w)·V_hᵀδ`.

    w is the weight of a constant head, which the sum on the left has and that on the right has not.
    """

    vectors: VectorOracle
    total: Tensor
    basis: ProbeBasis
    gates: _Gates

    def linear_maps(self, xs: Tensor, rows: Tensor, step: float) -> tuple[Tensor, Tensor]:
        """Maps (k, d, m) and their weights (k, H) for those x that no gate flipped at."""
        keys = self.basis.unit_v + step * self.basis.Q
        answers, flat = _far_field(self.vectors, keys, xs[rows])
        answers = answers.transpose(0, 1) - flat[:, None, None] * (keys @ self.total)
        weights = self.gates.open[rows] - flat.unsqueeze(1)
        at_key = (weights @ self.gates.values).unsqueeze(1)
        # The keys sum up to a multiple of δ₀: a gate that flipped at any of them shows here.
        d = self.vectors.dim
        apart = answers.sum(1, keepdim=True) / (d + step * math.sqrt(d)) - at_key
        calm = apart.abs().amax((1, 2)) <= _EXACT / d * self.gates.values.abs().max()
        maps = self.basis.Q.mT @ (answers - at_key)[calm] / step
        return maps, weights[calm]
