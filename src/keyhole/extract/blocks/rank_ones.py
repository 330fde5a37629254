"""All matrices of rank one in a space of symmetric ones that is wide: thousands of dimensions.

The subspace power method (Kileel and Pereira, arXiv 1912.04007), as in units.py, with what a wide
space asks for: the projection is computed outside of S where that is smaller, the last digits are
Gauss–Newton's, and once most are found starts come from what is left of S without them.

Without gates the equations are `(1 − P_S)(aaᵀ) = 0`. With gates S has the products of a with its
partner w too, and towards w the maximum is flat: aaᵀ leaves S with the fourth power of the angle.
But the plane of both is where `(1 − P_S)(a·)` nearly vanishes. In it S has two of three symmetric
matrices, aaᵀ and awᵀ + waᵀ; the third, orthogonal to them, is nnᵀ with n orthogonal to a. From
there Gauss–Newton solves for both, `(1 − P_S)(aaᵀ) = 0` and `(1 − P_S)(awᵀ + waᵀ) = 0`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.extract.blocks.units import distinct, symmetric, unpacked

_POWERS = 80
_NEWTON = 8
_TURNS = 2
_SHIFT = 0.1
_ROUNDS = 40
FOUND = 1e-5
_FLAT = 1e-3  # of the mean curvature: that towards a partner
_SAME = 1e-5  # of cosines
_NEAR = 1e-4  # likewise, before partners are known
_BATCH = 256


def rank_ones(
    outside: Tensor, q: int, most: int, stream: torch.Generator, starts: int,
    allowed: float = FOUND, gates: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Unit vectors a (n, q) with aaᵀ orthogonal to packed rows (orthonormal); and partners.

    At most `most` of them, or half as many with a partner each, orthogonal to it, where there may
    be `gates`. `allowed` is what of aaᵀ may be outside S, of 1.
    """
    device = outside.device
    flat = unpacked(outside, q).flatten(0, 1)  # (codimension·q, q)
    found = torch.empty(0, q, dtype=torch.float64, device=device)
    left, gated = outside, None if gates else False
    for _ in range(_ROUNDS):
        a = torch.randn(starts, q, generator=stream, dtype=torch.float64).to(device)
        a = _powers(normalize(a, dim=1), left)
        if left is not outside:
            a = _powers(a, outside)
        a = _settled(a, flat, allowed)
        if gated is None and len(a):
            gated = _flat(a, flat)
            most = most // 2 if gated else most
        if gated:
            a = torch.cat([found.view(-1, 2, q)[:, 0], a])
            kept = distinct(a, _NEAR)
            a = _with_partners(a[kept[kept >= len(found)]], flat, allowed)
        else:
            a = a.unsqueeze(1)
        found = torch.cat([found.view(-1, *a.shape[1:]), a])
        found = found[distinct(found[:, 0], _SAME)]
        if len(found) >= most:
            break
        if len(found) > most // 2:
            products = [symmetric(found[:, 0], each) for each in found.unbind(1)]
            left = torch.linalg.qr(torch.cat([outside, *products]).mT)[0].mT.contiguous()
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
    """Of each matrix F outside S, Fa: (n, c, q)."""
    return (a @ flat.mT).unflatten(1, (-1, a.shape[1]))


def _settled(a: Tensor, flat: Tensor, allowed: float) -> Tensor:
    """Gauss–Newton without partners: those that arrive, slowly where there are some."""
    ended: list[Tensor] = []
    eye = torch.eye(a.shape[1], dtype=torch.float64, device=a.device)
    for at in a.split(_BATCH):
        for _ in range(_NEWTON):
            J = _forms(at, flat)
            rest = (J * at[:, None]).sum(2)
            square = 4 * J.mT @ J
            size = square.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
            square = square + size * (at[:, :, None] * at[:, None] + 1e-12 * eye)
            step = torch.linalg.solve(square, 2 * J.mT @ rest[..., None])
            at = normalize(at - step[..., 0], dim=1)
        off = (_forms(at, flat) * at[:, None]).sum(2).square().sum(1).sqrt()
        ended.append(at[off < allowed])
    return torch.cat(ended)


def _flat(a: Tensor, flat: Tensor) -> bool:
    """Does aaᵀ leave S as slowly in one direction, at most of them, as it does with partners?"""
    J = _forms(a[:_BATCH], flat)
    sizes = torch.linalg.eigvalsh(J.mT @ J)
    return float((sizes[:, 1] / sizes.mean(1)).median()) < _FLAT


def _with_partners(a: Tensor, flat: Tensor, allowed: float) -> Tensor:
    """Those that arrive, each with its partner: (n, 2, q)."""
    ended: list[Tensor] = []
    q = a.shape[1]
    eye = torch.eye(2 * q, dtype=torch.float64, device=a.device)
    for at in a.split(_BATCH) if len(a) else ():
        a, w = _in_planes(at, flat)
        for _ in range(_NEWTON):
            of_a, of_w = _forms(a, flat), _forms(w, flat)
            aa, wa = of_a.mT @ of_a, of_w.mT @ of_a
            top = torch.cat([4 * aa + of_w.mT @ of_w, wa], 2)
            square = torch.cat([top, torch.cat([wa.mT, aa], 2)], 1)
            one, two = (of_a * a[:, None]).sum(2), (of_a * w[:, None]).sum(2)
            slope = torch.cat([
                2 * of_a.mT @ one[..., None] + of_w.mT @ two[..., None], of_a.mT @ two[..., None]
            ], 1)  # fmt: skip
            size = square.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            step = torch.linalg.solve(square + 1e-9 * size * eye, slope)[..., 0]
            a = normalize(a - step[:, :q], dim=1)
            w = w - step[:, q:]
            w = normalize(w - a * (a * w).sum(1, keepdim=True), dim=1)
        of_a = _forms(a, flat)
        off = torch.stack([(of_a * x[:, None]).sum(2).square().sum(1) for x in (a, w)]).amax(0)
        ended.append(torch.stack([a, w], 1)[off.sqrt() < allowed])
    return torch.cat(ended) if ended else a.new_zeros(0, 2, q)


def _in_planes(a: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    """The a and w of the planes in which iterates are."""
    w = a
    for _ in range(_TURNS):
        J = _forms(a, flat)
        first, second = torch.linalg.eigh(J.mT @ J)[1][..., :2].unbind(2)
        at_first, at_second = _forms(first, flat), _forms(second, flat)
        left = torch.stack([
            (at_first * first[:, None]).sum(2), math.sqrt(2) * (at_first * second[:, None]).sum(2),
            (at_second * second[:, None]).sum(2),
        ], 1)  # fmt: skip
        form = torch.linalg.eigh(left @ left.mT)[1][..., -1]
        side = form[:, 1] / math.sqrt(2)
        sizes, axes = torch.linalg.eigh(
            torch.stack([form[:, 0], side, side, form[:, 2]], 1).view(-1, 2, 2)
        )
        x, y = axes[torch.arange(len(a), device=a.device), :, sizes.abs().argmin(1)].mT[..., None]
        a, w = x * first + y * second, x * second - y * first
    return normalize(a, dim=1), normalize(w, dim=1)
