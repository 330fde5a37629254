"""Heads with a position bias: told apart by it, before any of their scores is known (ours).

From answers to copies of one token, `told_apart` finds V_h, what follows it, and the
biases β_h; then, from scores, `read_placed` finds all of the attention.

Ask t tokens that are all x, except for x + δ, j places in front of the last. At δ = 0
every score is s + β_h(j), with one s, whatever x is. If anything follows that turns the
sum of the last token into an answer, with slopes G, the derivative by δ is

    J_tj = Σ_h p_h V_h O_h G,    p_h = e^{β_h(j)} / Σ_{i<t} e^{β_h(i)}

that is, V·D·W with V = (V_1 … V_H), W = OG, and D diagonal with p_h for all k numbers
of head h; only D depends on (t, j). The eigenvalues of the pencil J₁ − λJ₂ are the
ratios of the p_h, k times each; or k − 1 times if a norm has removed a dimension of W,
with H − 1 others between them (the pencil is that of D₁ and D₂ in a hyperplane, and
eigenvalues interlace). In both cases the left null space at such a λ is k-dimensional:
zV has to vanish outside head h. So

    Z (J_1 − λ_h J_2) = 0     Z = Z_h, up to a k×k matrix;  V is the inverse of all Z_h together
    Z_h J_tj                  ratios of p_h at different (t, j)
    p(2, 1)                   with a = p(3, 2)/p(3, 1) and r = p(2, 1)/p(3, 1): r − 1 = a·p(2, 1)

which gives the p_h themselves, and V_h O_h G of every head. Heads with the same bias
appear as one head; so does a whole layer without a position bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Unsuccessful, mismatch, not_applicable
from keyhole.core.float64 import identity, normal
from keyhole.core.numerics import least_squares, thin_svd
from keyhole.extract.bilinear import max_abs, random_orthogonal
from keyhole.extract.blocks.units import with_ones
from keyhole.extract.sub_layer import Reader
from keyhole.extract.sub_layer_values import LostSum, Surroundings
from keyhole.oracle.sub_layer import SubLayer

# (t, j): the first three show all p_h, the last separates heads with similar biases
# near by.
COPIES = ((2, 1), (3, 1), (3, 2), (4, 3), (17, 16))
_RANK = 1e-10
_ATTEMPTS = 24
_MOST = 0.9  # share of a head's eigenvalues that make up its cluster
# how far from a cluster's middle other eigenvalues of the head are, in its widths
_AROUND = 3.0
_PARTED = 8.0  # the least distance between two clusters, in widths
_ONE = (
    1e-6  # in place of that distance if there is one head, relative to the eigenvalues
)
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
    """Return the heads, given J_tj (copies, d, n) in the order of `COPIES`."""
    left = _basis(torch.cat(list(slopes), 1))
    right = _basis(torch.cat(list(slopes.mT), 1))
    J = left.mT @ slopes @ right
    lost = J.shape[1] - J.shape[2]
    for _ in range(_ATTEMPTS):
        shares = normal(stream, 2, len(J))
        one, two = torch.einsum(
            "xc,cdn->xdn", torch.stack([shares[0], shares[1].abs()]), J
        )
        values = torch.linalg.eigvals(least_squares(two, one)).real.sort()[0]
        ratios = _repeated(values, J.shape[1], lost)
        if ratios is not None:
            return _apart(J, one, two, ratios, left, right)
    raise not_applicable(
        "the weights of equal tokens depend on places, but not by a bias that differs from head to "
        "head"
    )


def _basis(columns: Tensor) -> Tensor:
    vectors, sizes, _ = thin_svd(columns)
    return vectors[:, : int((sizes > _RANK * sizes[0]).sum())]


def _repeated(
    values: Tensor,
    rank: int,
    lost: int,
) -> Tensor | None:
    """Return the eigenvalues that occur k times, or k − 1 times with others between them.

    H·k is the `rank`. Most eigenvalues of a head must be closer to each other than to
    those of any other head. The largest such k is taken, since a part of a head is a
    cluster as well.
    """
    for k in range(rank, 1 + lost, -1):
        most = math.ceil(_MOST * (k - lost))
        if rank % k:
            continue
        left = values
        middles = list[Tensor]()
        width = 0.0
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
        apart = found.diff().min() if k < rank else _ONE * max_abs(values)
        if float(apart) > _PARTED * width:
            return found
    return None


def _left(
    J: Tensor,
    one: Tensor,
    two: Tensor,
    ratio: float,
    k: int,
) -> Tensor:
    """Return Z (k, d) of one head: from one pencil, then from all of them together."""
    Z = torch.linalg.svd(one - ratio * two)[0][:, -k:].mT
    for _ in range(_TURNS):
        shown = Z @ J
        beside = Z @ two
        ratios = (shown * beside).sum((1, 2)) / beside.square().sum()
        rest = torch.cat(list((J - ratios[:, None, None] * two).mT))
        Z = torch.linalg.svd(torch.linalg.qr(rest, mode="r")[1])[2][-k:]
    return Z


def _apart(
    J: Tensor,
    one: Tensor,
    two: Tensor,
    found: Tensor,
    left: Tensor,
    right: Tensor,
) -> Apart:
    k = J.shape[1] // len(found)
    Z = torch.stack([_left(J, one, two, float(ratio), k) for ratio in found])
    shown = Z @ J[:, None]  # (copies, H, k, n)
    beside = shown[0]
    ratios = (shown * beside).sum((2, 3)) / beside.square().sum(
        (1, 2)
    )  # p over p(2, 1)
    first = (1 / ratios[1] - 1) * ratios[1] / ratios[2]  # p(2, 1)
    p = first * ratios
    if not ((p > 0) & (p < 1)).all():
        raise mismatch("equal tokens have weights that no softmax gives")
    W = torch.einsum("ch,chkn->hkn", p, shown) / p.square().sum(0)[:, None, None]
    V = torch.linalg.inv(Z.flatten(0, 1)).unflatten(1, Z.shape[:2])  # (d, H, k)
    near = torch.logit(first)
    places = torch.stack([0 * near, near, near + (ratios[2] / ratios[1]).log()], 1)
    last = torch.logit(p[3]) + places.logsumexp(1)
    places = torch.cat([places, last[:, None]], 1)
    return Apart((left @ V.transpose(0, 1)).contiguous(), W @ right.mT, places)


# Queries and keys of such heads. Once the values are known, scores are read
# (sub_layer.py) from
#
#     [x + w_1 ; … ; x + w_p ; x ; … ; x]      g copies of x, and x itself
#
# in which a key's weight, relative to that of all x together, is e^{z_hj + β_h(place) −
# B_h(g)}, with B_h(g) = log Σ_{i≤g} e^{β_h(i)}. A token may give itself hardly any
# weight (in MPNet β_h(0) is 5 to 13 below the others), so g is not 0. The same keys in
# another order show the differences of β; then scores of a basis of keys with a basis
# of x are Q_h K_hᵀ itself, of rank k.

_COPIES = 2  # g
_ORDERS = 3  # of the keys
# distances
_LEAST = 8
_FURTHEST = 128
_SETTLED = 1e-6  # change of β from one distance to the next that counts as none
_QUERIES = 8  # x that show β
_SCORES = 0.7  # the size of scores at which logarithms of weights lose least
_WITHIN = 1.5  # a factor by which scores may be larger or smaller than that
_LENGTHS = 6
_FAINT = 1e-3  # a relative singular value of scores that counts as 0


def read_placed(
    view: Surroundings,
    total: Tensor,
    heads: Apart,
    reach: float,
    stream: torch.Generator,
) -> SubLayer:
    """Read the attention, with x `reach` times as long as the w."""
    d = view.dim
    reader = Reader(view, heads.V, heads.W, total, positions=False)
    basis = random_orthogonal(d, stream)
    points = random_orthogonal(d, stream)
    points = torch.cat([points, -points.sum(0, keepdim=True) / math.sqrt(d)])
    length = math.sqrt(d) / reach
    places = heads.places
    for _ in range(_LENGTHS):
        keys = length * basis[: reader.keys]
        xs = reach * length * points[:_QUERIES]
        try:
            places, scores = _read_places(reader, heads.places, keys, xs)
        except (Unsuccessful, LostSum):  # some weights are too small to be measured
            length /= 2
            continue
        share = _SCORES / float(scores.square().mean().sqrt())
        if 1 / _WITHIN < share < _WITHIN:
            break
        length *= math.sqrt(min(max(share, 1 / 64), 64))
    else:
        raise LostSum("scores do not show at any length of tokens")
    found = [
        reader.scores(keys, reach * length * points, _COPIES)
        - _at(places, _COPIES, len(keys))
        for keys in (length * basis).split(reader.keys)
    ]
    scores = torch.cat(found, -1).transpose(0, 1) @ basis / length  # (H, d + 1, d)
    left, sizes, right = torch.linalg.svd(
        torch.linalg.solve(with_ones(reach * length * points), scores),
        full_matrices=False,
    )
    k = heads.V.shape[2]
    if (sizes[:, k:] / sizes[:, :1]).max() > _FAINT:
        raise not_applicable(f"scores have a rank above {k}, the width of the values")
    Q = left[..., :k] * sizes[:, None, :k].sqrt()
    K = right.mT[..., :k] * sizes[:, None, :k].sqrt()
    return SubLayer(
        Q=Q[:, :-1].contiguous(),
        q=Q[:, -1].contiguous(),
        K=K.contiguous(),
        V=heads.V,
        O=heads.W,
        b=view.b,
        frequencies=Q.new_zeros(len(Q), 0),
        places=places,
        every_token=view.every_token,
        causal=view.causal,
    )


def _at(
    places: Tensor,
    copies: int,
    keys: int,
) -> Tensor:
    """Return what β adds to the scores of keys, relative to all copies of x: (H, keys)."""
    every = places[
        :, (copies + keys - torch.arange(keys)).clamp(max=places.shape[1] - 1)
    ]
    return every - places[:, : copies + 1].logsumexp(1, keepdim=True)


def _read_places(
    reader: Reader,
    near: Tensor,
    keys: Tensor,
    xs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return β (H, distances), given those at 0 to 3, and the scores of the keys (xs, H, keys)."""
    p = len(keys)
    orders = [
        torch.arange(p).roll(turn * p // _ORDERS + (turn == 1))
        for turn in range(_ORDERS)
    ]
    # Every order shows the sums of scores and β; β at the nearest place is known.
    seen = [reader.scores(keys[order], xs, _COPIES) for order in orders]
    one = identity(p)
    system = [torch.cat([one[order], one], 1) for order in orders]
    known = torch.cat([0 * one[:1], one[-1:]], 1)
    sums = near[:, : _COPIES + 1].logsumexp(1)
    wanted = [each.mean(0) + sums[:, None] for each in seen]
    wanted = torch.cat([*wanted, near[:, _COPIES + 1, None]], 1).mT
    found = least_squares(torch.cat([*system, known]), wanted)[
        p:
    ].mT  # the last place is nearest
    places = torch.cat([near[:, : _COPIES + 1], found.flip(1)], 1)
    scores = seen[0] - _at(places, _COPIES, p)
    while places.shape[1] <= _FURTHEST and not _settled(places):
        copies = places.shape[1] - 1
        try:
            seen = (reader.scores(keys, xs, copies) - scores).mean(0).flip(1)
        except Unsuccessful:  # the weights are too small
            break
        further = seen + places.logsumexp(1, keepdim=True)
        places = torch.cat([places, further], 1)
    changes = torch.nonzero((places.diff(dim=1).abs() > _SETTLED).any(0))
    return places[:, : int(changes.max()) + 2].contiguous(), scores


def _settled(places: Tensor) -> bool:
    """Return whether β is constant in the second half of the distances.

    Buckets of distances grow by less than that.
    """
    half = places[:, places.shape[1] // 2 :]
    return places.shape[1] >= _LEAST and max_abs(half - half[:, -1:]) < _SETTLED
