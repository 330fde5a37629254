"""What tokens answer to chosen keys: the measurement behind every extraction from vectors.

With `f` as in attention.py and c = the number of zero tokens and queries, the sequence

    [Tδ_1 ; … ; Tδ_p ; 0 ; … ; 0 ; εx_1 ; … ; εx_k],    T = s·R,  ε = s/R,  R huge

makes token x_i answer, to rounding,

    o_i / T = Σ_h Σ_j a_hj · V_hᵀδ_j,   a_hj = e^{z_hj} / (c + Σ_j e^{z_hj}),
                                        z_hj = s²·x_iᵀ W_h δ_j.

It is the paper's `[x+δ ; x]` (proof of Theorem 4.1) with two changes. The query is so short that
its own value and its scores among queries vanish, so that any number of queries share one
sequence without disturbing each other; and since the answer is a vector, as many keys may stand
next to each other as the values `V_hᵀδ_j` are independent: their weights follow by a linear solve
and their forms by `z_hj = log(c·a_hj / (1 − Σ_j a_hj))`. Where only the last token answers, k = 1
and each query is a sequence of its own; where every token does, k queries cost one sequence.

Long keys make long answers, so noise or rounding of a fixed size drowns in them: the
amplification of tolerant.py, for nothing.
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
    """An oracle that answers with vectors, and which of its tokens answer and see what."""

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
    """Which tokens answer and what they see, and `Σ_h V_h` (d×m).

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
    """z and what rounding may have done to it, both (…, k, H, p).

    `answers` is (…, k, m) as from `VectorOracle.respond`, `values` (H, p, m) holds the `V_hᵀδ_j`.
    """
    heads, p, _ = values.shape
    inverse = torch.linalg.pinv(values.flatten(0, 1), rtol=_EPSILON)
    weights = (answers @ inverse).unflatten(-1, (heads, p))
    size = torch.linalg.vector_norm(answers, dim=-1)[..., None, None]
    spread = torch.linalg.vector_norm(inverse, dim=0).reshape(heads, p)
    # Short queries have values too, 1/R² of the keys' and up to the ladder's length times that.
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
# The far field again (heads/far_field.py); vector answers make it algebra instead of a search. One
# key δ and a query x (see above), both far out: every gate is 0 or 1, so
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
# Heads with equal W_h act as one and come out merged (Proposition 7.1). So do here heads with W_2 =
# c·W_1, which cross at the same places: for c < 0 step 2 says so, for c > 0 the gate is not
# logistic and the result fails the judge. A head with W_h = 0 never crosses: it is what the others
# leave of `Σ_h V_h`.

_ROUNDS = 4  # of more x, until their sign patterns tell the heads apart
_MOST = 16
_FAR = 2.0**60
_ZEROS = 15  # references, so that a head with W = 0 does not look like half a gate
_RESOLUTION = 1e-10  # singular values of D below this, relative to the largest, are rounding
_EXACT = 1e-6  # how far from ±1 a sign may be computed
_STEPS = (2.0**-6, 2.0**-9, 2.0**-12, 2.0**-15)  # away from δ₀ in step 3, until no gate flips


@dataclass(frozen=True)
class _Gates:
    """What one key shows of H heads: which x open which gate, and the values behind them."""

    open: Tensor  # (pairs, H) of 0 and 1
    values: Tensor  # (H, m): V_hᵀδ₀
    still: bool  # is there a head without crossings as well?


def separate_values(
    vectors: VectorOracle, total: Tensor, stream: torch.Generator, pairs: int = 16
) -> Tensor:
    """`V_h` of all heads, (H, d, m), from `Σ_h V_h` and far-field answers.

    So many pairs of x and −x are asked at a time; the nearer two heads, the more it takes.
    """
    key = random_units(1, vectors.dim, stream)[0]
    # Where every token answers, queries next to each other cost nothing.
    pairs = 256 if vectors.every_token else pairs
    xs, gates = _at_one_key(vectors, key @ total, key, stream, pairs)
    V = _solve_maps(_LinearMaps(vectors, total, ProbeBasis.draw(key, stream), gates), xs)
    return torch.cat([V, (total - V.sum(0)).unsqueeze(0)]) if gates.still else V


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
    crossing = torch.empty_like(D)
    heads, signs = 0, xs
    for _ in range(_ROUNDS):
        more = random_units(pairs, vectors.dim, stream)
        apart, total = _pairs(vectors, whole, key, more)
        xs = torch.cat([xs, more])
        D, crossing = torch.cat([D, apart]), torch.cat([crossing, total])
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
    return xs, _orient(signs, least_squares(signs, D), crossing.mean(0), whole)


def _pairs(vectors: VectorOracle, whole: Tensor, key: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
    """`o(x) − o(−x)` and `o(x) + o(−x)` for each x, over heads that cross."""
    answers, flat = _far_field(vectors, key.unsqueeze(0), torch.stack([xs, -xs], 1).flatten(0, 1))
    answers, flat = answers[0].unflatten(0, (-1, 2)), flat.unflatten(0, (-1, 2))
    if not bool(answers.any() | whole.any()):
        raise Unsuccessful(
            Status.NOT_IDENTIFIABLE, "V = 0: every answer is zero, whatever W may be"
        )
    # A head of score 0 adds `flat` of its value, which is what crossing heads leave of the whole.
    twice = flat.sum(1, keepdim=True)
    crossing = (answers.sum(1) - twice * whole) / (1 - twice)
    still = whole - crossing.mean(0)
    return answers[:, 0] - answers[:, 1] - (flat[:, :1] - flat[:, 1:]) * still, crossing


def _orient(signs: Tensor, U: Tensor, crossing: Tensor, whole: Tensor) -> _Gates:
    """Step 2: signs and values up to a common sign, settled by the sum of the values."""
    size = torch.maximum(U.abs().max(), whole.abs().max())
    rows = least_squares(U.mT, crossing.unsqueeze(1))[:, 0]
    odd = (rows.abs() - 1).abs().max() + (rows @ U - crossing).abs().max() / size
    if not bool(odd < _EXACT):
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            "the far field does not add up: two heads may cross at the same places in opposite "
            "directions, which two tokens cannot tell",
        )
    still = bool((crossing - whole).abs().max() > _EXACT * size)
    rows = rows.sign()
    return _Gates((signs * rows + 1) / 2, rows.unsqueeze(1) * U, still)


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
    """Up to so many rows that stick out most, one by one, of those chosen and of `before`."""
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
    """All V_h of crossing heads, from linear maps at enough x, nearer to δ₀ if gates flip."""
    gates = around.gates
    heads = gates.open.shape[1]
    ones = torch.ones(1, heads, dtype=torch.float64)
    known = ones[:0] if gates.still else ones
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
    """Around δ₀ every x sees a linear map, `o − w·Σ_h V_hᵀδ = Σ_h (open_h − w)·V_hᵀδ`.

    The sums run over all heads and over those that cross; w is the weight of a still one.
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
