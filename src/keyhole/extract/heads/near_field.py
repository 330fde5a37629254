"""The near field of a head that masks have isolated: `y = σ(gᵀδ)·vᵀδ`, so `gᵀδ = logit(y / vᵀδ)`.

Theorem 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873), for one head of many.
A *ray* is a direction that `W x_0` of some heads has; as a rule it is one head's. Heads with
proportional W share it (slopes.py): there `y = Σ_k σ(c_k gᵀδ)·V_kᵀδ` is solved for `gᵀδ`.

Probes: `δ_i = s_i q_i + a_i p` over orthonormal rows q, with p along v and a_i such that all vᵀδ_i
have the same size; q_0 is along the expected g and s_0 small, since gᵀq_0 is large. The rows may
span all of space or only the columns of a W of low rank. Diagonal plus rank one is solved in
closed form (Sherman–Morrison): with t = Qp and y = Qg,

    z = Sy + a(tᵀy)    so    y = S⁻¹z − S⁻¹a (tᵀS⁻¹z) / (1 + tᵀS⁻¹a).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from keyhole.extract.heads.masks import Behind

_LOGIT = 0.6  # the size of gᵀδ that probes aim at
_WIDEST = 4.0  # a logit beyond this is asked again with a quarter of δ
_NEWTON = 50


@dataclass(frozen=True)
class Rays:
    """The heads at x_0, by ray: slope k of ray r is a head with `W x_0 = c_k g` and value V_k.

    Unused slopes have V = 0. `v` is ΣV_k, `v0` the value of heads with W = 0.
    """

    x: Tensor
    line: Tensor  # (R,)
    sign: Tensor  # (R,)
    g: Tensor  # (R, d)
    v: Tensor  # (R, d)
    v0: Tensor  # (d,)
    c: Tensor  # (R, K)
    V: Tensor  # (R, K, d)
    frame: Tensor  # (d, d): random orthonormal rows, for whoever needs some

    def __len__(self) -> int:
        return len(self.line)

    @cached_property
    def slopes(self) -> Tensor:
        """How many heads there are on each ray."""
        return (self.V != 0).any(2).sum(1)

    def part(self, rows: Tensor) -> Rays:
        """Some of the rays."""
        names = ("line", "sign", "g", "v", "c", "V")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def other_values(self) -> Tensor:
        """For every ray the values of all other heads, (R, n, d)."""
        rays, _, d = self.V.shape
        own = torch.eye(rays, dtype=torch.bool)
        rest = self.V.expand(rays, -1, -1, -1)[~own].view(rays, -1, d)
        rest = rest[:, (rest != 0).any(2).any(0)]
        zero = self.v0.expand(rays, 1, d)
        return torch.cat([rest, zero], 1) if bool(self.v0.any()) else rest


@dataclass(frozen=True)
class Rows:
    """Probes for every ray, (R, k, d); rows of zeros in the frame stand for none."""

    Q: Tensor
    s: Tensor
    a: Tensor
    t: Tensor
    deltas: Tensor

    @classmethod
    def design(cls, frame: Tensor, rays: Rays) -> Rows:
        """Probes over the span of `frame` (R or 1, k, d)."""
        d = frame.shape[2]
        Q = starting_with(rays.g, frame)
        p, agreement = agreeing_direction(rays)
        mixed = (rays.slopes > 1).unsqueeze(1)
        size = _LOGIT * math.sqrt(d) / torch.linalg.vector_norm(rays.g, dim=1, keepdim=True)
        size = torch.where(mixed, size / 2, size)
        s = size.repeat(1, Q.shape[1])
        s[:, 0] *= 1.2 / math.sqrt(d)
        t = (Q @ p.unsqueeze(2)).squeeze(2)
        a = size / math.sqrt(d) - s * t.abs()
        if bool(mixed.any()):  # every value must have the same sign on every row
            unit = rays.V / torch.linalg.vector_norm(rays.V, dim=2, keepdim=True).clamp(min=1e-300)
            reach = (Q @ unit.mT).abs().amax(2)
            a = torch.where(mixed, s * (1.3 * reach / agreement.unsqueeze(1) + 0.05), a)
        a = torch.where(t < 0, -a, a)
        return cls(Q, s, a, t, torch.baddbmm(s.unsqueeze(2) * Q, a.unsqueeze(2), p.unsqueeze(1)))

    def part(self, rows: Tensor) -> Rows:
        """The probes of some of the rays."""
        if len(rows) == len(self.s):
            return self
        fields = (self.Q, self.s, self.a, self.t, self.deltas)
        return Rows(*(field[rows] for field in fields))

    def solve(self, z: Tensor) -> Tensor:
        """g (R, J, d) of every ray from its logits (J, R, k)."""
        y, a = z / self.s, self.a / self.s
        along = (y * self.t).sum(2, keepdim=True) / (1 + (self.t * a).sum(1)).unsqueeze(1)
        return (y - along * a).transpose(0, 1) @ self.Q


def starting_with(g: Tensor, frame: Tensor) -> Tensor:
    """The frame (R or 1, k, d) turned by a reflection so that its first row is along ±g (R, d)."""
    mirror = (frame @ g.unsqueeze(2)).squeeze(2)
    mirror = mirror / torch.linalg.vector_norm(mirror, dim=1, keepdim=True)
    mirror[:, 0] += torch.where(mirror[:, 0] < 0, -1.0, 1.0)
    square = (mirror * mirror).sum(1)[:, None, None]
    return frame - (2 / square * mirror.unsqueeze(2)) * (mirror.unsqueeze(1) @ frame)


def agreeing_direction(rays: Rays) -> tuple[Tensor, Tensor]:
    """A unit p (R, d) on which all values of a ray are positive, and the least of them.

    For one head it is v/|v|. Values that point apart allow none: then what counts is small z.
    """
    p = rays.v.clone()
    least = torch.ones(len(rays), dtype=torch.float64)
    for r in (rays.slopes > 1).nonzero().squeeze(1).tolist():
        V = rays.V[r, : int(rays.slopes[r])]
        unit = V / torch.linalg.vector_norm(V, dim=1, keepdim=True)
        p[r] = torch.linalg.pinv(unit, rtol=1e-6).sum(1)
        if float((unit @ p[r]).min()) < 0.1:
            p[r] = (rays.c[r, : len(V), None] * V).sum(0)
        least[r] = (unit @ p[r]).min() / torch.linalg.vector_norm(p[r])
    return p / torch.linalg.vector_norm(p, dim=1, keepdim=True), least.clamp(min=0.2)


def read_logits(
    behind: Behind,
    rays: Rays,
    x: Tensor,
    base: Tensor,
    rows: Tensor,
    owner: Tensor,
    tries: int = 6,
) -> Tensor:
    """`g(x_j)ᵀδ_p` (J, P) for rows δ_p of the rays `owner`; NaN where no gate explains the answer.

    `base` (J, R) are the answers at δ = 0. Wide logits are asked again with a quarter of δ, since
    gᵀδ is linear in it.
    """
    z = _logits(rays, rows, owner, behind.grid(x, rows, owner) - base[:, owner])
    j, p = (~(z.abs() <= _WIDEST)).nonzero().unbind(1)
    for turn in range(1, tries):
        if not len(j):
            return z
        part, whose = rows[p] / 4**turn, owner[p]
        now = _logits(rays, part, whose, behind.pairs(x[j], part, whose) - base[j, whose])
        z[j, p] = 4**turn * now
        wide = ~(now.abs() <= _WIDEST)
        j, p = j[wide], p[wide]
    z[j, p] = torch.nan
    return z


def _logits(rays: Rays, rows: Tensor, owner: Tensor, y: Tensor) -> Tensor:
    """Solve `y = Σ_k σ(c_k z)·V_kᵀδ` for z; y is (…, P)."""
    z = torch.logit(y / (rows * rays.v[owner]).sum(1))
    mixed = (rays.slopes > 1)[owner].nonzero().squeeze(1)
    if len(mixed):
        ray = owner[mixed]
        A = (rays.V[ray] @ rows[mixed].unsqueeze(2)).squeeze(2)
        expected = (rows[mixed] * rays.g[ray]).sum(1)
        z[..., mixed] = mixed_gate(rays.c[ray], A, y[..., mixed], expected)
    return z


def mixed_gate(c: Tensor, A: Tensor, y: Tensor, expected: Tensor) -> Tensor:
    """The z near what is expected with `Σ_k σ(c_k z)A_k = y`; NaN where Newton finds none.

    Values of both signs make the gate turn back, so there may be other solutions.
    """
    z = expected.expand_as(y)
    for _ in range(_NEWTON):
        gate = torch.sigmoid(c * z.unsqueeze(-1))
        slope = (c * gate * (1 - gate) * A).sum(-1)
        step = (y - (gate * A).sum(-1)) / torch.where(slope == 0, 1.0, slope)
        z = z + step.clamp(-0.5, 0.5)
    miss = ((torch.sigmoid(c * z.unsqueeze(-1)) * A).sum(-1) - y).abs()
    return torch.where(miss < 1e-10 * A.abs().sum(-1), z, torch.nan)
