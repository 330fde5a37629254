"""An attention sub-layer of a real checkpoint: biases, residual, norm, positions (ours).

The target is `y` of oracle/sub_layer.py: several heads that may share keys and values, biases,
rotary positions, an RMS norm in front, the input added behind. Nothing of this is assumed; numbers
of heads, widths, ε and frequencies show in the answers. Only the last token's vector is used.

What can be known. The same function has many parameters:
- `V_g → V_g T`, `O_h → T⁻¹ O_h` for any invertible T, and `K_g → K_g T`, `Q_h, q_h → Q_h T⁻ᵀ,
  q_h T⁻ᵀ`; with rotary positions only those T that commute with all R_m, a complex number for each
  plane;
- weights sum to 1, so a bias of the values is one of the output, `b + Σ_h (v_h O_h)`; and a bias of
  the keys adds one number to all scores of a query, which the softmax does not see (without rotary
  positions);
- a norm's gain is part of Q, K and V; 1/√k is part of Q; the order of heads is free.
A sub-layer comes back up to these, in `unknowns` numbers (oracle/sub_layer.py).

A head's *gate* is its weight on the first token of `[x + δ ; x]`: the logistic function of a score,
different for every head. Answers for one δ and many x are the gates times δM_h, so that a fit
separates the heads. The first δ at which it does is the *anchor*. The stages, in queries:

    open_surroundings      norm, ε, residual connection, b              a few
    read_total             Σ_h M_h = Σ_h V_h O_h, from single tokens    d + 1
    find_anchor, read_vectors   the row space of each M_h               5/4·k·(H + 12), some dozens
    strengthened           x with larger scores, where a norm bounds tokens   d
    read_factors           scores of all heads from one answer: keys from 9/8·k/s or more x,
                           queries at d + 1 points                      2·d/s and more; 3(d + 1)

with s heads that share keys. For MiniLM, d = 384 and H = 12, that is 2.1 times the unknowns over
the numbers in an answer; for SmolLM2, d = 576, s = 3 and H = 9, 3.6 times. Tokens so long that all
gates are 0 or 1, which separate heads elsewhere (heads/far_field.py), do not exist behind a norm.

Limits. The heads' outputs must be independent (H·k ≤ m), and the answers exact to about 1e-15 of
their size: the solves in a row cost six to eight digits. A LayerNorm behind the sub-layer, as BERT
has it, removes the mean and the length of every answer; such a target is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.extraction import Step
from keyhole.extract.judge import Method
from keyhole.extract.sub_layer_values import (
    Probe,
    Surroundings,
    Values,
    find_anchor,
    find_residual,
    open_surroundings,
    read_total,
    read_vectors,
    strengthened,
)
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.sub_layer import SubLayer

_AXES = 6  # of the subspace that points come from
_OPEN = (0.75, 0.92)  # the range of |tanh(z/2)| = |2·gate − 1| that is aimed at, on average
_SCALES = 16
_PAIRS = 3
_SHORTER = -1 / 8  # with positions all tokens are reach^this times as long, x no longer than δ
_FAINT = 0.5  # scores below this, on average, cost too many digits
_BOUND = 0.67  # of the norm's radius: the sum of two such orthogonal tokens is inside
_WIDEST = 0.95  # of the radius, for one token
_INWARDS = 0.45  # the length of δ over that of the last token, where the latter is prescribed
_SCORES = 0.7  # the size of scores at which logarithms of weights lose least


@dataclass(frozen=True)
class AttentionSubLayer(Method):
    """Exact extraction of a checkpoint's attention sub-layer that returns vectors."""

    seed: int = 0
    tolerance: float = 1e-8

    def expected_queries(self, dim: int) -> int | None:
        """For heads that fill the width and share nothing."""
        return 7 * dim

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = torch.Generator().manual_seed(self.seed)
        model = read_attention(open_surroundings(oracle, stream), stream)
        yield Step(model, model.unknowns, model.unknowns, numbers=model.outputs,
                   remark=_described(model))  # fmt: skip


def read_attention(
    view: Surroundings, stream: torch.Generator, total: Tensor | None = None, reach: float = 1.0
) -> SubLayer:
    """The sub-layer, once norm, residual and b are known; `total` is Σ_h M_h, where it is known.

    Without a norm x may be `reach` times longer than δ and keys, which makes scores larger.
    """
    d = view.dim
    length = min(math.sqrt(d), _BOUND * view.radius)
    if total is None:
        total = read_total(view, length, stream)
    if view.asking is not None:
        length = _INWARDS * view.asking
    positions = _positions_matter(view, length, stream)
    if view.asking is None:
        # With positions, scores of x with itself count: all tokens are shorter instead.
        share, reach = (reach**_SHORTER, 1.0) if positions else (1.0, reach)
        length = share * _fitting_length(view, total, length, reach, stream)
    subspace = random_orthogonal(d, stream)[: min(_AXES, d // 2)]
    probe = Probe(view, total, subspace, length, positions, reach)
    anchor = find_anchor(probe, stream)
    scores = float(anchor.scores.square().mean().sqrt())  # of random directions
    bounded = view.asking is not None or length >= _BOUND * view.radius
    if scores < _FAINT and bounded:
        probe = strengthened(probe, anchor, stream)
        anchor = find_anchor(probe, stream, anchor.delta)
    view, total = find_residual(view, total, anchor)
    probe = replace(probe, view=view, total=total)
    values = Values.of(total, *read_vectors(probe, anchor, stream)).completed(probe, stream)
    stronger = _SCORES / max(2 * scores, 1e-3)
    length = length * (math.sqrt(stronger) if view.asking is None else stronger)
    reader = Reader(view, values.of_heads, values.O, total, positions)
    length = min(length, _WIDEST * view.radius)
    factors = read_factors(reader, values.groups, length, reach, stream)
    return _assembled(view, values, factors)


def _fitting_length(
    view: Surroundings, total: Tensor, length: float, reach: float, stream: torch.Generator
) -> float:
    """The length of δ at which most gates of `[x + δ ; x]` are neither near ½ nor 0 or 1."""
    length /= math.sqrt(reach)
    most = _BOUND * view.radius
    for _ in range(_SCALES):
        pairs = [length * random_orthogonal(view.dim, stream)[:2] for _ in range(_PAIRS)]
        x, delta = torch.stack(pairs, 1)
        x = reach * x
        forward, backward = (
            view.answer(torch.stack([x + sign * delta, x], 1)) - x @ total for sign in (1, -1)
        )
        # Σ_h tanh(z_h/2)·δM_h next to Σ_h δM_h
        ratio = float((forward + backward).norm() / (forward - backward).norm())
        if ratio > _OPEN[1]:
            length /= 1.5 if ratio < 1.5 else 3
        elif ratio < _OPEN[0] and length < most:
            length = min(length * (1.5 if ratio > 0.1 else 4), most)
        else:
            break
    return length


def _positions_matter(view: Surroundings, length: float, stream: torch.Generator) -> bool:
    """Does an answer change if a key moves by one position?"""
    x, key = length * random_orthogonal(view.dim, stream)[:2]
    x = x if view.asking is None else x * view.asking / length
    near, further = view.answer(
        torch.stack([torch.stack([0 * x, key, x]), torch.stack([key, 0 * x, x])])
    )
    return bool((near - further).abs().max() > 1e-9 * near.abs().max())


def _assembled(view: Surroundings, values: Values, factors: Factors) -> SubLayer:
    order = [head for group in values.groups for head in group]
    layer = {
        "Q": factors.Q[order], "q": factors.q[order], "K": factors.K,
        "V": values.V, "O": values.O[order], "b": view.b,
        "frequencies": factors.frequencies,
    }  # fmt: skip
    if not all(bool(torch.isfinite(part).all()) for part in layer.values()):
        raise Unsuccessful(Status.MISMATCH, "no finite weights explain the answers")
    layer = {name: part.contiguous() for name, part in layer.items()}
    return SubLayer(**layer, epsilon=view.epsilon, residual=view.residual,
                    every_token=view.every_token, causal=view.causal)  # fmt: skip


def _described(model: SubLayer) -> str:
    heads, _, k = model.Q.shape
    shared = len(model.K)
    parts = [f"{heads} heads of width {k}"]
    if shared < heads:
        parts.append(f"{heads // shared} share keys and values each")
    if model.rotary:
        parts.append("rotary positions")
    if model.epsilon is not None:
        parts.append(f"an RMS norm in front (epsilon {model.epsilon:.2e})")
    parts.append("the input added" if model.residual else "no residual")
    return ", ".join(parts)


# Queries and keys of every head: a low-rank factor from a few rows, the other by linear solves.
#
# Scores are `z = q·κ` with `q = xQ_h + q_h` and `κ = R_{−m} wK_g` for a key w that stands m places
# before x (rotary positions; else R = 1). Scores of a few x with a basis of keys, each at a place
# of its own, are a matrix of rank k for all heads that share keys together; its right factor is
# all κ, up to a k×k matrix. Then every other x takes two or three queries, whose scores with some
# keys are linear in its q.

# For each dimension of the scores, x in the first step and keys in the second; with positions more,
# since errors of the planes grow with every solve.
_ROWS, _ROWS_TURNED = 9 / 8, 3 / 2
_KEYS, _KEYS_TURNED = 9 / 8, 5 / 4
_SHIFTS = (1, 61)  # places by which keys are moved: for fast planes, and for slow ones
_RANK = 1e-6
_GROWN = 1e5  # or this much more than the noise of answers


@dataclass(frozen=True)
class Factors:
    """`Q` (H, d, k), `q` (H, k), `K` (G, d, k), `frequencies` (G, k/2 or 0)."""

    Q: Tensor
    q: Tensor
    K: Tensor
    frequencies: Tensor


@dataclass(frozen=True)
class _Rows:
    """A few x, a basis of keys in blocks, and the scores of both (len(xs), H, d)."""

    reader: Reader
    xs: Tensor
    keys: Tensor
    scores: Tensor

    @property
    def places(self) -> Tensor:
        """How far in front of x each key stands."""
        sizes = [len(part) for part in self.keys.split(self.reader.keys)]
        return torch.cat([torch.arange(size, 0, -1.0) for size in sizes]).to(torch.float64)

    def shifted(self, gap: int, keys: int) -> Tensor:
        """Scores of the first so many keys, each `gap` places further in front of x."""
        blocks = self.keys[: math.ceil(keys / self.reader.keys) * self.reader.keys].split(
            self.reader.keys
        )
        return torch.cat([self.reader.scores(part, self.xs, gap) for part in blocks], -1)


def read_factors(
    reader: Reader, groups: list[list[int]], length: float, reach: float, stream: torch.Generator
) -> Factors:
    """With keys of norm `length` and x of `reach` times that, or of the prescribed norm."""
    (d, k), positions = reader.values.shape[1:], reader.positions
    longer = reader.view.asking or reach * length
    keys = length * random_orthogonal(d, stream)
    count = math.ceil((_ROWS_TURNED if positions else _ROWS) * k / len(groups[0]))
    xs = reader.moderate(longer * random_orthogonal(d, stream)[: min(count, d)], stream)
    rows = _Rows(reader, xs, keys, torch.empty(0))
    rows = _Rows(reader, xs, keys, rows.shifted(0, d))
    moved = [rows.shifted(gap, math.ceil(_KEYS_TURNED * k)) for gap in _SHIFTS] if positions else []
    K: list[Tensor] = []
    planes: list[Planes | None] = []
    for group in groups:
        noise = max(_RANK, _GROWN * reader.view.precision) * reach
        right, plane = _keys_of(rows, moved, group, k, noise)
        K.append(keys.mT @ right / length**2)
        planes.append(plane)
    Q, q = _read_queries(reader, groups, K, planes, (length, longer), stream)
    none = torch.zeros(0, dtype=torch.float64)
    frequencies = [none if plane is None else plane.frequencies for plane in planes]
    return Factors(Q, q, torch.stack(K), torch.stack(frequencies))


def _keys_of(
    rows: _Rows, moved: list[Tensor], group: list[int], k: int, noise: float
) -> tuple[Tensor, Planes | None]:
    """κ of every key at x's own place (d, k), and the planes in which places turn it."""
    left, sizes, right = torch.linalg.svd(rows.scores[:, group].flatten(0, 1), full_matrices=False)
    if len(sizes) > k and float(sizes[k]) > noise * float(sizes[0]):
        raise Unsuccessful(
            Status.MISMATCH,
            f"the scores of heads that share values have a rank above {k}, the width of the values",
        )
    right = right[:k].mT
    if not moved:
        return right, None
    inverse = (left[:, :k] / sizes[:k]).mT
    turned = [(inverse @ part[:, group].flatten(0, 1)).mT for part in moved]
    plane = find_planes(right, turned, _SHIFTS)
    return plane.turned(plane.coordinates(right), -rows.places), plane


def _read_queries(
    reader: Reader, groups: list[list[int]], K: list[Tensor], planes: list[Planes | None],
    lengths: tuple[float, float], stream: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Q and q from the queries q(x) at d + 1 points x, each by least squares."""
    d, k = reader.values.shape[1:]
    basis = random_orthogonal(d, stream)
    points = torch.cat([basis, -basis.sum(0, keepdim=True) / math.sqrt(d)])
    points = reader.moderate(lengths[1] * points, stream)
    wanted = (_KEYS if planes[0] is None else _KEYS_TURNED) * k
    count = math.ceil(wanted / reader.keys)  # of queries for each point
    size = math.ceil(wanted / count)
    keys = [lengths[0] * random_orthogonal(d, stream)[:size] for _ in range(count)]
    scores = [reader.scores(part, points) for part in keys]
    places = torch.arange(size, 0, -1.0, dtype=torch.float64)
    heads = sum(len(group) for group in groups)
    Q = torch.empty(heads, d, k, dtype=torch.float64)
    q = torch.empty(heads, k, dtype=torch.float64)
    affine = torch.cat([torch.ones(d + 1, 1, dtype=torch.float64), points], 1)
    for group, keys_of, plane in zip(groups, K, planes, strict=True):
        parts = [part @ keys_of for part in keys]
        if plane is not None:
            parts = [plane.turned(part, places) for part in parts]
        measured = torch.cat([part[:, group] for part in scores], -1)
        solved = least_squares(torch.cat(parts), measured.flatten(0, 1).mT)  # (k, points and heads)
        solved = solved.unflatten(1, (d + 1, -1)).transpose(0, 1)
        both = least_squares(affine, solved.flatten(1)).unflatten(1, (k, -1)).movedim(2, 0)
        q[group], Q[group] = both[:, 0], both[:, 1:]
    return Q, q


# Rotary positions found out: the planes in which places turn keys, and by how much.
#
# Keys κ known up to a k×k matrix A, at one place and again m places further on, satisfy
#
#     κ_m = κ·ρ_m,    ρ_m = A⁻¹ R_m A,
#
# so ρ_m is similar to a rotation: its eigenvalues are e^{±imθ_f} and its eigenvectors the planes.
# What is left of A is one complex number for each plane, and that commutes with all positions: it
# goes into the queries. One step tells fast planes apart, a long one those that hardly turn.

_WEIGHT = 0.7  # of the long step next to the short one, so that all eigenvalues differ
_TURN = 1e-3  # how far from length 1 an eigenvalue of a rotation may be computed


@dataclass(frozen=True)
class Planes:
    """`basis` (k, k) takes keys to coordinates: f and f + k/2 are plane f, of frequency θ_f."""

    basis: Tensor
    frequencies: Tensor

    def coordinates(self, keys: Tensor) -> Tensor:
        return keys @ self.basis

    def turned(self, coordinates: Tensor, places: Tensor) -> Tensor:
        """Keys so many places in front of where they are: R_{−m} of each row (n, k)."""
        angles = places.unsqueeze(1) * self.frequencies
        cos, sin = angles.cos(), -angles.sin()
        x, y = coordinates.chunk(2, 1)
        return torch.cat([x * cos - y * sin, x * sin + y * cos], 1)


def find_planes(keys: Tensor, moved: Sequence[Tensor], steps: tuple[int, int]) -> Planes:
    """Planes from keys (n, k) and the first of them `steps` places further in front."""
    short, long = (least_squares(keys[: len(part)], part) for part in moved)
    values, vectors = torch.linalg.eig(short + _WEIGHT * long)
    values, vectors = values[values.imag != 0], vectors[:, values.imag != 0]
    turns = [_turn(vectors, matrix) for matrix in (short, long)]
    fits = torch.stack([(turn.abs() - 1).abs() for turn in turns]).amax()
    if vectors.shape[1] < keys.shape[1] or not bool(fits < _TURN):
        raise Unsuccessful(
            Status.NOT_APPLICABLE, "places change the scores otherwise than rotary positions do"
        )
    # Keys turn by −θ for every place that they are further in front; of each pair, that one.
    once = -turns[0].angle() / steps[0]
    first = once > 0
    once, vectors = once[first], vectors[:, first]
    cycle = 2 * math.pi / steps[1]
    rough = -turns[1].angle()[first] / steps[1]
    theta = rough + cycle * ((once - rough) / cycle).round()
    if len(theta) * 2 != keys.shape[1]:
        raise Unsuccessful(Status.MISMATCH, "the turns of rotary positions do not come in pairs")
    return Planes(torch.cat([vectors.real, vectors.imag], 1), theta)


def _turn(vectors: Tensor, matrix: Tensor) -> Tensor:
    images = matrix.to(vectors.dtype) @ vectors
    return (vectors.conj() * images).sum(0) / (vectors.conj() * vectors).sum(0)


# Scores of every head from one answer, once its values are known.
#
# The sequence `[0 ; w_1 ; … ; w_p ; 0 ; … ; 0 ; x]` makes the last token answer with
#
#     Σ_h (Σ_j a_hj·w_j + a_h·x) M_h,    a_hj = e^{z_hj}/(c + e^{s_h} + Σ_j e^{z_hj}),
#
# c the number of zero tokens, whose score and value are 0. The answer is m numbers, so that as many
# as H(p + 1) ≤ m weights follow by a linear solve, of all heads at once. What they leave of 1 is
# c/(…), so logarithms give the scores z_hj of the keys. Those of x with itself may be anything.
#
# Without a norm and positions, `[x + w_1 ; … ; x + w_p ; x]` is asked instead: the answer is
# `x·Σ_h M_h + Σ_h Σ_j a_hj·w_j M_h`, whatever the length of x, and x's own weight is what is left.
#
# All heads are solved for together, and not one by one after a projection onto the space that each
# writes into: those spaces are independent but nearly meet (the output projection of SmolLM2's
# first block has condition 4e4), the values of half as many tokens do not.

_FULL = 0.6  # of the weights that an answer could tell apart: the last ones cost many digits
_ALONE = 0.997  # a weight of x in [0 ; x] above this: other weights are too small to measure
_AGAIN = 8  # rounds in which points are replaced


@dataclass(frozen=True)
class Reader:
    """Reads scores where the values are known: `values` (H, d, k) and `outputs` (H, k, m)."""

    view: Surroundings
    values: Tensor
    outputs: Tensor
    total: Tensor  # of what [x] answers
    positions: bool

    @property
    def added(self) -> bool:
        """Are keys sent as x + w? Without a norm and positions that works for any x."""
        return self.view.epsilon is None and not self.positions

    @property
    def keys(self) -> int:
        """How many keys a sequence should hold at most."""
        heads, k, m = self.outputs.shape
        return max(1, math.floor(_FULL * min(k, m / heads)) - (not self.added))

    def _written(self, tokens: Tensor) -> Tensor:
        """`t M_h` of tokens (n, d): (n, H, m)."""
        return torch.einsum(
            "nhk,hkm->nhm", torch.einsum("nd,hdk->nhk", tokens, self.values), self.outputs
        )

    def scores(self, keys: Tensor, xs: Tensor, gap: int = 0) -> Tensor:
        """z (len(xs), H, p), with `gap` zero tokens between the keys and x.

        Where keys are added to x, scores are relative to that of x with itself.
        """
        (p, d), heads = keys.shape, len(self.outputs)
        if self.added:
            tokens = torch.cat([keys, keys.new_zeros(1 + gap, d)]) + xs[:, None]
            written = self._written(keys).transpose(0, 1).flatten(0, 1)
            if self.view.within is None:
                rows = self.view.answer(tokens) - xs @ self.total
            else:
                rows = self.view.within(tokens, written)
            weights = least_squares(written.mT, rows.mT).mT.unflatten(1, (heads, p))
            return _logarithms(weights, 1 - weights.sum(-1, keepdim=True))
        if p + 1 > min(self.outputs.shape[1], self.outputs.shape[2] / heads) and not gap:
            return self._in_pairs(keys, xs)
        zero = torch.zeros(1, d, dtype=torch.float64)
        ahead = torch.cat([zero, keys, zero.expand(gap, d)]).expand(len(xs), -1, -1)
        sequences, own = torch.cat([ahead, xs.unsqueeze(1)], 1), self._written(xs).mT
        answers = self.view.answer(sequences).unsqueeze(-1)
        # The keys' part of the system is the same for all x: it is factored once.
        Q, R = torch.linalg.qr(self._written(keys).transpose(0, 1).flatten(0, 1).mT)
        outside, rest = (part - Q @ (Q.mT @ part) for part in (own, answers))
        of_x = torch.linalg.lstsq(outside, rest).solution
        of_keys = torch.linalg.solve_triangular(R, Q.mT @ (answers - own @ of_x), upper=True)
        weights = of_keys.reshape(-1, heads, p)
        rest = 1 - weights.sum(-1, keepdim=True) - of_x
        return _logarithms(weights, rest / (1 + gap))

    def moderate(self, points: Tensor, stream: torch.Generator) -> Tensor:
        """The points; where their norm is prescribed, without those that saturate a head.

        One query for each, `[0 ; x]`: a point with a weight above `_ALONE` is replaced.
        """
        length, points, new = self.view.asking, points.clone(), torch.arange(len(points))
        for _ in range(_AGAIN):
            if length is None or not len(new):
                break
            x = points[new]
            answers = self.view.answer(torch.stack([torch.zeros_like(x), x], 1))
            weights = torch.linalg.lstsq(self._written(x).mT, answers[..., None]).solution
            new = new[weights[..., 0].amax(1) > _ALONE]
            kept = points[~torch.isin(torch.arange(len(points)), new)]
            if not len(kept):
                break
            others = torch.randint(len(kept), (len(new),), generator=stream)
            points[new] = length * normalize(points[new] + kept[others], dim=1)
        return points

    def _in_pairs(self, key: Tensor, xs: Tensor) -> Tensor:
        """The same for one key, where an answer determines one weight of a head but not two.

        `[0 ; x]` gives the logistic function of s_h, `[w ; x]` that of z_h − s_h.
        """
        own, other = self._written(xs), self._written(key)
        pairs = torch.stack([torch.zeros_like(xs), xs, key.expand_as(xs), xs], 1)
        alone, both = (
            self.view.answer(pairs.view(-1, 2, xs.shape[1])).view(len(xs), 2, -1).unbind(1)
        )
        s = torch.linalg.lstsq(own.mT, alone[..., None]).solution[..., 0]
        rest = (both - own.sum(1))[..., None]
        z = torch.linalg.lstsq((other - own).mT, rest).solution[..., 0]
        weights = torch.stack([z, s], -1)
        if not bool(((weights > 0) & (weights < 1)).all()):
            raise Unsuccessful(
                Status.MISMATCH, "the answers leave the range that attention weights allow"
            )
        return torch.logit(weights).sum(-1, keepdim=True)


def _logarithms(weights: Tensor, rest: Tensor) -> Tensor:
    """Scores: logarithms of weights over `rest`, the weight of a token whose score is 0."""
    if not bool((weights > 0).all() & (rest > 0).all()):
        raise Unsuccessful(
            Status.MISMATCH, "the answers leave the range that attention weights allow"
        )
    return torch.log(weights / rest)
