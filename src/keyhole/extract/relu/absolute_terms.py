"""Sums of folds, `E(x) = ½ Σ_k s_k |n_kᵀx|` with s_k = ±1: the even part of a ReLU network.

A neuron w·ReLU(aᵀx) is the fold of n = |w|·a with s = sign(w), plus a linear function. From folds
and the linear part ℓ of the whole, neurons are made again:

    E(x) + ℓᵀx = Σ_k s_k ReLU(o_k n_kᵀx) + rᵀx,   r = ℓ − ½ Σ_k s_k o_k n_k,   any o_k = ±1.

The true orientations make r = 0. With n_k independent they are the solution of a linear system.
With up to about 2d neurons the cube [−1, 1]^m generically meets the affine space of solutions in
that corner alone, and alternating reflections find it. Beyond, it is a subset-sum problem: of few
neurons all corners are tried, of more it is left alone, and two neurons, ReLU(rᵀx) − ReLU(−rᵀx),
carry the remainder, so that the function is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.oracle.planted import ReluFfn

_REFLECTIONS = 200
_FEW = 14  # neurons, of whose orientations all are tried
_EXACT = 1e-10  # of the sum of the folds: a remainder below is rounding


@dataclass(frozen=True)
class Folds:
    """The normals n_k (m, d) and signs s_k (m,)."""

    normals: Tensor
    signs: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return 0.5 * (x @ self.normals.mT).abs() @ self.signs

    def __len__(self) -> int:
        return len(self.signs)

    def joined(self, other: Folds) -> Folds:
        normals = torch.cat([self.normals, other.normals])
        return Folds(normals, torch.cat([self.signs, other.signs]))

    @classmethod
    def none(cls, d: int) -> Folds:
        return cls(torch.empty(0, d, dtype=torch.float64), torch.empty(0, dtype=torch.float64))


def neurons(folds: Folds, linear: Tensor, *, orient: bool = True) -> tuple[ReluFfn, int]:
    """A network with these folds and this linear part, and the number of its unknowns."""
    halves = 0.5 * folds.signs.unsqueeze(1) * folds.normals
    o = _orientations(halves, linear) if orient else torch.ones_like(folds.signs)
    remainder = linear - o @ halves
    A, w = o.unsqueeze(1) * folds.normals, folds.signs
    size = torch.linalg.vector_norm(halves, dim=1).sum() + torch.linalg.vector_norm(linear)
    if torch.linalg.vector_norm(remainder) <= _EXACT * size:
        # ℓ was read directly and is the better known: spread the difference over the neurons.
        A = A + (2 / max(1, len(w))) * torch.outer(w, remainder)
        return ReluFfn(A, w), max(A.numel(), len(linear))
    A = torch.cat([A, torch.stack([remainder, -remainder])])
    w = torch.cat([w, torch.tensor([1.0, -1.0], dtype=torch.float64)])
    return ReluFfn(A, w), A.numel() - len(remainder)  # two neurons, one vector


def _orientations(halves: Tensor, linear: Tensor) -> Tensor:
    """Signs o with `oᵀ halves = ℓ` if they are found, else some signs."""
    inverse = torch.linalg.pinv(halves)  # (d, m)
    size = torch.linalg.vector_norm(halves, dim=1).sum()
    z = torch.zeros(len(halves), dtype=torch.float64)
    o = torch.ones_like(z)
    # With independent normals there is one solution, and the first look finds it.
    independent = int(torch.linalg.matrix_rank(halves)) == len(halves) if len(halves) else True
    for _ in range(1 if independent else _REFLECTIONS):
        solution = z - (z @ halves - linear) @ inverse
        o = torch.where(solution < 0, -1.0, 1.0).to(torch.float64)
        if torch.linalg.vector_norm(o @ halves - linear) <= _EXACT * size:
            return o
        z = z + (2 * solution - z).clamp(-1, 1) - solution
    if independent or len(halves) > _FEW:
        return o
    signs = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    corners = torch.cartesian_prod(*[signs] * len(halves)).reshape(-1, len(halves))
    return corners[torch.linalg.vector_norm(corners @ halves - linear, dim=1).argmin()]
