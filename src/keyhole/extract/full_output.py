"""Attention layers, exactly, from the vectors they return (ours).

*Provably Learning Attention with Queries* (arXiv 2601.16873) reads scores only.
`FullOutput` takes the vectors O of a layer, of every token or of the last, and returns
W and V of every head. For one head

    O = A·(XV),  A = softmax_rows(X W Xᵀ):

V is read where A is known whatever W is; with V known, O is solved for A, and
log-ratios of A are bilinear forms of W, as many in an answer as V has rank r. In
queries:

    every token, causal      1 + ⌈d/r⌉        V from one sequence
    every token              d + ⌈d/r⌉        one row of V per query, then all of W at once
    last token               d + d·⌈d/r⌉ + 2  two of them test whether there is one head

For the last token, d + d²/r is also the number of unknowns over the numbers per answer.
The answers themselves show which of these an oracle is. Several heads are separated in
the far field, with d more queries if every token answers and about (H − 1)·d + 32 if
the last one does; an answer then holds ⌊m/H⌋ forms of each head.

The direct way sends d + 1 tokens and solves one square system. Here keys are long and
queries short, so that a rank below d, masks, and scales of W from 2⁻⁸⁰ to 2⁸⁰ need the
same computation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import (
    Status,
    Unsuccessful,
    mismatch,
    not_applicable,
    not_identifiable,
)
from keyhole.core.float64 import (
    EPSILON,
    TINY,
    Stream,
    arange,
    full,
    identity,
    ones,
    random_stream,
    tensor,
    zeros,
)
from keyhole.core.numerics import least_squares, thin_svd
from keyhole.extract.arithmetic import EXACT, precision_of
from keyhole.extract.bilinear import (
    MAX_REPEATED,
    MAX_SCALES,
    SOUND,
    ProbeBasis,
    batch_rows,
    lengths,
    max_abs,
    power_of_four,
    random_orthogonal,
    random_units,
)
from keyhole.extract.extraction import Step, expect_finite_weights
from keyhole.extract.judge import Method
from keyhole.oracle.planted import Attention
from keyhole.oracle.protocol import Oracle, ask

_SAME = 1e-6  # forms with a larger relative difference do not come from one head
_INDEPENDENT = 1e4  # the worst condition number of values that are solved for together
_NONE = 1e-6  # smaller singular values of V, relative to the largest, count as zero
_ATTEMPTS = 3
# tokens beyond a basis, which test whether the forms are linear; they cost no query
_EXTRA = 4


@dataclass(frozen=True)
class FullOutput(Method):
    """Exact extraction of an attention layer that returns vectors, with one head or several."""

    seed: int = 0
    tolerance: float = 1e-8

    def expected_queries(self, dim: int) -> int | None:
        """Return the most that one head with invertible values takes."""
        return 2 * dim + 2

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        vectors, total = open_vectors(oracle)
        stream = random_stream(self.seed)
        for step in self._search(vectors, total, stream):
            numbers = vectors.outputs
            if vectors.every_token:
                # One sequence could be long enough for everything.
                numbers = step.unknowns or 1
            yield replace(step, numbers=numbers)

    def _search(
        self,
        vectors: VectorOracle,
        total: Tensor,
        stream: Stream,
    ) -> Iterator[Step]:
        """Try one head if the answers can be one head's, and then several."""
        # The number of heads, and so that of the unknowns, is not known yet.
        only_values = Step(vectors.layer_of_values(total[None]), total.numel(), None)
        yield only_values
        same = max(_SAME, 16 * self.tolerance)  # inexact answers differ by more
        if _may_be_one_head(vectors, total, stream, same):
            if (yield from _one_head(vectors, total, stream, same)):
                return
            yield only_values  # only the sum of the values is known after all
        yield from _several_heads(vectors, total, stream, same)


def _several_heads(
    vectors: VectorOracle,
    total: Tensor,
    stream: Stream,
    same: float,
) -> Iterator[Step]:
    """Find values, then weights, with another key if two heads look like one at the first."""
    for attempt in range(_ATTEMPTS):
        try:
            V = separate_values(vectors, total, stream, pairs=16 * 4**attempt)
            unknowns = len(V) * vectors.unknowns
            yield Step(vectors.layer_of_values(V), V.numel(), unknowns)
            layer = vectors.layer(_all_heads(vectors, V, stream), V)
        except Unsuccessful as end:
            is_last = attempt == _ATTEMPTS - 1
            if is_last or end.status is Status.NOT_IDENTIFIABLE:
                raise
            continue
        yield Step(layer, unknowns, None)
        if vectors.agrees(layer, stream, same):
            yield Step(layer, unknowns, unknowns)
            return


def _may_be_one_head(
    vectors: VectorOracle,
    V: Tensor,
    stream: Stream,
    same: float,
) -> bool:
    """Return whether it can be one head; if only the last token answers, test it by a query.

    With one head, the answer to one key has the direction of the key's value. Answers
    of one number always do. If every token answers, the forms will show it at no cost.
    """
    _, rank = key_basis(V)
    if not rank or vectors.every_token:
        return bool(rank)
    key, x = random_units(2, vectors.dim, stream)
    answer = vectors.respond(key[None, None], x[None])[0, 0]
    value = key @ V
    weight = (answer @ value) / (value @ value)
    return bool(lengths(answer - weight * value) <= same * lengths(value))


def _one_head(
    vectors: VectorOracle,
    V: Tensor,
    stream: Stream,
    same: float,
) -> Generator[Step, None, bool]:
    """Read the answers as those of one head with values V; return whether that was right."""
    d = vectors.dim
    X = random_orthogonal(d, stream)
    keys, rank = key_basis(V)
    forms = LayerForms(vectors, V[None], list(keys.split(rank)))

    def layer(Z: Tensor) -> Attention:
        """Solve `Z = X W Δᵀ`, known for the first rows of X; the others count as zero."""
        W = torch.linalg.solve(keys, (X[: len(Z)].mT @ Z).mT).mT
        return vectors.layer(W[None], V[None])

    if vectors.every_token:
        more = random_units(_EXTRA, d, stream)
        Z, errors = forms.measure(torch.cat([X, more]))[:, 0]
        predicted = (more @ X.mT) @ Z[:d]
        residual = (Z[d:] - predicted).abs() - errors[d:] - errors[:d].sum(0)
        is_one_head = bool((residual <= same * max_abs(Z)).all())
        Z = Z[:d]
    else:
        Z = zeros(0, d)
        # Answers of one number do not show whether it is one head.
        if_one_head = vectors.unknowns if vectors.outputs > 1 else None
        while len(Z) < d:
            part, errors = forms.measure(X[len(Z) : 2 * len(Z) + 1])
            _require_known(errors)
            Z = torch.cat([Z, part[0]])
            yield Step(layer(Z), V.numel() + Z.numel(), if_one_head)
        is_one_head = vectors.agrees(layer(Z), stream, same)
    if is_one_head:
        yield Step(layer(Z), vectors.unknowns, vectors.unknowns)
    return is_one_head


def key_basis(V: Tensor) -> tuple[Tensor, int]:
    """Return a basis of keys (rows) and the rank r of V, so that any r in a row are independent.

    It is the values of the keys that are independent. The first r keys are the left
    singular vectors u_i of V, whose values are orthogonal. A direction k whose value is
    zero is added to one: u_i + k.
    """
    U, sizes, _ = torch.linalg.svd(V)
    rank = int((sizes > _NONE * sizes[0]).sum())
    keys = U.mT.clone()
    if rank:
        index = torch.arange(rank, len(keys))
        keys[index] += U.mT[index % rank]
    return keys, rank


def _all_heads(
    vectors: VectorOracle,
    V: Tensor,
    stream: Stream,
) -> Tensor:
    """Return W of every head, with as many keys in a sequence as have independent values."""
    d = vectors.dim
    keys = random_orthogonal(d, stream)
    X = random_orthogonal(d, stream)
    for p in range(min(d, vectors.outputs // len(V)), 0, -1):
        blocks = list(keys.split(p))
        values = ((block @ V).flatten(0, 1) for block in blocks)
        if all(torch.linalg.cond(each) < _INDEPENDENT for each in values):
            break
    else:
        raise not_applicable(
            f"the values of the {len(V)} heads depend on each other: W_h cannot be separated"
        )
    Z, errors = LayerForms(vectors, V, blocks).measure(X)
    _require_known(errors)
    return X.mT @ Z @ keys


def _require_known(errors: Tensor) -> None:
    if not errors.isfinite().any():
        raise mismatch("the answers leave the range that attention weights allow")


# Chosen keys and short queries, and what their answers show: scores and values of
# heads.
#
# With c = the number of zero tokens and queries, the sequence
#
#     [Tδ_1 ; … ; Tδ_p ; 0 ; … ; 0 ; εx_1 ; … ; εx_k],    T = s·R,  ε = s/R,  R huge
#
# gives token x_i the answer, up to rounding,
#
#     o_i / T = Σ_h Σ_j a_hj · V_hᵀδ_j,   a_hj = e^{z_hj} / (c + Σ_j e^{z_hj}),
#                                         z_hj = s²·x_iᵀ W_h δ_j.
#
# This is the paper's `[x+δ ; x]` (proof of Theorem 4.1) with two changes. The query is
# so short that its own value, and its scores with other queries, vanish: so any number
# of queries share one sequence. And since the answer is a vector, a sequence may hold
# as many keys as have independent values `V_hᵀδ_j`: their weights follow from a linear
# solve, and their forms from `z_hj = log(c·a_hj / (1 − Σ_j a_hj))`. If only the last
# token answers, k = 1 and each query is a sequence of its own; if every token does, k
# queries cost one sequence.
#
# Long keys make long answers, next to which noise or rounding of a fixed size is small:
# this is the amplification of tolerant.py, without further queries.

_REACH = 2.0**45  # R: the square of this is far beyond rounding
_FAR = 2.0**60  # the length of keys in the far field
# The same for answers of float32, where scores of two such keys would overflow.
_SHORT_REACH = 2.0**24
_SHORT_FAR = 2.0**34
_LEAK = 2.0**-60
_ALIKE = 1e-9  # rows that differ by less, relative to the largest, count as equal


@dataclass(frozen=True)
class VectorOracle:
    """An oracle that answers with vectors, of every token or of the last, and its kind of mask."""

    oracle: Oracle
    outputs: int
    every_token: bool
    causal: bool
    reach: float = _REACH
    far: float = _FAR

    @property
    def dim(self) -> int:
        return self.oracle.dim

    @property
    def unknowns(self) -> int:
        """The number of unknowns of one head."""
        return self.dim * (self.dim + self.outputs)

    def layer(self, W: Tensor, V: Tensor) -> Attention:
        """Return a layer of this kind with the weights W (H, d, d) and the values V (H, d, m)."""
        expect_finite_weights(W, V)
        return Attention(
            W.contiguous(),
            V.contiguous(),
            every_token=self.every_token,
            causal=self.causal,
        )

    def layer_of_values(self, V: Tensor) -> Attention:
        return self.layer(zeros(len(V), self.dim, self.dim), V)

    def agrees(
        self,
        layer: Attention,
        stream: Stream,
        same: float,
    ) -> bool:
        """Test the heads by one query with two keys and scores of about 1."""
        keys = random_units(2, self.dim, stream)
        x = random_units(1, self.dim, stream)
        z = (x @ layer.W @ keys.mT)[:, 0]  # (H, 2)
        square = 1 / max(max_abs(z), 2.0**-80)
        weights = (square * z).exp()
        weights = weights / (1 + weights.sum(1, keepdim=True))
        expected = torch.einsum("hj,jd,hdm->m", weights, keys, layer.V)
        residual = self.respond(keys[None], x, square)[0, 0] - expected
        return max_abs(residual) <= same * max_abs(expected)

    def respond(
        self,
        keys: Tensor,
        xs: Tensor,
        square: float = 1.0,
        padding: int = 0,
    ) -> Tensor:
        """Return `o_i / T`, (groups, len(xs), m), for groups of keys (groups, p, d) and each x."""
        s = math.sqrt(square)
        groups, p, d = keys.shape
        long = keys * (s * self.reach)
        short = xs * (s / self.reach)
        if self.every_token:
            short = short.expand(groups, -1, -1)
        else:  # each x is the last token of a sequence of its own
            long = long.repeat_interleave(len(xs), 0)
            short = short.repeat(groups, 1)[:, None]
        between = long.new_zeros(len(long), padding, d)
        answers = self.ask(torch.cat([long, between, short], 1))
        if self.every_token:
            answers = answers[:, p + padding :]
        return answers.reshape(groups, len(xs), self.outputs) / (s * self.reach)

    def references(self, queries: int, padding: int) -> Tensor:
        """Return c, the number of tokens of score 0 that each query sees, itself included."""
        if self.every_token and self.causal:
            return padding + arange(1, queries + 1)
        others = queries if self.every_token else 1
        return full(padding + others, queries)

    def ask(self, sequences: Tensor) -> Tensor:
        """Return answers in batches, each of the shape that this oracle has shown."""
        rows = batch_rows(*sequences.shape[1:])
        return torch.cat([self._one_batch(part) for part in sequences.split(rows)])

    def _one_batch(self, sequences: Tensor) -> Tensor:
        """Return the answers to one batch; raise Unsuccessful if their shape changes."""
        answers = ask(self.oracle, sequences)
        expected = (len(sequences), self.outputs)
        if self.every_token:
            expected = (*sequences.shape[:2], self.outputs)
        if answers.shape != expected:
            raise mismatch(
                f"the answers change their shape: {expected} before, "
                f"{tuple(answers.shape)} now"
            )
        return answers


def open_vectors(oracle: Oracle) -> tuple[VectorOracle, Tensor]:
    """Find whether every token answers and whether the mask is causal, and return `Σ_h V_h` (d×m).

    A zero token's scores are all zero, so its answer is the mean of what it sees,
    whatever W is. The sequence `[0 ; e_1 ; 0 ; e_2 ; … ; 0]` then shows everything:
    causal zero tokens answer with running sums of the rows of V, which give all of V at
    once; others agree on the sum of all rows, and d − 1 queries of one token give the
    rows.
    """
    d = oracle.dim
    basis = _REACH * identity(d)
    count = 2 * d + 1
    tokens = zeros(1, count, d)
    tokens[0, 1::2] = basis
    answers = ask(oracle, tokens)
    every_token = answers.ndim == 3 and answers.shape[1] == count
    if answers.ndim != 2 and not every_token:
        raise not_applicable(
            "expected a vector for the last token or for every token, "
            f"got answers of shape {tuple(answers.shape[1:])}"
        )
    means = answers[0, ::2] if every_token else answers
    apart = max_abs(means - means[-1])
    causal = apart > _ALIKE * max_abs(answers)
    vectors = VectorOracle(oracle, answers.shape[-1], every_token, causal)
    if precision_of(oracle, answers) > EXACT:
        vectors = replace(vectors, reach=_SHORT_REACH, far=_SHORT_FAR)
    if causal:
        # Row k of these sees 2k + 1 tokens.
        attended = arange(1, count + 1, 2)[:, None]
        return vectors, (means * attended).diff(dim=0) / _REACH
    last = means[-1:] * count
    if d > 1:
        rows = vectors.ask(basis[: d - 1, None]).reshape(d - 1, vectors.outputs)
        last = torch.cat([rows, last - rows.sum(0)])
    return vectors, last / _REACH


def solve_scores(
    answers: Tensor,
    values: Tensor,
    references: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the scores z and bounds on their rounding errors, both (…, k, H, p).

    `answers` is (…, k, m) as from `VectorOracle.respond`; `values` (H, p, m) holds the
    `V_hᵀδ_j`.
    """
    heads, p, _ = values.shape
    inverse = torch.linalg.pinv(values.flatten(0, 1), rtol=EPSILON)
    weights = (answers @ inverse).unflatten(-1, (heads, p))
    size = lengths(answers)[..., None, None]
    spread = inverse.norm(dim=0).reshape(heads, p)
    # Answers also hold the values of the queries, each 1/R² of a key's; this allows for
    # many.
    leak = _LEAK * lengths(values).max()
    noise = EPSILON * (size * spread + weights.abs()) + leak * spread
    own_weight = 1 - weights.sum(-1, keepdim=True)
    known = (weights > 0) & (own_weight > 0)
    weights = weights.clamp(min=EPSILON**2)
    own_weight = own_weight.clamp(min=EPSILON**2)
    z = torch.log(weights / own_weight * references[:, None, None])
    errors = noise / weights + (noise.sum(-1, keepdim=True) + EPSILON) / own_weight
    return z, torch.where(known, errors, torch.inf)


# Bilinear forms of every head of a layer whose values are known, at a scale that suits
# them.
#
# The error of `z = s²·xᵀWδ` grows with e^{|z|}, because of the softmax, and with 1/|z|,
# because of rounding, so |z| should be about 1; but the size of W is not known. If
# every token answers, each x is sent at a ladder of lengths within one sequence, which
# costs nothing, and for each entry the best rung is used. If only the last token
# answers, the first query settles the scale, and only pairs that prove saturated, or
# heads far weaker than the others, are measured again at another.

_RUNGS = 8.0 ** arange(-5, 6)
# scores outside are measured again at another scale
_LARGE = 8.0
_SMALL = 0.05
# so are those that lost more than this because they are large
_PRECISION = 1e-12
_BLUNT = 4.0
_SQUARES = (2.0**-80, 2.0**80)


class LayerForms:
    """Measures `xᵀ W_h δ` for all keys δ in `blocks`; the keys of a block share a sequence.

    What is measured is a tensor of two rows: the forms, and bounds on their errors.
    """

    def __init__(
        self,
        vectors: VectorOracle,
        V: Tensor,
        blocks: list[Tensor],
    ) -> None:
        self._vectors = vectors
        self._V = V
        self._blocks = blocks
        self._square = 1.0
        self._settled = False
        self._asked = 0
        self._repeated = 0

    def measure(self, xs: Tensor) -> Tensor:
        """Return `x_iᵀ W_h δ_j` and bounds on their errors, (2, H, len(xs), number of keys)."""
        parts = [self._block(block, xs) for block in self._blocks]
        return torch.cat(parts, dim=-1).transpose(1, 2)

    def _block(self, block: Tensor, xs: Tensor) -> Tensor:
        """Return forms and errors (2, len(xs), H, p) of the keys of one block."""
        if self._vectors.every_token:
            return self._fitting(lambda: self._ladder(block, xs), _RUNGS.tolist())
        if self._settled:
            measured = self._at(self._square, block, xs)
        else:
            self._settled = True
            measured = self._fitting(
                lambda: self._at(self._square, block, xs[:1]), [1.0]
            )
            if len(xs) > 1:
                others = self._at(self._square, block, xs[1:])
                measured = torch.cat([measured, others], 1)
        self._asked += len(xs)
        self._repeat_unsuitable(block, xs, measured)
        return measured

    def _at(
        self,
        square: float,
        block: Tensor,
        xs: Tensor,
    ) -> Tensor:
        """Return forms and errors (2, k, H, p) from one query each, all at one scale."""
        padding = len(block) - 1  # as much weight on the references as on the keys
        answers = self._vectors.respond(block[None], xs, square, padding)[0]
        references = self._vectors.references(len(xs), padding)
        return torch.stack(solve_scores(answers, block @ self._V, references)) / square

    def _fitting(self, measure: Callable[[], Tensor], rungs: list[float]) -> Tensor:
        """Measure again until the scale, times the first to the last of the rungs, fits."""
        measured = measure()
        for _ in range(MAX_SCALES):
            if not self._rescale(measured, rungs[0], rungs[-1]):
                break
            measured = measure()
        return measured

    def _ladder(self, block: Tensor, xs: Tensor) -> Tensor:
        """Measure at all lengths of the ladder in one sequence, and keep the best of each entry."""
        rungs = _RUNGS[:, None, None]
        measured = self._at(self._square, block, (rungs * xs).flatten(0, 1))
        measured = measured.unflatten(1, (-1, len(xs))) / rungs[..., None]
        best = measured[1].argmin(0)
        return measured.gather(1, best.expand(2, 1, *best.shape))[:, 0]

    def _rescale(
        self,
        measured: Tensor,
        first: float,
        last: float,
    ) -> bool:
        """Change the scale unless the forms fit between two rungs of it; False if they do."""
        forms, errors = measured
        low = first * self._square
        high = last * self._square
        step = max(64.0, last / first)
        sound = errors * low <= SOUND
        largest = math.inf
        if sound.any():
            largest = max_abs(forms[sound])
        if largest * low > _LARGE:
            wanted = self._square / step
        elif largest * high < _SMALL:
            wanted = self._square * min(step**2, 1 / max(largest * high, 1e-99))
        else:
            return False
        before = self._square
        self._square = power_of_four(wanted, *_SQUARES)
        return self._square != before

    def _repeat_unsuitable(
        self,
        block: Tensor,
        xs: Tensor,
        measured: Tensor,
    ) -> None:
        """Measure again, at another scale, what was saturated or too faint; keep the better."""
        forms, errors = measured
        for factor in (1 / 8, 1 / 64, 2.0**-12, 2.0**-18):
            inexact = errors > _PRECISION * forms.abs().amax((0, 2), keepdim=True)
            blunt = inexact & (forms.abs() * self._square > _BLUNT)
            rows = blunt.flatten(1).any(1)
            self._repeat(self._square * factor, rows, block, xs, measured)
        if len(self._V) == 1:
            return
        sound = torch.where(errors * self._square < SOUND, forms.abs(), 0.0)
        for head in range(len(self._V)):
            faint = float(sound[:, head].max()) * self._square
            if 0.0 < faint < _SMALL:
                square = self._square / max(faint, 2.0**-30)
                every_row = torch.ones(len(xs), dtype=torch.bool)
                self._repeat(square, every_row, block, xs, measured)

    def _repeat(
        self,
        square: float,
        rows: Tensor,
        block: Tensor,
        xs: Tensor,
        measured: Tensor,
    ) -> None:
        """Measure some rows at another scale, within the limit on repeated queries."""
        count = int(rows.sum())
        allowed = 16 + MAX_REPEATED * self._asked * len(self._V) - self._repeated
        if not 0 < count <= allowed:
            return
        self._repeated += count
        again = self._at(square, block, xs[rows])
        before = measured[:, rows]
        measured[:, rows] = torch.where(again[1] < before[1], again, before)


# The values of several heads, separated in the far field.
#
# As in heads/far_field.py, but vector answers need algebra instead of a search. The
# *gate* of a head is its weight on a single key δ. If δ and the query x are very long,
# every gate is 0 or 1, so
#
#     o(x, δ) = Σ_h [xᵀW_hδ > 0]·V_hᵀδ,      o(x, δ) − o(−x, δ) = Σ_h s_h(x)·V_hᵀδ,  s_h = ±1.
#
# 1. For one δ₀ and many x, the differences are D = S·U, where S is a matrix of signs and the rows
# of
#    U are the `V_hᵀδ₀`. Its rank is H. The sign vectors in the column space of D are the columns of
#    S; to find them, all 2^(H−1) choices of signs at H pivot rows are tried.
# 2. The sum o(x) + o(−x) = Σ_h V_hᵀδ shows whether s_h and V_hᵀδ₀ are right or both negated.
# 3. Around δ₀, o is linear in δ, and the d×m matrix of that map is the sum of the V_h whose gates
#    are open. H such sums with independent patterns (one of them is `Σ_h V_h`, known already) are
#    solved for all V_h. If a gate flipped within a step, the value at δ₀ is off, and shows it.
#
# Heads with equal W_h are found as one (Proposition 7.1). So are heads with W_2 =
# c·W_1, whose gates change at the same x: if c < 0, step 2 notices; if c > 0, the gate
# is not logistic and the judge rejects the result. The gate of a *constant* head, W_h =
# 0, never changes: its value is what the others leave of `Σ_h V_h`.

_ROUNDS = 4  # batches of x, until their sign patterns tell the heads apart
_MAX_HEADS = 16
_ZEROS = 15  # zero tokens, so that the weight of a constant head is far from ½
# smaller singular values of D, relative to the largest, are rounding
_RESOLUTION = 1e-10
_EXACT_SIGN = 1e-6  # how far from ±1 a computed sign may be
_KEY_STEPS = (2.0**-6, 2.0**-9, 2.0**-12, 2.0**-15)  # from δ₀ in step 3


@dataclass(frozen=True)
class _Gates:
    """What one key shows of H heads: which x open which gate, and the values behind the gates."""

    open: Tensor  # (pairs, H) of 0 and 1
    values: Tensor  # (H, m): V_hᵀδ₀
    constant: bool  # is there a head with W = 0 as well?


def separate_values(
    vectors: VectorOracle,
    total: Tensor,
    stream: Stream,
    pairs: int = 16,
) -> Tensor:
    """Return `V_h` of all heads, (H, d, m), from `Σ_h V_h` and far-field answers.

    `pairs` of x and −x are sent at a time; the more alike two heads are, the more are
    needed.
    """
    key = random_units(1, vectors.dim, stream)[0]
    # If every token answers, queries that share a sequence cost nothing.
    pairs = 256 if vectors.every_token else pairs
    xs, gates = _at_one_key(vectors, key @ total, key, stream, pairs)
    V = _solve_maps(vectors, total, ProbeBasis.draw(key, stream), gates, xs)
    if not gates.constant:
        return V
    return torch.cat([V, (total - V.sum(0))[None]])


def _far_field(
    vectors: VectorOracle,
    keys: Tensor,
    xs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return answers (keys, xs, m), and the weight that a key of score 0 has in each."""
    far_keys = (keys * vectors.far)[:, None]
    answers = vectors.respond(far_keys, xs, padding=_ZEROS) / vectors.far
    return answers, 1 / (1 + vectors.references(len(xs), _ZEROS))


def _at_one_key(
    vectors: VectorOracle,
    whole: Tensor,
    key: Tensor,
    stream: Stream,
    pairs: int,
) -> tuple[Tensor, _Gates]:
    """Run steps 1 and 2, with more and more x until exactly H sign vectors fit."""
    xs = zeros(0, vectors.dim)
    D = zeros(0, vectors.outputs)
    totals = D
    heads = 0
    signs = xs
    for _ in range(_ROUNDS):
        more = random_units(pairs, vectors.dim, stream)
        difference, total = _pairs(vectors, whole, key, more)
        xs = torch.cat([xs, more])
        D = torch.cat([D, difference])
        totals = torch.cat([totals, total])
        left, sizes, _ = thin_svd(D)
        heads = int((sizes > _RESOLUTION * sizes[0]).sum())
        if heads > _MAX_HEADS:
            break
        signs = _sign_vectors(left[:, :heads])
        if signs.shape[1] <= heads < len(xs) / 2:
            break
    if not (0 < heads == signs.shape[1] == torch.linalg.matrix_rank(signs)):
        raise not_applicable(
            f"the far field has rank {heads}, but {signs.shape[1]} gates fit: heads outnumber the "
            f"dimensions, the outputs or {_MAX_HEADS}, or their values depend on each other"
        )
    return xs, _orient(signs, least_squares(signs, D), totals.mean(0), whole)


def _pairs(
    vectors: VectorOracle,
    whole: Tensor,
    key: Tensor,
    xs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return `o(x) − o(−x)` and `o(x) + o(−x)` for each x, without a constant head."""
    both = torch.stack([xs, -xs], 1).flatten(0, 1)
    answers, flat = _far_field(vectors, key[None], both)
    answers = answers[0].unflatten(0, (-1, 2))
    flat = flat.unflatten(0, (-1, 2))
    if not (answers.any() or whole.any()):
        raise not_identifiable("V = 0: every answer is zero, whatever W may be")
    # A constant head has the weight `flat`; its value is what the others leave of the
    # whole.
    twice = flat.sum(1, keepdim=True)
    total = (answers.sum(1) - twice * whole) / (1 - twice)
    constant = whole - total.mean(0)
    weight = flat[:, :1] - flat[:, 1:]
    return answers[:, 0] - answers[:, 1] - weight * constant, total


def _orient(
    signs: Tensor,
    U: Tensor,
    total: Tensor,
    whole: Tensor,
) -> _Gates:
    """Run step 2: find the sign of each pair of s_h and value, from the sum `total` of the values.

    `whole` is that sum with the value of a constant head, if there is one.
    """
    size = max(max_abs(U), max_abs(whole), TINY)
    rows = least_squares(U.mT, total[:, None])[:, 0]
    residual = max_abs(rows @ U - total) / size
    if not max_abs(rows.abs() - 1) + residual < _EXACT_SIGN:
        raise not_applicable(
            "the answers to long tokens do not add up: two heads may have opposite scores, which "
            "sequences of two tokens do not show"
        )
    constant = max_abs(total - whole) > _EXACT_SIGN * size
    rows = rows.sign()
    return _Gates((signs * rows + 1) / 2, rows[:, None] * U, constant)


def _sign_vectors(basis: Tensor) -> Tensor:
    """Return all vectors of ±1 in the span of the columns, up to sign."""
    heads = basis.shape[1]
    rows = _pivots(basis * math.sqrt(len(basis)), heads, basis[:0])
    if len(rows) < heads:
        return basis[:, :0]
    choices = tensor(list(itertools.product((1.0, -1.0), repeat=heads)))
    choices = choices[: len(choices) // 2]  # the first sign is +: each only once
    vectors = basis @ torch.linalg.solve(basis[rows], choices.mT)
    fits = ((vectors.abs() - 1).abs() < _EXACT_SIGN).all(0)
    return vectors[:, fits].round()


def _pivots(
    rows: Tensor,
    count: int,
    before: Tensor,
) -> list[int]:
    """Return up to `count` rows, each the furthest from the span of `before` and earlier ones."""
    chosen: list[int] = []
    if len(before):
        rows = rows - rows @ torch.linalg.pinv(before) @ before
    for _ in range(min(count, len(rows))):
        norms = lengths(rows)
        if not norms.max() > _EXACT_SIGN:
            break
        furthest = int(norms.argmax())
        chosen.append(furthest)
        unit = rows[furthest] / norms.max()
        rows = rows - torch.outer(rows @ unit, unit)
    return chosen


def _solve_maps(
    vectors: VectorOracle,
    total: Tensor,
    basis: ProbeBasis,
    gates: _Gates,
    xs: Tensor,
) -> Tensor:
    """Return V_h of all heads but a constant one, from linear maps at enough x."""
    d = vectors.dim
    heads = len(gates.values)

    def linear_maps(rows: list[int], step: float) -> tuple[Tensor, Tensor]:
        """Return maps (k, d, m) and their weights (k, H) for those x where no gate flipped.

        Around δ₀ they are `o − w·Σ_h V_hᵀδ = Σ_h (open_h − w)·V_hᵀδ`, with w the weight
        of a constant head, whose value is in the sum on the left only, where it
        cancels.
        """
        keys = basis.unit_v + step * basis.Q
        answers, flat = _far_field(vectors, keys, xs[rows])
        answers = answers.transpose(0, 1) - flat[:, None, None] * (keys @ total)
        weights = gates.open[rows] - flat[:, None]
        at_key = (weights @ gates.values)[:, None]
        # The keys add up to a multiple of δ₀, so a gate that flipped at one of them
        # shows here.
        mean = answers.sum(1, keepdim=True) / (d + step * math.sqrt(d))
        allowed = _EXACT_SIGN / d * max_abs(gates.values)
        calm = (mean - at_key).abs().amax((1, 2)) <= allowed
        return basis.Q.mT @ (answers - at_key)[calm] / step, weights[calm]

    weights = zeros(0, heads) if gates.constant else ones(1, heads)
    maps = total[None][: len(weights)]
    for step in _KEY_STEPS:
        left = torch.ones(len(xs), dtype=torch.bool)
        while len(weights) < heads and left.any():
            rows = _pivots(gates.open * left[:, None], heads - len(weights), weights)
            if not rows:
                break
            if vectors.every_token:
                # Queries that share a sequence cost nothing.
                rows = left.nonzero()[:, 0].tolist()
            left[rows] = False
            fresh, patterns = linear_maps(rows, step)
            best = _pivots(patterns, heads - len(weights), weights)
            maps = torch.cat([maps, fresh[best]])
            weights = torch.cat([weights, patterns[best]])
    if len(weights) < heads:
        raise mismatch("the far field is not linear around a key")
    return torch.linalg.solve(weights, maps.flatten(1)).unflatten(1, total.shape)
