"""Orthogonal subspaces from Hessians: the route that Appendix C conjectures.

*Provably Learning Attention with Queries* (arXiv 2601.16873), C.1. With `g_h = W_h x`,

    φ_x(δ) = f([x+δ ; x]) − vᵀx = Σ_h σ(g_hᵀδ)·v_hᵀδ,    ∇²φ_x(0) = ¼ Σ_h (g_h v_hᵀ + v_h g_hᵀ).

If the heads live in orthogonal subspaces, all these Hessians are block-diagonal in one basis. The
paper proposes finite differences and a finest simultaneous block-diagonalisation (Murota et al.)
and proves nothing. What makes it work here:

- `φ_x(δ) − ½vᵀδ = ½ Σ_h tanh(g_hᵀδ/2)·v_hᵀδ` is even in δ, and v is known exactly: one answer
  gives one entry of the quadratic form with an error of second order, z²/12 for scores of size z.
  With x shortened by as much as δ is lengthened, rounding costs ε/z. Measured, relative to the
  largest entry: 1e-10 with one answer per entry, 2e-12 with two (one step of Richardson).
- A Hessian has rank 2H only, so one x cannot show whole subspaces. It need not: two x show
  `span(v_h, W_h x_1, W_h x_2)` of each head, and that already is a block that no basis splits
  further. The rest of a subspace is grown from it (orthogonal_heads.py).
- The commutant is computed on the range of the Hessians alone: 3H dimensions instead of d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.extract.bilinear import batch_rows, random_orthogonal, scalar
from keyhole.oracle.protocol import Oracle, ask

_REACH = 2.0**40
_START = 2.0**-16  # s² of the first look at the size of the scores
_LARGEST = 2.0**30
_TRIES = 12
_LARGE = 1e-2


@dataclass(frozen=True)
class QuadraticForms:
    """`½ δᵀ∇²φ_x(0)δ` by finite differences, with scores of about the size `step`."""

    oracle: Oracle
    v: Tensor
    step: float
    levels: int

    def hessian(self, x: Tensor, stream: torch.Generator) -> Tensor:
        """∇²φ_x(0), from d(d+1)/2 forms in a random orthonormal basis."""
        d = len(x)
        Q = random_orthogonal(d, stream)
        i, j = torch.triu_indices(d, d)
        square = self._scale(Q, x)
        if square is None:
            return torch.zeros(d, d, dtype=torch.float64)
        # (q_i + q_j)/√2 has length 1 off the diagonal, q_i on it.
        pairs = torch.where((i == j).unsqueeze(1), Q[i], (Q[i] + Q[j]) / 2**0.5)
        forms = self._extrapolated(pairs, x, square)
        H = torch.zeros(d, d, dtype=torch.float64)
        H[i, j] = H[j, i] = 2 * forms
        half = H.diagonal() / 2
        off = H - half.unsqueeze(0) - half.unsqueeze(1)
        off.diagonal().copy_(H.diagonal())
        return Q.mT @ off @ Q

    def _extrapolated(self, deltas: Tensor, x: Tensor, square: float) -> Tensor:
        """Richardson's table: errors are even powers of the scale, which is halved each time."""
        table: list[Tensor] = []
        for level in range(self.levels):
            row = [self._forms(deltas, x, square / 2**level)]
            for power, coarse in enumerate(table, start=1):
                row.append(row[-1] + (row[-1] - coarse) / (4**power - 1))
            table = row
        return table[-1]

    def _forms(self, deltas: Tensor, x: Tensor, square: float) -> Tensor:
        """`(φ_x(tδ) − ½t·vᵀδ) / t²` with `t·x` in place of x: the score is square·δᵀWx."""
        long, short = _REACH, square / _REACH
        tokens = torch.empty(len(deltas), 2, len(x), dtype=torch.float64)
        tokens[:, 1] = short * x
        tokens[:, 0] = long * deltas + tokens[:, 1]
        rows = batch_rows(2, len(x))
        answers = torch.cat([scalar(ask(self.oracle, part)) for part in tokens.split(rows)])
        return (answers / long - short / long * (self.v @ x) - deltas @ self.v / 2) / square

    def _scale(self, Q: Tensor, x: Tensor) -> float | None:
        """The square at which scores come out at about `step`; None if nothing curves."""
        probes = (self.v / torch.linalg.vector_norm(self.v) + Q[:4]) / 2**0.5
        square = _START
        for _ in range(_TRIES):
            size = float((self._forms(probes, x, square) / (probes @ self.v)).abs().max()) * 4
            if size * square > 0.1:
                square /= 2.0**12
            elif size * square > 1e-9:
                return self.step / size
            elif square > _LARGEST:
                return None
            else:
                square *= 2.0**16
        raise Unsuccessful(Status.SATURATED, "no scale shows how the answers curve")


def finest_blocks(hessians: list[Tensor], floor: float, stream: torch.Generator) -> list[Tensor]:
    """Orthonormal bases (d×k) of the finest subspaces that all symmetric matrices leave alone.

    `floor` is the error of the matrices, relative to the largest.
    """
    left, sizes, _ = torch.linalg.svd(torch.cat(hessians, dim=1))
    if not bool(sizes[0] > 0):
        return []
    frame = left[:, : _gap(sizes / sizes[0], floor)]
    commuting = _commutant([frame.mT @ H @ frame / sizes[0] for H in hessians], floor)
    mix = torch.randn(len(commuting), generator=stream, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(torch.einsum("c,cij->ij", mix, commuting))
    # As many different eigenvalues as the commutant has dimensions: cut at the widest gaps.
    cuts = values.diff().argsort(descending=True)[: len(commuting) - 1].sort().values + 1
    return [frame @ block for block in torch.tensor_split(vectors, cuts.tolist(), dim=1)]


def _gap(sizes: Tensor, floor: float) -> int:
    """How many of the falling sizes stand above their widest gap, noise being at `floor`."""
    logs = torch.cat([sizes, sizes.new_tensor([floor])]).clamp(min=floor).log()
    drops = logs[:-1] - logs[1:]
    drops[sizes[1:].ge(_LARGE).nonzero()] = 0  # what is large is not noise, whatever follows
    return int(drops.argmax()) + 1


def _commutant(matrices: list[Tensor], floor: float) -> Tensor:
    """An orthonormal basis (c, n, n) of the symmetric matrices that commute with all."""
    n = len(matrices[0])
    i, j = torch.triu_indices(n, n)
    basis = torch.zeros(len(i), n, n, dtype=torch.float64)
    weight = torch.where(i == j, 1.0, 0.5**0.5).to(torch.float64)
    index = torch.arange(len(i))
    basis[index, i, j] = basis[index, j, i] = weight
    brackets = torch.cat([(basis @ H - H @ basis).flatten(1) for H in matrices], dim=1)
    left, sizes, _ = torch.linalg.svd(brackets, full_matrices=False)
    # The identity commutes with everything, so the last size is noise: it need not count.
    count = _gap(sizes[:-1], floor) if len(sizes) > 1 else 0
    return torch.einsum("ac,aij->cij", left[:, count:], basis)
