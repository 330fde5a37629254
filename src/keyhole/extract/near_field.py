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

import torch
from torch import Tensor

from keyhole.extract.masks import Behind

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

    def __len__(self) -> int:
        return len(self.line)

    @property
    def slopes(self) -> Tensor:
        """How many heads there are on each ray."""
        return (self.V != 0).any(2).sum(1)

    def part(self, which: Tensor) -> Rays:
        """Some of the rays."""
        names = ("line", "sign", "g", "v", "c", "V")
        return replace(self, **{name: getattr(self, name)[which] for name in names})

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
    p: Tensor
    s: Tensor
    a: Tensor
    t: Tensor

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
        return cls(Q, p, s, torch.where(t < 0, -a, a), t)

    @property
    def deltas(self) -> Tensor:
        return torch.baddbmm(self.s.unsqueeze(2) * self.Q, self.a.unsqueeze(2), self.p.unsqueeze(1))

    def solve(self, z: Tensor, which: Tensor) -> Tensor:
        """g (J, w, d) from the logits (J, w, k) of the rays `which`."""
        s, a, t = self.s[which], self.a[which], self.t[which]
        y, a = z / s, a / s
        along = (y * t).sum(2, keepdim=True) / (1 + (t * a).sum(1)).unsqueeze(1)
        return torch.einsum("jrk,rkd->jrd", y - along * a, self.Q[which])


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


@dataclass(frozen=True)
class Questions:
    """Which rows (P, d) of which rays are put to which asking tokens (J, d)."""

    x: Tensor
    base: Tensor  # (J, R): the answers at δ = 0
    rows: Tensor
    owner: Tensor  # (P,)
    at: Tensor  # (B,) into x
    which: Tensor  # (B,) into rows


def read_logits(behind: Behind, rays: Rays, asked: Questions, tries: int = 6) -> Tensor:
    """`gᵀδ` for each question; NaN where no gate explains the answer.

    Wide logits are asked again with a quarter of δ: gᵀδ is linear in it.
    """
    z = torch.full((len(asked.at),), torch.nan, dtype=torch.float64)
    todo = torch.arange(len(z))
    for turn in range(tries):
        now = _read_once(behind, rays, asked)
        z[todo] = 4.0**turn * now
        wide = (~(now.abs() <= _WIDEST)).nonzero().squeeze(1)
        todo = todo[wide]
        if not len(wide):
            return z
        asked = _quartered(asked, wide)
    z[todo] = torch.nan
    return z


def _read_once(behind: Behind, rays: Rays, asked: Questions) -> Tensor:
    y = behind.ask(asked.x, asked.at, asked.rows, asked.which, asked.owner)
    owner = asked.owner[asked.which]
    y = y - asked.base[asked.at, owner]
    signal = (asked.rows * rays.v[asked.owner]).sum(1)
    z = torch.logit(y / signal[asked.which])
    index = (rays.slopes > 1)[owner].nonzero().squeeze(1)
    if len(index):
        r, row = owner[index], asked.which[index]
        A = (rays.V[r] @ asked.rows[row].unsqueeze(2)).squeeze(2)
        z[index] = mixed_gate(rays.c[r], A, y[index])
    return z


def _quartered(asked: Questions, which: Tensor) -> Questions:
    """Some of the questions again, each with its own row, a quarter as long."""
    row = asked.which[which]
    return replace(
        asked,
        rows=asked.rows[row] / 4,
        owner=asked.owner[row],
        at=asked.at[which],
        which=torch.arange(len(row)),
    )


def mixed_gate(c: Tensor, A: Tensor, y: Tensor) -> Tensor:
    """The z nearest 0 with `Σ_k σ(c_k z)A_k = y`, row by row; NaN where Newton finds none."""
    z = torch.zeros_like(y)
    for _ in range(_NEWTON):
        gate = torch.sigmoid(c * z.unsqueeze(1))
        slope = (c * gate * (1 - gate) * A).sum(1)
        step = (y - (gate * A).sum(1)) / torch.where(slope == 0, 1.0, slope)
        z = z + step.clamp(-0.5, 0.5)
    miss = ((torch.sigmoid(c * z.unsqueeze(1)) * A).sum(1) - y).abs()
    return torch.where(miss < 1e-10 * A.abs().sum(1), z, torch.nan)
