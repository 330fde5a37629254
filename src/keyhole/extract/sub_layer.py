"""An attention sub-layer of a real checkpoint: biases, residual, norm, positions (ours).

The target is `y` of oracle/sub_layer.py: several heads that may share keys and values,
biases, rotary positions, an RMS norm in front, the input added behind. None of these is
assumed: the number of heads, widths, ε and frequencies are read from answers. Only the
last token's vector is used.

Many parameters give the same function:
- `V_g → V_g T`, `O_h → T⁻¹ O_h` for any invertible T, and `K_g → K_g T`, `Q_h, q_h → Q_h T⁻ᵀ,
  q_h T⁻ᵀ`; with rotary positions only those T that commute with all R_m, a complex
  number for each plane;
- weights sum to 1, so a bias of the values equals one of the output, `b + Σ_h (v_h O_h)`; and a
  bias of the keys adds one number to all scores of a query, which the softmax cancels
  (without rotary positions);
- a norm's gain is part of Q, K and V; 1/√k is part of Q; the order of heads is free.
A sub-layer is recovered up to these, as `unknowns` numbers (oracle/sub_layer.py).

A head's *gate* is its weight on the first token of `[x + δ ; x]`: the logistic function
of a score, different for every head. With `M_h = V_h O_h`, answers for one δ and many x
are sums of gates times δM_h, so a fit separates the heads. The first δ for which the
fit succeeds is the *anchor*. The stages, with s heads that share keys:

    stage               what it reads                                    queries
    open_surroundings   norm, ε, residual connection, b                  a few
    read_total          Σ_h M_h, from single tokens                      d + 1
    find_anchor         the first vector δM_h of each head               some dozens
    read_vectors        the row space of each M_h                        5/4·k·(H + 12)
    strengthened        x with larger scores, if a norm bounds tokens    d
    read_factors        keys, from the scores of 9/8·k/s or more x       2·d/s or more
                        queries, at d + 1 points                         3(d + 1)

At least (unknowns / numbers in an answer) queries are needed. MiniLM (d = 384, H = 12)
takes 2.1 times as many, SmolLM2 (d = 576, s = 3, H = 9) 3.6 times. heads/far_field.py
separates heads by tokens so long that all gates are 0 or 1; behind a norm there are
none.

The heads' outputs must be independent (H·k ≤ m), and the answers exact to about 1e-15
of their size, because the chain of solves costs six to eight digits. A LayerNorm behind
the sub-layer, as in BERT, removes the mean and the length of every answer; such a
target is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import mismatch, not_applicable
from keyhole.core.float64 import Stream, arange, ones, random_stream, zeros
from keyhole.core.numerics import least_squares, thin_svd
from keyhole.extract.bilinear import max_abs, random_orthogonal
from keyhole.extract.extraction import Step, expect_finite_weights
from keyhole.extract.judge import Method
from keyhole.extract.sub_layer_values import (
    Probe,
    Surroundings,
    Values,
    find_anchor,
    find_residual,
    open_surroundings,
    out_of_range,
    read_total,
    read_vectors,
    strengthened,
)
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.sub_layer import SubLayer, rotated

_AXES = 6  # the dimension of the subspace from which points are drawn
# the range in which the mean of |tanh(z/2)| = |2·gate − 1| should lie
_OPEN = (0.75, 0.92)
_SCALES = 16
_PAIRS = 3
# with positions, all tokens are scaled by reach to this power, x like δ
_SHORTER = -1 / 8
_FAINT = 0.5  # scores below this, on average, cost too many digits
# share of the norm's radius: two such orthogonal tokens have their sum inside
_BOUND = 0.67
_LONGEST = 0.95  # share of the radius, for one token
# the length of δ relative to the last token, if the latter is prescribed
_INWARDS = 0.45
_SCORES = 0.7  # the size of scores at which logarithms of weights lose least


@dataclass(frozen=True)
class AttentionSubLayer(Method):
    """Exact extraction of a checkpoint's attention sub-layer that returns vectors."""

    seed: int = 0
    tolerance: float = 1e-8

    def expected_queries(self, dim: int) -> int | None:
        """An estimate for heads that fill the width and share no keys."""
        return 7 * dim

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = random_stream(self.seed)
        model = read_attention(open_surroundings(oracle, stream), stream)
        parts = heads_described(model)
        if model.epsilon is not None:
            parts.append(f"an RMS norm in front (epsilon {model.epsilon:.2e})")
        parts.append("the input added" if model.residual else "no residual")
        yield Step(
            model,
            model.unknowns,
            model.unknowns,
            numbers=model.outputs,
            remark=", ".join(parts),
        )


def read_attention(
    view: Surroundings,
    stream: Stream,
    total: Tensor | None = None,
    reach: float = 1.0,
) -> SubLayer:
    """Read the sub-layer, given norm, residual and b; `total` is Σ_h M_h, if it is known.

    Without a norm x may be `reach` times longer than δ and keys, which makes scores
    larger.
    """
    d = view.dim
    prescribed = view.last_norm is not None
    length = min(math.sqrt(d), _BOUND * view.radius)
    if total is None:
        total = read_total(view, length, stream)
    if view.last_norm is not None:
        length = _INWARDS * view.last_norm
    positions = _positions_matter(view, length, stream)
    if not prescribed:
        share = 1.0
        if positions:
            # The score of x with itself counts, so all tokens are made shorter instead.
            share = reach**_SHORTER
            reach = 1.0
        length = share * _fitting_length(view, total, length, reach, stream)
    subspace = random_orthogonal(d, stream)[: min(_AXES, d // 2)]
    probe = Probe(view, total, subspace, length, positions, reach)
    anchor = find_anchor(probe, stream)
    scores = float(anchor.scores.square().mean().sqrt())  # of random directions
    if scores < _FAINT and (prescribed or length >= _BOUND * view.radius):
        probe = strengthened(probe, anchor, stream)
        anchor = find_anchor(probe, stream, anchor.delta)
    view, total = find_residual(view, total, anchor)
    probe = replace(probe, view=view, total=total)
    values = Values.of(total, *read_vectors(probe, anchor, stream))
    values = values.completed(probe, stream)
    stronger = _SCORES / max(2 * scores, 1e-3)
    length = length * (stronger if prescribed else math.sqrt(stronger))
    length = min(length, _LONGEST * view.radius)
    reader = Reader(view, values.of_heads, values.O, total, positions)
    factors = read_factors(reader, values.groups, length, reach, stream)
    order = [head for group in values.groups for head in group]
    layer = {
        "Q": factors.Q[order],
        "q": factors.q[order],
        "K": factors.K,
        "V": values.V,
        "O": values.O[order],
        "b": view.b,
        "frequencies": factors.frequencies,
    }
    expect_finite_weights(*layer.values())
    return SubLayer(
        **{name: part.contiguous() for name, part in layer.items()},
        epsilon=view.epsilon,
        residual=view.residual,
        every_token=view.every_token,
        causal=view.causal,
    )


def _fitting_length(
    view: Surroundings,
    total: Tensor,
    length: float,
    reach: float,
    stream: Stream,
) -> float:
    """The length of δ at which most gates of `[x + δ ; x]` are not near 0, ½ or 1."""
    length /= math.sqrt(reach)
    longest = _BOUND * view.radius
    for _ in range(_SCALES):
        pairs = [random_orthogonal(view.dim, stream)[:2] for _ in range(_PAIRS)]
        x, delta = length * torch.stack(pairs, 1)
        x = reach * x
        alone = x @ total
        forward = view.answer(torch.stack([x + delta, x], 1)) - alone
        backward = view.answer(torch.stack([x - delta, x], 1)) - alone
        # the size of Σ_h tanh(z_h/2)·δM_h relative to Σ_h δM_h
        ratio = float((forward + backward).norm() / (forward - backward).norm())
        if ratio > _OPEN[1]:
            length /= 1.5 if ratio < 1.5 else 3
        elif ratio < _OPEN[0] and length < longest:
            length = min(length * (1.5 if ratio > 0.1 else 4), longest)
        else:
            break
    return length


def _positions_matter(
    view: Surroundings,
    length: float,
    stream: Stream,
) -> bool:
    """Return whether an answer changes if a key moves by one position."""
    x, key = length * random_orthogonal(view.dim, stream)[:2]
    if view.last_norm is not None:
        x = x * view.last_norm / length
    zero = 0 * x
    both = torch.stack([torch.stack([zero, key, x]), torch.stack([key, zero, x])])
    near, further = view.answer(both)
    return max_abs(near - further) > 1e-9 * max_abs(near)


def heads_described(model: SubLayer) -> list[str]:
    """Return the number and width of the heads, what they share, and their positions, in words."""
    heads, _, k = model.Q.shape
    parts = [f"{heads} heads of width {k}"]
    if len(model.K) < heads:
        parts.append(f"{heads // len(model.K)} share keys and values each")
    return [*parts, "rotary positions"] if model.rotary else parts


# Reads queries and keys of every head: keys by a low-rank factorisation, queries by
# linear solves.
#
# Scores are `z = q·κ` with `q = xQ_h + q_h` and `κ = R_{−m} wK_g` for a key w that
# stands m places before x (rotary positions; else R = 1). For all heads that share
# keys, the scores of a few x with a basis of keys, each at its own place, are one
# matrix of rank k; its right factor gives all κ, up to a k×k matrix. Then every other x
# takes two or three queries, whose scores with some keys are linear in its q.

# How many x (first step) and keys (second step) are used for each of the k dimensions.
# With positions there are more, since errors of the planes grow with every solve.
_ROWS = 9 / 8
_ROWS_TURNED = 3 / 2
_KEYS = 9 / 8
_KEYS_TURNED = 5 / 4
_SHIFTS = (1, 61)  # places by which keys are moved: for fast planes, and for slow ones
# singular values below this share of the largest count as noise,
_RANK = 1e-6
# and so do those below this multiple of the answers' precision
_GROWN = 1e5


@dataclass(frozen=True)
class Factors:
    """`Q` (H, d, k), `q` (H, k), `K` (G, d, k), `frequencies` (G, k/2 or 0)."""

    Q: Tensor
    q: Tensor
    K: Tensor
    frequencies: Tensor


def read_factors(
    reader: Reader,
    groups: list[list[int]],
    length: float,
    reach: float,
    stream: Stream,
) -> Factors:
    """Read Q, q and K with keys of norm `length`; x is `reach` times longer, or as prescribed."""
    d, k = reader.values.shape[1:]
    positions = reader.positions
    longer = reader.view.last_norm or reach * length
    keys = length * random_orthogonal(d, stream)
    rows_each = _ROWS_TURNED if positions else _ROWS
    count = min(math.ceil(rows_each * k / len(groups[0])), d)
    xs = reader.moderate(longer * random_orthogonal(d, stream)[:count], stream)
    blocks = keys.split(reader.keys)
    # How far in front of x each key stands.
    places = torch.cat([torch.arange(len(part), 0, -1.0).double() for part in blocks])

    def scores(gap: int, wanted: int) -> Tensor:
        """Scores (len(xs), H, keys) of `wanted` keys or more, `gap` places further ahead of x."""
        some = blocks[: math.ceil(wanted / reader.keys)]
        return torch.cat([reader.scores(part, xs, gap) for part in some], -1)

    measured = [scores(0, d)]
    if positions:
        measured += [scores(gap, math.ceil(_KEYS_TURNED * k)) for gap in _SHIFTS]
    noise = max(_RANK, _GROWN * reader.view.precision) * reach
    K: list[Tensor] = []
    planes: list[Planes | None] = []
    for group in groups:
        parts = [part[:, group].flatten(0, 1) for part in measured]
        right, plane = _keys_of(parts, places, k, noise)
        K.append(keys.mT @ right / length**2)
        planes.append(plane)
    Q, q = _read_queries(reader, groups, K, planes, (length, longer), stream)
    frequencies = [zeros(0) if plane is None else plane.frequencies for plane in planes]
    return Factors(Q, q, torch.stack(K), torch.stack(frequencies))


def _keys_of(
    scores: list[Tensor],
    places: Tensor,
    k: int,
    noise: float,
) -> tuple[Tensor, Planes | None]:
    """κ of every key at x's own place (d, k), and the planes in which positions rotate it.

    `scores` are those of a group's heads with keys at their places and, with positions,
    moved ones.
    """
    left, sizes, right = thin_svd(scores[0])
    if len(sizes) > k and sizes[k] > noise * sizes[0]:
        raise mismatch(
            f"the scores of heads that share values have a rank above {k}, the width of the values"
        )
    right = right[:k].mT
    if len(scores) == 1:
        return right, None
    inverse = (left[:, :k] / sizes[:k]).mT
    plane = find_planes(right, [(inverse @ part).mT for part in scores[1:]], _SHIFTS)
    return plane.turned(right @ plane.basis, -places), plane


def _read_queries(
    reader: Reader,
    groups: list[list[int]],
    K: list[Tensor],
    planes: list[Planes | None],
    lengths: tuple[float, float],
    stream: Stream,
) -> tuple[Tensor, Tensor]:
    """Q and q from the queries q(x) at d + 1 points x, each by least squares."""
    heads, d, k = reader.values.shape
    basis = random_orthogonal(d, stream)
    points = torch.cat([basis, -basis.sum(0, keepdim=True) / math.sqrt(d)])
    points = reader.moderate(lengths[1] * points, stream)
    wanted = (_KEYS if planes[0] is None else _KEYS_TURNED) * k
    count = math.ceil(wanted / reader.keys)  # of queries for each point
    size = math.ceil(wanted / count)
    keys = [lengths[0] * random_orthogonal(d, stream)[:size] for _ in range(count)]
    scores = [reader.scores(part, points) for part in keys]
    places = arange(size, 0, -1.0)
    Q = zeros(heads, d, k)
    q = zeros(heads, k)
    affine = torch.cat([ones(d + 1, 1), points], 1)
    for group, keys_of, plane in zip(groups, K, planes, strict=True):
        parts = [part @ keys_of for part in keys]
        if plane is not None:
            parts = [plane.turned(part, places) for part in parts]
        measured = torch.cat([part[:, group] for part in scores], -1)
        # q(x) of every point and head, (k, points and heads)
        queries = least_squares(torch.cat(parts), measured.flatten(0, 1).mT)
        queries = queries.unflatten(1, (d + 1, -1)).transpose(0, 1).flatten(1)
        maps = least_squares(affine, queries).unflatten(1, (k, -1)).movedim(2, 0)
        q[group] = maps[:, 0]
        Q[group] = maps[:, 1:]
    return Q, q


# Finds rotary positions: the planes in which they rotate keys, and the frequencies.
#
# Keys κ known up to a k×k matrix A, at one place and again m places further on, satisfy
#
#     κ_m = κ·ρ_m,    ρ_m = A⁻¹ R_m A,
#
# so ρ_m is similar to a rotation: its eigenvalues are e^{±imθ_f} and its eigenvectors
# the planes. A remains free up to one complex number for each plane, which commutes
# with all positions and goes into the queries. A step of one place separates fast
# planes, a long step slow ones.

# of the long step relative to the short one, so that all eigenvalues differ
_WEIGHT = 0.7
_TURN = 1e-3  # how far the modulus of a rotation's computed eigenvalue may be from 1


@dataclass(frozen=True)
class Planes:
    """`basis` (k, k) takes keys to coordinates: f and f + k/2 are plane f, of frequency θ_f."""

    basis: Tensor
    frequencies: Tensor

    def turned(self, coordinates: Tensor, places: Tensor) -> Tensor:
        """Keys moved to earlier places: R_{−m} applied to each row (n, k), with m from `places`."""
        return rotated(coordinates, -places[:, None] * self.frequencies)


def find_planes(
    keys: Tensor,
    moved: Sequence[Tensor],
    steps: tuple[int, int],
) -> Planes:
    """Planes from keys (n, k) and, for each of two `steps`, the first keys that much earlier."""
    short, long = (least_squares(keys[: len(part)], part) for part in moved)
    values, vectors = torch.linalg.eig(short + _WEIGHT * long)
    vectors = vectors[:, values.imag != 0]
    turns = torch.stack([_turn(vectors, matrix) for matrix in (short, long)])
    fits = (turns.abs() - 1).abs().amax()
    if vectors.shape[1] < keys.shape[1] or not fits < _TURN:
        raise not_applicable(
            "positions change the scores otherwise than rotary positions do"
        )
    # One place earlier, keys are turned by −θ: take that eigenvalue of each conjugate
    # pair.
    fast, slow = -turns.angle() / torch.tensor(steps)[:, None]
    is_first = fast > 0
    cycle = 2 * math.pi / steps[1]
    theta = slow + cycle * ((fast - slow) / cycle).round()
    theta = theta[is_first]
    vectors = vectors[:, is_first]
    if len(theta) * 2 != keys.shape[1]:
        raise mismatch("the turns of rotary positions do not come in pairs")
    return Planes(torch.cat([vectors.real, vectors.imag], 1), theta)


def _turn(vectors: Tensor, matrix: Tensor) -> Tensor:
    images = matrix.to(vectors.dtype) @ vectors
    return (vectors.conj() * images).sum(0) / (vectors.conj() * vectors).sum(0)


# Reads the scores of every head from one answer, once the values are known.
#
# For the sequence `[0 ; w_1 ; … ; w_p ; 0 ; … ; 0 ; x]` the last token's answer is
#
#     Σ_h (Σ_j a_hj·w_j + a_h·x) M_h,    a_hj = e^{z_hj}/(c + e^{s_h} + Σ_j e^{z_hj}),
#
# where c is the number of zero tokens, whose score and value are 0. An answer has m
# numbers, so a linear solve gives the weights of all heads at once if H(p + 1) ≤ m. One
# minus a head's weights is c/(…), so logarithms give the scores z_hj of the keys,
# whatever the score s_h of x with itself is.
#
# Without a norm and positions, `[x + w_1 ; … ; x + w_p ; x]` is asked instead: the
# answer is `x·Σ_h M_h + Σ_h Σ_j a_hj·w_j M_h`, however long x is, and x's weight is one
# minus the others.
#
# All heads are solved for together, and not one by one after a projection onto the row
# space of each M_h: those spaces are independent but nearly meet (the output projection
# of SmolLM2's first block has condition 4e4), while the values of half as many tokens
# are well separated.

# share of the weights that an answer could determine: the last ones cost many digits
_FULL = 0.6
# if the weight of x in [0 ; x] exceeds this, others are too small to measure
_ALONE = 0.997
_REPLACEMENTS = 8  # rounds in which points are replaced


@dataclass(frozen=True)
class Reader:
    """Reads scores where the values are known: `values` (H, d, k) and `outputs` (H, k, m)."""

    view: Surroundings
    values: Tensor
    outputs: Tensor
    total: Tensor  # Σ_h M_h, so that [x] answers x·total
    positions: bool

    @property
    def added(self) -> bool:
        """Whether keys are sent as x + w: without a norm and positions that works for any x."""
        return self.view.epsilon is None and not self.positions

    @property
    def keys(self) -> int:
        """The most keys that a sequence should hold."""
        heads, k, m = self.outputs.shape
        return max(1, math.floor(_FULL * min(k, m / heads)) - (not self.added))

    def _written(self, tokens: Tensor) -> Tensor:
        """`t M_h` for tokens t (n, d): (n, H, m)."""
        read = torch.einsum("nd,hdk->nhk", tokens, self.values)
        return torch.einsum("nhk,hkm->nhm", read, self.outputs)

    def scores(
        self,
        keys: Tensor,
        xs: Tensor,
        gap: int = 0,
    ) -> Tensor:
        """Scores z (len(xs), H, p), with `gap` zero tokens between the keys and x.

        If keys are added to x, scores are relative to that of x with itself.
        """
        p, d = keys.shape
        heads, k, m = self.outputs.shape
        written = self._written(keys).transpose(0, 1).flatten(0, 1)
        if self.added:
            tokens = torch.cat([keys, keys.new_zeros(1 + gap, d)]) + xs[:, None]
            if self.view.within is None:
                rows = self.view.answer(tokens) - xs @ self.total
            else:
                rows = self.view.within(tokens, written)
            weights = least_squares(written.mT, rows.mT).mT.unflatten(1, (heads, p))
            return _logarithms(weights, 1 - weights.sum(-1, keepdim=True))
        if p + 1 > min(k, m / heads) and not gap:
            return self._in_pairs(keys, xs)
        ahead = torch.cat([zeros(1, d), keys, zeros(gap, d)]).expand(len(xs), -1, -1)
        answers = self.view.answer(torch.cat([ahead, xs[:, None]], 1))[..., None]
        own = self._written(xs).mT
        # The keys' part of the system is the same for all x: it is factored once.
        Q, R = torch.linalg.qr(written.mT)
        outside, residual = (part - Q @ (Q.mT @ part) for part in (own, answers))
        of_x = least_squares(outside, residual)
        inside = Q.mT @ (answers - own @ of_x)
        of_keys = torch.linalg.solve_triangular(R, inside, upper=True)
        weights = of_keys.reshape(-1, heads, p)
        of_zeros = 1 - weights.sum(-1, keepdim=True) - of_x
        return _logarithms(weights, of_zeros / (1 + gap))

    def moderate(self, points: Tensor, stream: Stream) -> Tensor:
        """The points, of which those that saturate a head are replaced if the norm is prescribed.

        One query for each, `[0 ; x]`, shows whether a weight exceeds `_ALONE`.
        """
        length = self.view.last_norm
        if length is None:
            return points
        points = points.clone()
        new = torch.arange(len(points))
        for _ in range(_REPLACEMENTS):
            if not len(new):
                break
            x = points[new]
            answers = self.view.answer(torch.stack([torch.zeros_like(x), x], 1))
            weights = least_squares(self._written(x).mT, answers[..., None])
            new = new[weights[..., 0].amax(1) > _ALONE]
            others = points[~torch.isin(torch.arange(len(points)), new)]
            if not len(others):
                break
            drawn = torch.randint(len(others), (len(new),), generator=stream)
            points[new] = length * normalize(points[new] + others[drawn], dim=1)
        return points

    def _in_pairs(self, key: Tensor, xs: Tensor) -> Tensor:
        """Scores of one key, if an answer determines one weight of each head but not two.

        `[0 ; x]` gives the logistic function of s_h, `[w ; x]` that of z_h − s_h.
        """
        own = self._written(xs)
        other = self._written(key)
        pairs = torch.stack([torch.zeros_like(xs), xs, key.expand_as(xs), xs], 1)
        answers = self.view.answer(pairs.view(-1, 2, xs.shape[1]))
        alone, both = answers.view(len(xs), 2, -1, 1).unbind(1)
        s = least_squares(own.mT, alone)
        z = least_squares((other - own).mT, both - own.sum(1)[..., None])
        weights = torch.cat([z, s], -1)
        if not ((weights > 0) & (weights < 1)).all():
            raise out_of_range()
        return torch.logit(weights).sum(-1, keepdim=True)


def _logarithms(weights: Tensor, rest: Tensor) -> Tensor:
    """Scores, as logarithms of weights over `rest`, the weight of a token with score 0."""
    if not ((weights > 0).all() & (rest > 0).all()):
        raise out_of_range()
    return torch.log(weights / rest)
