"""Heads told apart by a bias of positions, before any of their scores is known (ours).

Of t tokens that are all x but for x + δ, j places in front of the last, every score is s + β_h(j)
with one s at δ = 0, whatever x is. Behind anything that turns the sum of the last token into an
answer, with slopes G there, the derivative by δ is

    J_tj = Σ_h p_h V_h O_h G,    p_h = e^{β_h(j)} / Σ_{i<t} e^{β_h(i)}

so of different (t, j) these are V·D·W with V = (V_1 … V_H), W = OG, and D diagonal with p_h for all
k numbers of head h. In the pencil J₁ − λJ₂ the ratios of the p_h are the eigenvalues, k times each;
k − 1 times where W has lost a dimension to a norm, with H − 1 others between them (the pencil is
that of D₁ and D₂ in a hyperplane, and eigenvalues interlace). At such a λ the left null space is
k-dimensional in both cases: zV has to vanish outside of head h. So

    Z (J_1 − λ_h J_2) = 0     Z = Z_h, up to a k×k matrix;  V is the inverse of all Z_h together
    Z_h J_tj                  p_h of each (t, j) next to each other: ratios
    p(2, 1)                   with a = p(3, 2)/p(3, 1) and r = p(2, 1)/p(3, 1): r − 1 = a·p(2, 1)

which are the p_h themselves, and with them V_h O_h G of every head. Two heads of one bias are one
to all of this, and a layer without a bias of positions is a single head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.blocks.units import with_ones
from keyhole.extract.sub_layer import Reader
from keyhole.extract.sub_layer_values import LostSum, Surroundings
from keyhole.oracle.sub_layer import SubLayer

# (t, j): the first three show all p_h, the last parts heads that are alike near by.
COPIES = ((2, 1), (3, 1), (3, 2), (4, 3), (17, 16))
_RANK = 1e-10
_ATTEMPTS = 24
_MOST = 0.9  # of a head's eigenvalues
_AROUND = 3.0  # widths of those that are of a head as well
_PARTED = 8.0  # widths between the middles of two heads
_ONE = 1e-6  # of the eigenvalues, if there is one head
_TURNS = 2


@dataclass(frozen=True)
class Apart:
    """`V` (H, d, k) and `W` (H, k, n) of `Σ_h V_h W_h`, and β_h at the distances 0 to 3 (H, 4)."""

    V: Tensor
    W: Tensor
    places: Tensor

    @property
    def total(self) -> Tensor:
        return torch.einsum("hdk,hkn->dn", self.V, self.W)


def told_apart(slopes: Tensor, stream: torch.Generator) -> Apart:
    """From J_tj (copies, d, n), in the order of `COPIES`."""
    left = _basis(torch.cat(list(slopes), 1))
    right = _basis(torch.cat(list(slopes.mT), 1))
    J = left.mT @ slopes @ right
    lost = J.shape[1] - J.shape[2]
    for _ in range(_ATTEMPTS):
        shares = torch.randn(2, len(J), generator=stream, dtype=torch.float64)
        one, two = torch.einsum("xc,cdn->xdn", torch.stack([shares[0], shares[1].abs()]), J)
        values = torch.linalg.eigvals(least_squares(two, one)).real.sort()[0]
        ratios = _repeated(values, J.shape[1], lost)
        if ratios is not None:
            return _apart(J, one, two, ratios, left, right)
    raise Unsuccessful(
        Status.NOT_APPLICABLE,
        "places matter to the weights of equal tokens, but not by a bias that differs from head to "
        "head",
    )


def _basis(columns: Tensor) -> Tensor:
    vectors, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    return vectors[:, : int((sizes > _RANK * sizes[0]).sum())]


def _repeated(values: Tensor, rank: int, lost: int) -> Tensor | None:
    """Eigenvalues that come k times, or k − 1 with others between them; H·k is the rank.

    Most of the values that belong together must be nearer to each other than to those of any other
    head. The largest k for which this is so is taken: a part of a head would be as near.
    """
    for k in range(rank, 1 + lost, -1):
        most = math.ceil(_MOST * (k - lost))
        if rank % k:
            continue
        left, middles, width = values, list[Tensor](), 0.0
        while len(middles) < rank // k and len(left) >= most:
            widths = left[most - 1 :] - left[: len(left) - most + 1]
            at = int(widths.argmin())
            width = max(width, float(widths[at]))
            middles.append(left[at : at + most].median())
            near = (left - middles[-1]).abs() <= _AROUND * widths[at]
            near[at : at + most] = True
            left = left[~near]
        if len(middles) < rank // k:
            continue
        found = torch.stack(middles).sort()[0]
        apart = found.diff().min() if k < rank else _ONE * values.abs().max()
        if float(apart) > _PARTED * width:
            return found
    return None


def _left(J: Tensor, one: Tensor, two: Tensor, ratio: float, k: int) -> Tensor:
    """Z (k, d) of one head: from one pencil, then from all of them together."""
    Z = torch.linalg.svd(one - ratio * two)[0][:, -k:].mT
    for _ in range(_TURNS):
        shown, beside = Z @ J, Z @ two
        ratios = (shown * beside).sum((1, 2)) / beside.square().sum()
        rest = torch.cat(list((J - ratios[:, None, None] * two).mT))
        Z = torch.linalg.svd(torch.linalg.qr(rest, mode="r")[1])[2][-k:]
    return Z


def _apart(
    J: Tensor, one: Tensor, two: Tensor, found: Tensor, left: Tensor, right: Tensor
) -> Apart:
    k = J.shape[1] // len(found)
    Z = torch.stack([_left(J, one, two, float(ratio), k) for ratio in found])
    shown = Z @ J[:, None]  # (copies, H, k, n)
    beside = shown[0]
    ratios = (shown * beside).sum((2, 3)) / beside.square().sum((1, 2))  # p next to p(2, 1)
    first = (1 / ratios[1] - 1) * ratios[1] / ratios[2]  # p(2, 1)
    p = first * ratios
    if not bool(((p > 0) & (p < 1)).all()):
        raise Unsuccessful(Status.MISMATCH, "equal tokens have weights that no softmax gives")
    W = torch.einsum("ch,chkn->hkn", p, shown) / p.square().sum(0)[:, None, None]
    V = torch.linalg.inv(Z.flatten(0, 1)).unflatten(1, Z.shape[:2])  # (d, H, k)
    near = torch.logit(first)
    places = torch.stack([0 * near, near, near + (ratios[2] / ratios[1]).log()], 1)
    last = torch.logit(p[3]) + places.logsumexp(1)
    places = torch.cat([places, last[:, None]], 1)
    return Apart((left @ V.transpose(0, 1)).contiguous(), W @ right.mT, places)


# The rest of such heads: scores are read where values are known (sub_layer.py), from sequences
#
#     [x + w_1 ; … ; x + w_p ; x ; … ; x]      g copies of x, and x itself
#
# in which every key's weight next to that of all x together is e^{z_hj + β_h(place) − B_h(g)}, with
# B_h(g) = log Σ_{i≤g} e^{β_h(i)}. A token may hardly see itself (MPNet: β_h(0) is 5 to 13 below
# others), so that g is not 0. The same keys in another order show the differences of β; then scores
# of a basis of keys with a basis of x are Q_h K_hᵀ itself, of rank k.

_COPIES = 2  # g
_TURNED = 3  # orders
_LEAST, _FURTHEST = 8, 128  # distances
_SETTLED = 1e-6  # of β, from one place to the next
_ASKING = 8  # x that show β
_SCORES = 0.7  # where logarithms of weights lose least
_WITHIN = 1.5  # times that, either way
_LENGTHS = 6
_FAINT = 1e-3  # a singular value of scores beyond the width of values, relative


def read_placed(
    view: Surroundings, total: Tensor, heads: Apart, reach: float, stream: torch.Generator
) -> SubLayer:
    """Attention, with x `reach` times as long as the w beside it."""
    d = view.dim
    reader = Reader(view, heads.V, heads.W, total, positions=False)
    basis, points = random_orthogonal(d, stream), random_orthogonal(d, stream)
    points = torch.cat([points, -points.sum(0, keepdim=True) / math.sqrt(d)])
    length, places = math.sqrt(d) / reach, heads.places
    for _ in range(_LENGTHS):
        keys, xs = length * basis[: reader.keys], reach * length * points[:_ASKING]
        try:
            places, scores = _read_places(reader, heads.places, keys, xs)
        except (Unsuccessful, LostSum):  # weights too uneven to be seen
            length /= 2
            continue
        share = _SCORES / float(scores.square().mean().sqrt())
        if 1 / _WITHIN < share < _WITHIN:
            break
        length *= math.sqrt(min(max(share, 1 / 64), 64))
    else:
        raise LostSum("no length of tokens shows scores")
    found = [
        reader.scores(keys, reach * length * points, _COPIES) - _at(places, _COPIES, len(keys))
        for keys in (length * basis).split(reader.keys)
    ]
    scores = torch.cat(found, -1).transpose(0, 1) @ basis / length  # (H, d + 1, d)
    left, sizes, right = torch.linalg.svd(
        torch.linalg.solve(with_ones(reach * length * points), scores), full_matrices=False
    )
    k = heads.V.shape[2]
    if float((sizes[:, k:] / sizes[:, :1]).max()) > _FAINT:
        raise Unsuccessful(
            Status.NOT_APPLICABLE, f"scores have a rank above {k}, the width of the values"
        )
    Q, K = left[..., :k] * sizes[:, None, :k].sqrt(), right.mT[..., :k] * sizes[:, None, :k].sqrt()
    return SubLayer(
        Q=Q[:, :-1].contiguous(), q=Q[:, -1].contiguous(), K=K.contiguous(), V=heads.V, O=heads.W,
        b=view.b, frequencies=Q.new_zeros(len(Q), 0), places=places,
        every_token=view.every_token, causal=view.causal,
    )  # fmt: skip


def _at(places: Tensor, copies: int, keys: int) -> Tensor:
    """What so many keys have added to their scores next to the copies of x, (H, keys)."""
    every = places[:, (copies + keys - torch.arange(keys)).clamp(max=places.shape[1] - 1)]
    return every - places[:, : copies + 1].logsumexp(1, keepdim=True)


def _read_places(reader: Reader, near: Tensor, keys: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
    """β (H, distances), from those of 0 to 3, and the scores of the keys (xs, H, keys)."""
    p = len(keys)
    orders = [torch.arange(p).roll(turn * p // _TURNED + (turn == 1)) for turn in range(_TURNED)]
    # Of every order, scores and β add up: β of the nearest place is known.
    seen = [reader.scores(keys[order], xs, _COPIES) for order in orders]
    one = torch.eye(p, dtype=torch.float64)
    system = [torch.cat([one[order], one], 1) for order in orders]
    known = torch.cat([0 * one[:1], one[-1:]], 1)
    sums = near[:, : _COPIES + 1].logsumexp(1)
    wanted = [each.mean(0) + sums[:, None] for each in seen]
    wanted = torch.cat([*wanted, near[:, _COPIES + 1, None]], 1).mT
    found = least_squares(torch.cat([*system, known]), wanted)[p:].mT  # the last place is nearest
    places = torch.cat([near[:, : _COPIES + 1], found.flip(1)], 1)
    scores = seen[0] - _at(places, _COPIES, p)
    while places.shape[1] <= _FURTHEST and not _settled(places):
        copies = places.shape[1] - 1
        try:
            seen = (reader.scores(keys, xs, copies) - scores).mean(0).flip(1)
        except Unsuccessful:  # too faint to be seen
            break
        further = seen + places.logsumexp(1, keepdim=True)
        places = torch.cat([places, further], 1)
    changes = torch.nonzero((places.diff(dim=1).abs() > _SETTLED).any(0))
    return places[:, : int(changes.max()) + 2].contiguous(), scores


def _settled(places: Tensor) -> bool:
    """Has β one value in the second half of the distances? Buckets grow by less than that."""
    half = places[:, places.shape[1] // 2 :]
    return places.shape[1] >= _LEAST and bool((half - half[:, -1:]).abs().max() < _SETTLED)
