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
    1 + (t = 2, j = 1)        with a = p(3, 2)/p(3, 1) and r = p(2, 1)/p(3, 1): r − 1 = a·p(2, 1)

which are the p_h themselves, and with them V_h O_h G of every head. Two heads of one bias are one
to all of this, and a layer without a bias of positions is a single head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares

# (t, j): the first three show all p_h, the others part heads that are alike near by.
COPIES = ((2, 1), (3, 1), (3, 2), (9, 8), (17, 16))
_RANK = 1e-10
_ATTEMPTS = 24
_GAPS = 48
_TURNS = 3


@dataclass(frozen=True)
class Apart:
    """`V` (H, d, k) and `W` (H, k, n) of `Σ_h V_h W_h`, and β_h at the distances 0, 1, 2 (H, 3)."""

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
            Z = [_left(J, one, two, float(ratio), J.shape[1] // len(ratios)) for ratio in ratios]
            return _apart(J, torch.stack(Z), left, right)
    raise Unsuccessful(
        Status.NOT_APPLICABLE,
        "places matter to the weights of equal tokens, but not by a bias that differs from head to "
        "head",
    )


def _basis(columns: Tensor) -> Tensor:
    vectors, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    return vectors[:, : int((sizes > _RANK * sizes[0]).sum())]


def _repeated(values: Tensor, rank: int, lost: int) -> Tensor | None:
    """Eigenvalues that come k times, or k − 1 with others between them; H·k is the rank."""
    gaps = values.diff()
    for least in torch.logspace(-10, -1, _GAPS, dtype=torch.float64) * (values[-1] - values[0]):
        ends = [0, *(torch.nonzero(gaps > least)[:, 0] + 1).tolist(), len(values)]
        groups = [values[i:j] for i, j in zip(ends, ends[1:], strict=False)]
        many = [group for group in groups if len(group) > 1]
        sizes = {len(group) + lost for group in many}
        alone = len(groups) - len(many)
        if len(sizes) == 1 and sizes.pop() * len(many) == rank and alone == lost * (len(many) - 1):
            return torch.stack([group.median() for group in many])
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


def _apart(J: Tensor, Z: Tensor, left: Tensor, right: Tensor) -> Apart:
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
    return Apart((left @ V.transpose(0, 1)).contiguous(), W @ right.mT, places)
