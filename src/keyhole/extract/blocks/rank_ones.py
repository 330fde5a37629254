"""All matrices of rank one in a space S of symmetric ones, by the subspace power method.

Kileel and Pereira, arXiv 1912.04007: in general position the aaᵀ in S are the maxima,
with value 1, of `‖P_S(aaᵀ)‖` over |a| = 1. Iterates `a ← P_S(aaᵀ)·a` from random starts
climb to them, and Gauss–Newton steps for `(1 − P_S)(aaᵀ) = 0` end there. Once half of
the matrices are found, starts are first moved into what is left of S without them.

Units with gates bring two matrices each, aaᵀ and the symmetric product awᵀ + waᵀ of a
with its *partner* w (ours). Towards w the maximum is flat: aaᵀ leaves S with the fourth
power of the angle, so iterates stop in the plane of a and w, where `(1 − P_S)(a·)`
nearly vanishes. In this plane S has two of three symmetric matrices; the third,
orthogonal to both, is nnᵀ with n orthogonal to a. From there Newton's method solves `(1
− P_S)(aaᵀ) = 0` and `(1 − P_S)(awᵀ + waᵀ) = 0` together.

Symmetric matrices (q, q) are packed as vectors of q(q + 1)/2 numbers, with √2 off the
diagonal, so that inner products stay the same. S is given by a basis F of what is
orthogonal to it, so that `(1 − P_S)(aaᵀ) = 0` says that aᵀFa = 0 for every F.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Status, Unsuccessful
from keyhole.core.least_squares import Options, Point, minimize
from keyhole.extract.bilinear import random_units

FOUND = 1e-5  # what of aaᵀ may be outside S
_SHIFT = 0.1  # of a, added to each step: it keeps the iteration from alternating
_ROUNDS = 40
_POWERS = 80
_TURNS = 2  # of planes towards a and its partner
_OPTIONS = Options(max_steps=12, damping=1e-9, rtol=1e-3)
# difference of cosines
_SAME = 1e-5
_SAME_PARTNER = 1e-4
_FLAT = 1e-3  # curvature towards a partner, relative to the mean curvature
_BATCH = 256
_CLIFF = 10.0  # the least ratio of the singular values on either side of the rank


def rank_of(sizes: Tensor, errors: float) -> tuple[int, bool]:
    """Return the rank that singular values show, and whether it is clear.

    Values below `errors`, relative to the largest, count as zero.
    """
    ratios = sizes[:-1] / sizes[1:].clamp(min=errors * sizes[0])
    count = int(ratios.argmax()) + 1
    return count, float(ratios[count - 1]) > _CLIFF


def symmetric(x: Tensor, y: Tensor) -> Tensor:
    """Return (xyᵀ + yxᵀ)/2 of vectors (…, q), packed."""
    q = x.shape[-1]
    rows, columns = torch.triu_indices(q, q, device=x.device)
    product = (x[..., rows] * y[..., columns] + x[..., columns] * y[..., rows]) / 2
    return torch.where(rows == columns, product, math.sqrt(2) * product)


def packed(matrices: Tensor) -> Tensor:
    """Pack symmetric matrices (…, q, q)."""
    q = matrices.shape[-1]
    rows, columns = torch.triu_indices(q, q, device=matrices.device)
    values = matrices[..., rows, columns]
    return torch.where(rows == columns, values, math.sqrt(2) * values)


def unpacked(vectors: Tensor, q: int) -> Tensor:
    """Return the symmetric matrices (…, q, q) of packed vectors."""
    rows, columns = torch.triu_indices(q, q, device=vectors.device)
    full = vectors.new_zeros(*vectors.shape[:-1], q, q)
    values = torch.where(rows == columns, vectors, vectors / math.sqrt(2))
    full[..., rows, columns] = values
    full[..., columns, rows] = values
    return full


def _distinct(vectors: Tensor, same: float) -> Tensor:
    """Return the indices of unit vectors, without those that repeat an earlier one up to a sign."""
    numbers = torch.arange(len(vectors), device=vectors.device)
    if not len(vectors):
        return numbers
    first = ((vectors @ vectors.mT).abs() > 1 - same).to(torch.int8).argmax(1)
    return numbers[first == numbers]


def _in_plane(
    first: Tensor,
    second: Tensor,
    outside: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a and w in the planes of orthonormal vectors (n, q).

    `outside` (n, 3, …) is what first², √2·first·second and second² have outside S.
    """
    form = torch.linalg.eigh(outside @ outside.mT)[1][..., -1]
    side = form[:, 1] / math.sqrt(2)
    sizes, axes = torch.linalg.eigh(
        torch.stack([form[:, 0], side, side, form[:, 2]], 1).view(-1, 2, 2)
    )
    at = torch.arange(len(first), device=first.device)
    x, y = axes[at, :, sizes.abs().argmin(1)].mT[..., None]
    return x * first + y * second, x * second - y * first


def rank_ones(
    outside: Tensor,
    q: int,
    most: int,
    stream: torch.Generator,
    starts: int = 256,
    allowed: Sequence[float] = (FOUND,),
    gates: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return unit vectors a (n, q) with aaᵀ orthogonal to `outside`, and their partners.

    `outside` has orthonormal rows, packed. There are `most` vectors, or, if there may
    be `gates`, half as many, each with a partner orthogonal to it. Of either product,
    the first of `allowed` may be outside S, or, if not all are found, the next.
    """
    units = torch.empty(0, q)
    partners = None
    for each in allowed:
        units, partners = _search(outside, q, most, stream, starts, each, gates)
        if (1 if partners is None else 2) * len(units) == most:
            return units, partners
    raise Unsuccessful(
        Status.NOT_APPLICABLE,
        f"curvature spans {most} dimensions, but {len(units)} units were found in it: a layer of "
        f"one kind of unit has {most}, and half as many with gates: try another seed",
    )


def _search(
    outside: Tensor,
    q: int,
    most: int,
    stream: torch.Generator,
    starts: int,
    allowed: float,
    gates: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the vectors that are found until there are enough, or rounds end."""
    device = outside.device
    flat = unpacked(outside, q).flatten(0, 1)  # (codimension·q, q)
    found = torch.empty(0, q, dtype=torch.float64, device=device)
    left = outside
    gated = None if gates else False
    for _ in range(_ROUNDS):
        a = _powers(random_units(starts, q, stream).to(device), left)
        if left is not outside:
            a = _powers(a, outside)
        a = _ones(a, flat, allowed)
        if gated is None and len(a):
            gated = _is_flat(a, flat)
            most = most // 2 if gated else most
        if gated:
            a = torch.cat([found.view(-1, 2, q)[:, 0], a])
            kept = _distinct(a, _SAME_PARTNER)
            kept = kept[kept >= len(found)]
            a = _with_partners(a[kept], flat, allowed)
        else:
            a = a.unsqueeze(1)
        found = torch.cat([found.view(-1, *a.shape[1:]), a])
        found = found[_distinct(found[:, 0], _SAME)]
        if len(found) >= most:
            break
        if len(found) > most // 2:
            products = [symmetric(found[:, 0], each) for each in found.unbind(1)]
            left = torch.linalg.qr(torch.cat([outside, *products]).mT)[
                0
            ].mT.contiguous()
    return (found[:, 0], found[:, 1]) if gated else (found.view(-1, q), None)


def _powers(a: Tensor, outside: Tensor) -> Tensor:
    q = a.shape[1]
    for _ in range(_POWERS):
        product = symmetric(a, a)
        inside = product - (product @ outside.mT) @ outside
        step = (unpacked(inside, q) @ a[..., None])[..., 0]
        a = normalize(step + _SHIFT * a, dim=1)
    return a


def _forms(a: Tensor, flat: Tensor) -> Tensor:
    """Return Fa for each matrix F outside S: (n, codimension, q)."""
    return (a @ flat.mT).unflatten(1, (-1, a.shape[1]))


def _times(forms: Tensor, x: Tensor) -> Tensor:
    """Return xᵀFa for each matrix F outside S, given the Fa: (n, codimension)."""
    return (forms * x[:, None]).sum(2)


class _Alone(Point):
    """What of aaᵀ is outside S, at unit vectors a (n, q)."""

    def __init__(self, a: Tensor, flat: Tensor) -> None:
        self._of_a = _forms(a, flat)
        super().__init__(a, _times(self._of_a, a))

    @cached_property
    def normal(self) -> Tensor:
        square = 4 * self._of_a.mT @ self._of_a
        size = square.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        return square + size * self.x[:, :, None] * self.x[:, None]

    def backward(self, r: Tensor) -> Tensor:
        return 2 * (self._of_a * r[..., None]).sum(1)

    def moved(self, p: Tensor) -> Tensor:
        return normalize(self.x + p, dim=1)


class _WithPartners(Point):
    """What of aaᵀ and of awᵀ + waᵀ is outside S, at orthonormal a and w (n, 2, q)."""

    def __init__(self, both: Tensor, flat: Tensor) -> None:
        a, w = both.unbind(1)
        self._of_a = _forms(a, flat)
        self._of_w = _forms(w, flat)
        products = [_times(self._of_a, a), _times(self._of_a, w)]
        super().__init__(both, torch.stack(products, 1))

    @cached_property
    def normal(self) -> Tensor:
        aa = self._of_a.mT @ self._of_a
        wa = self._of_w.mT @ self._of_a
        top = torch.cat([4 * aa + self._of_w.mT @ self._of_w, wa], 2)
        return torch.cat([top, torch.cat([wa.mT, aa], 2)], 1)

    def backward(self, r: Tensor) -> Tensor:
        own, mixed = r.chunk(2, 1)
        by_a = 2 * own[:, None] @ self._of_a + mixed[:, None] @ self._of_w
        return torch.cat([by_a, mixed[:, None] @ self._of_a], 1).flatten(1)

    def moved(self, p: Tensor) -> Tensor:
        a, w = super().moved(p).unbind(1)
        a = normalize(a, dim=1)
        w = w - a * (a * w).sum(1, keepdim=True)
        return torch.stack([a, normalize(w, dim=1)], 1)


def _solved(point: type[_Alone | _WithPartners], start: Tensor, flat: Tensor) -> Tensor:
    """Return what the steps from each start end in, a few starts at a time."""

    def linearize(x: Tensor, _: Tensor) -> Point:
        return point(x, flat)

    ends = [minimize(linearize, part, _OPTIONS)[0] for part in start.split(_BATCH)]
    return torch.cat(ends)


def _ones(a: Tensor, flat: Tensor, allowed: float) -> Tensor:
    """Return the solutions that iterates reach if partners are left out of account.

    Those with partners are reached as well, only slowly.
    """
    a = _solved(_Alone, a, flat)
    return a[_outside(a, a, flat) < allowed]


def _outside(a: Tensor, w: Tensor, flat: Tensor) -> Tensor:
    """Return what of awᵀ + waᵀ is outside S (n)."""
    parts = zip(a.split(_BATCH), w.split(_BATCH), strict=True)
    return torch.cat([_times(_forms(a, flat), w).norm(dim=1) for a, w in parts])


def _is_flat(a: Tensor, flat: Tensor) -> bool:
    """Return whether aaᵀ leaves S as slowly in one direction as it does if a has a partner."""
    J = _forms(a[:_BATCH], flat)
    sizes = torch.linalg.eigvalsh(J.mT @ J)
    return float((sizes[:, 1] / sizes.mean(1)).median()) < _FLAT


def _with_partners(a: Tensor, flat: Tensor, allowed: float) -> Tensor:
    """Return the solutions that vectors in planes lead to, each with its partner: (n, 2, q)."""
    if not len(a):
        return a.new_zeros(0, 2, a.shape[1])
    start = [torch.stack(_in_planes(part, flat), 1) for part in a.split(_BATCH)]
    both = _solved(_WithPartners, torch.cat(start), flat)
    a, w = both.unbind(1)
    residual = torch.maximum(_outside(a, a, flat), _outside(a, w, flat))
    return both[residual < allowed]


def _in_planes(a: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and w of the planes in which iterates are."""
    w = a
    for _ in range(_TURNS):
        J = _forms(a, flat)
        first, second = torch.linalg.eigh(J.mT @ J)[1][..., :2].unbind(2)
        at_first = _forms(first, flat)
        at_second = _forms(second, flat)
        products = [
            _times(at_first, first),
            math.sqrt(2) * _times(at_first, second),
            _times(at_second, second),
        ]
        a, w = _in_plane(first, second, torch.stack(products, 1))
    return normalize(a, dim=1), normalize(w, dim=1)
