"""All matrices of rank one in a space of symmetric ones that is wide: thousands of dimensions.

The subspace power method (Kileel and Pereira, arXiv 1912.04007), as in units.py, with what a wide
space asks for: the projection is computed outside of S where that is smaller, the last digits are
Gauss–Newton's on `(1 − P_S)(aaᵀ) = 0`, and once most are found starts come from what is left of S
without them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.extract.blocks.units import distinct, symmetric, unpacked

_POWERS = 80
_NEWTON = 8
_SHIFT = 0.1
_ROUNDS = 40
_FOUND = 1e-5  # of 1: what of aaᵀ is outside S
_SAME = 1e-5  # of cosines


def rank_ones(basis: Tensor, q: int, most: int, stream: torch.Generator, starts: int) -> Tensor:
    """Unit vectors a (at most `most`, q) with aaᵀ in the span of packed rows, on their device."""
    device = basis.device
    S = torch.linalg.qr(basis.mT)[0]
    outside = torch.linalg.svd(S)[0][:, S.shape[1] :].mT.contiguous()  # (codimension, D)
    forms = unpacked(outside, q)
    found = torch.empty(0, q, dtype=torch.float64, device=device)
    left = outside
    for _ in range(_ROUNDS):
        a = torch.randn(starts, q, generator=stream, dtype=torch.float64).to(device)
        a = _powers(normalize(a, dim=1), left)
        if left is not outside:
            a = _powers(a, outside)
        a, off = _newton(a, forms)
        found = distinct(torch.cat([found, a[off < _FOUND]]), _SAME)
        if len(found) >= most:
            break
        if len(found) > most // 2:
            inside = torch.cat([outside, symmetric(found, found)])
            left = torch.linalg.qr(inside.mT)[0].mT.contiguous()
    return found


def _powers(a: Tensor, outside: Tensor) -> Tensor:
    q = a.shape[1]
    for _ in range(_POWERS):
        product = symmetric(a, a)
        inside = product - (product @ outside.mT) @ outside
        step = (unpacked(inside, q) @ a[..., None])[..., 0]
        a = normalize(step + _SHIFT * a, dim=1)
    return a


def _newton(a: Tensor, forms: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss–Newton, and how far aaᵀ is outside in the end."""
    q = a.shape[1]
    eye = torch.eye(q, dtype=torch.float64, device=a.device)
    flat = forms.flatten(0, 1)  # (c·q, q)
    parts = a.split(256)
    ended: list[Tensor] = []
    for at in parts:
        for _ in range(_NEWTON):
            J = (at @ flat.mT).unflatten(1, (-1, q))  # (n, c, q): forms·a
            rest = (J * at[:, None]).sum(2)
            square = 4 * J.mT @ J
            ridge = 1e-12 * square.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
            along = (
                square.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] * at[:, :, None] * at[:, None]
            )
            step = torch.linalg.solve(square + along + ridge * eye, 2 * J.mT @ rest[..., None])
            at = normalize(at - step[..., 0], dim=1)
        ended.append(at)
    a = torch.cat(ended)
    rests = torch.cat(
        [((at @ flat.mT).unflatten(1, (-1, q)) * at[:, None]).sum(2) for at in a.split(256)]
    )
    return a, rests.square().sum(1).sqrt()
