"""Mask tokens: two extra tokens that take the attention of every head except one.

From the directions of all `g_h = W_h x` at one last token x (`Lines`) this makes two
tokens for each of them (`Masks`), next to which only one head's answer changes
(`IsolatedHeads`). A *line* l is the direction of some g_h, up to sign; far_field.py
finds lines, with g_l the normal of the plane where the head's gate is half open. A
*ray* is a line with a sign s, and usually has one head. The *near field* are probes δ
so short that no gate σ(gᵀδ) is 0 or 1.

In `[x+δ ; x+D1 ; x+D2 ; x]` a head gives x+D a weight proportional to `exp(gᵀD)`. For a
ray choose

    D1 = −sμ b + τ w,   D2 = −sμ' b − τ w,    w ⟂ g_l,  g_lᵀb = |g_l|,  τ|g_kᵀw| ≫ μ|g_kᵀb|, k ≠ l.

Up to e^{−margin}, which is below rounding,

- a head of another line gives all its attention to D1 or D2, whichever has gᵀD > 0, and none to δ;
- so does a head on the opposite ray, `W x = −s g_l`. If there may be one, μ' = 2μ: with μ' = μ it
  would divide its attention, and its answer would depend on both;
- a head with `W x = +s g_l` gives D1 and D2 no attention.

So only the near field of one head is left, whatever H, d and the values are:

    f([x+δ ; x+D1 ; x+D2 ; x]) − f([x ; x+D1 ; x+D2 ; x]) = σ(s g_lᵀδ)·vᵀδ + v_0ᵀδ/4

(v_0: the value of a head with W = 0). The normals are only needed to a few per cent. If
it costs little margin, D1 and D2 are orthogonal to the other heads' values: then the
masked heads add nothing to the answers, and no digits are lost to cancellation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from keyhole.core.float64 import Stream, identity, normal, ones, zeros
from keyhole.core.least_squares import Options, Point, minimize
from keyhole.extract.bilinear import batch_rows, lengths, matvec, normalized, scalar
from keyhole.extract.heads.far_field import Lines
from keyhole.oracle.protocol import Oracle, ask

MARGIN = 50.0  # e^{−50} is far below rounding
_SPARE = 2.0  # factor on margins, so that the masks also work at other tokens x nearby
_PULL = 4.0  # g_kᵀω of a probe that shows whether a mask leaks
_SIGNS = 256  # sign patterns that are tried for w
# random search for w if there are many lines
_STARTS = 512
_KEPT = 24
_ASCENT = 60


@dataclass(frozen=True)
class Masks:
    """The two offsets D1 and D2 of each ray.

    `margin` is the least |gᵀw| among the other lines, for unit vectors g and w: 1 is
    the best.
    """

    D: Tensor  # (R, 2, d)
    margin: Tensor  # (R,)


@dataclass(frozen=True)
class IsolatedHeads:
    """Queries one head at a time, with all others masked; `v0` is the value of W = 0."""

    oracle: Oracle
    D: Tensor
    v0: Tensor

    def grid(
        self,
        x: Tensor,
        rows: Tensor,
        owner: Tensor,
    ) -> Tensor:
        """Return `f([x_j + row_p ; x_j + D_owner ; x_j]) − v_0ᵀrow_p/4`, (J, P).

        `owner` (P,) is the ray of each row.
        """
        if not (len(x) and len(rows)):
            return x.new_empty(len(x), len(rows))
        size = batch_rows(4, x.shape[1])
        parts: list[Tensor] = []
        for some, ray in zip(rows.split(size), owner.split(size), strict=True):
            offsets = self._offsets(some, ray)
            tokens = x[:, None, None].split(max(1, size // len(some)))
            parts.append(torch.cat([self._answers(offsets + each) for each in tokens]))
        return torch.cat(parts, 1) - rows @ self.v0 / 4

    def pairs(
        self,
        x: Tensor,
        rows: Tensor,
        owner: Tensor,
    ) -> Tensor:
        """Return the same for pairs of x_b and row_b, (B,)."""
        size = batch_rows(4, x.shape[1])
        parts: list[Tensor] = []
        for start in range(0, len(rows), size):
            some = slice(start, start + size)
            offsets = self._offsets(rows[some], owner[some])
            parts.append(self._answers(offsets + x[some, None]))
        return torch.cat(parts) - rows @ self.v0 / 4

    def _offsets(self, rows: Tensor, owner: Tensor) -> Tensor:
        """Return [δ ; D1 ; D2 ; 0] for each row."""
        last = torch.zeros_like(rows)
        return torch.cat([rows[:, None], self.D[owner], last[:, None]], 1)

    def _answers(self, sequences: Tensor) -> Tensor:
        answers = scalar(ask(self.oracle, sequences.flatten(0, -3)))
        return answers.view(sequences.shape[:-2])

    def at_once(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return what each row (R, k, d) adds to the answer of its ray at one token x: (R, k)."""
        rays, k, d = rows.shape
        with_zero = torch.cat([zeros(rays, 1, d), rows], 1)
        owner = torch.arange(rays).repeat_interleave(k + 1)
        y = self.grid(x[None], with_zero.flatten(0, 1), owner).view(rays, k + 1)
        return y[:, 1:] - y[:, :1]


def mask_all(
    lines: Lines,
    reach: Tensor,
    stream: Stream,
) -> Tensor:
    """Return masks (D, −D) for every head with W x ≠ 0, valid for |g_kᵀδ| ≤ reach_k."""
    slowest = lengths(lines.g) * lines.slow
    mu = float((_SPARE * (MARGIN + reach) / slowest).max())
    unit = normalized(lines.g)
    w = _spread(unit[None], stream)[0]
    D = mu / float((unit @ w).abs().min()) * w
    return torch.stack([D, -D])


def mask_others(
    lines: Lines,
    line: Tensor,
    sign: Tensor,
    reach: Tensor,
    stream: Stream,
    values: Tensor | None = None,
) -> Masks:
    """Return masks that isolate the rays (line, sign), valid for |g_kᵀδ| ≤ reach[ray, k].

    `values` (R, n, d) are, for each ray, those of all other heads.
    """
    norm = lengths(lines.g)
    mu = (_SPARE * (MARGIN + reach) / (norm * lines.slow)).amax(1)
    shared = torch.bincount(line, minlength=len(norm))[line] > 1
    heavy = 1.0 + shared.double()  # μ'/μ
    G = lines.g.expand(len(line), -1, -1)
    best: Masks | None = None
    if values is not None and 0 < values.shape[1] < lines.g.shape[1] - 1:
        basis = torch.linalg.qr(values.mT).Q
        inside = G - (G @ basis) @ basis.mT
        best = _offsets(inside, norm, line, sign, mu, heavy, stream)
        remains = (lengths(inside) / norm).amin(1) > 0.1
        best = Masks(best.D, torch.where(remains, best.margin, 0.0))
        if (best.margin >= 0.7 / math.sqrt(len(norm))).all():
            return best  # near the best margin of independent lines
    free = _offsets(G, norm, line, sign, mu, heavy, stream)
    if best is None:
        return free
    # Where orthogonality costs too much margin, the others are not orthogonal.
    costly = best.margin < 0.4 * free.margin
    return Masks(
        torch.where(costly[:, None, None], free.D, best.D),
        torch.where(costly, free.margin, best.margin),
    )


def _offsets(
    G: Tensor,
    norm: Tensor,
    line: Tensor,
    sign: Tensor,
    mu: Tensor,
    heavy: Tensor,
    stream: Stream,
) -> Masks:
    """Return D1 and D2 of the module's formula, for normals G (R, L, d) with lengths `norm`."""
    rays, count, d = G.shape
    own = G[torch.arange(rays), line]
    own_size = lengths(own).clamp(min=1e-300)
    along = own / own_size[:, None]
    others = (G / norm[:, None])[_others(line, count)].view(rays, count - 1, d)
    outside = others - (others @ along[..., None]) * along[:, None]
    w = _spread(outside, stream, along)
    b = along * (norm[line] / own_size)[:, None]  # g_lᵀb = |g_l|
    tau = torch.zeros_like(mu)
    if count > 1:
        margin = matvec(others, w).abs().clamp(min=1e-300)
        lean = matvec(others, b).abs()
        tau = (mu[:, None] * (1 + heavy[:, None] * lean) / margin).amax(1)
    back = (sign * mu)[:, None] * b
    side = tau[:, None] * w
    D = torch.stack([side - back, -side - heavy[:, None] * back], 1)
    return Masks(D, mu / lengths(D).amax(1))


def _spread(
    P: Tensor,
    stream: Stream,
    avoid: Tensor | None = None,
) -> Tensor:
    """Return a unit w (R, d) in the span of the rows P (R, k, d) that makes min_k |P_kᵀw| large.

    If rows are independent, it solves `P w = signs`, with |w|² = signsᵀ(PPᵀ)⁻¹signs,
    for the best of many sign patterns. Otherwise (more lines than dimensions) it
    ascends from random starts.
    """
    rays, k, d = P.shape
    if k == 0:
        w = normal(stream, rays, d)
        if avoid is not None:
            w = w - (w * avoid).sum(1, keepdim=True) * avoid
        return normalized(w)
    poor = torch.ones(rays, dtype=torch.bool)
    w = zeros(rays, d)
    if k < d:
        inverse, _ = torch.linalg.inv_ex(P @ P.mT)
        signs = normal(stream, _SIGNS, k).sign()
        square = ((signs @ inverse) * signs).sum(2)
        square = torch.where(square > 0, square, torch.inf)
        least, best = square.min(1)
        w = (signs[best][:, None] @ inverse @ P)[:, 0]
        sound = inverse.diagonal(dim1=1, dim2=2).amax(1) < 1e6
        poor = ~(sound & (least < 4 * k))
    if poor.any():
        w[poor] = _ascend(P[poor], stream)
    return normalized(w)


def _ascend(P: Tensor, stream: Stream) -> Tensor:
    """Maximise min_k |P_kᵀw| over unit w, by ascent on a soft minimum from random starts."""
    rays, k, d = P.shape
    signs = normal(stream, _STARTS, k)
    inverse = torch.linalg.pinv(P, rtol=1e-3)
    w = normalized(torch.cat([signs @ P, signs.sign() @ inverse.mT], 1))
    top = (w @ P.mT).abs().amin(2).topk(_KEPT, dim=1).indices
    w = w.gather(1, top[..., None].expand(-1, -1, d))
    best = w[:, 0].clone()
    reached = zeros(rays)
    for turn in range(_ASCENT):
        shadow = w @ P.mT
        size = shadow.abs()
        margin, rows = size.amin(2).max(1)
        better = margin > reached
        best[better] = w[better, rows[better]]
        reached = torch.maximum(reached, margin)
        soft = torch.softmax(-4 * size / (0.05 + size.amin(2, keepdim=True)), 2)
        w = w + 0.3 * 0.95**turn * (soft * shadow.sign()) @ P
        w = normalized(w)
    return best


def leak_probes(
    lines: Lines,
    line: Tensor,
    g: Tensor,
    V: Tensor,
    stream: Stream,
) -> Tensor:
    """Return probes ω (R, k, d) that change the answer only if another head leaks through a mask.

    So vᵀω = 0 for the ray's values, and gᵀω = 0 too if dimensions are left. In many
    dimensions one ω has g_kᵀω = `_PULL` for every other head at once: its answer equals
    the one at δ = 0 only if the mask holds, and is also the baseline (k = 1). Otherwise
    heads may pull in opposite directions, and the answers to 0, ω and −ω are compared
    (k = 3). If the ray's values span all of space, there is no such ω: only 0 is sent,
    and the test of the whole model must be enough.
    """
    rays, slots, d = V.shape
    if slots >= d:
        return zeros(rays, 1, d)
    own = torch.cat([V, g[:, None]], 1) if slots + 1 < d else V
    own = torch.linalg.qr(own.mT).Q
    if slots == 1 and rays + 1 < d // 2 and len(line.unique()) == rays:
        inside = g - (g @ own) @ own.mT  # (R, R, d)
        unit = identity(rays)
        # A ray's own row is 0 after the projection: the ridge keeps the system
        # solvable.
        ridge = 1e-12 * float((g * g).sum(1).max()) * unit
        weights = torch.linalg.solve(inside @ inside.mT + ridge, _PULL * (1 - unit))
        return weights[:, None] @ inside
    count = len(lines.g)
    is_other = _others(line, count)
    units = normalized(lines.g).expand(rays, -1, -1)
    others = units[is_other].view(rays, count - 1, d)
    w = _spread(others - (others @ own) @ own.mT, stream)
    pulls = (w @ lines.g.mT).abs().masked_fill(~is_other, torch.inf)
    w = _PULL / pulls.amin(1, keepdim=True).clamp(min=1e-300) * w
    return torch.stack([0 * w, w, -w], 1)


def _others(line: Tensor, count: int) -> Tensor:
    """Return which lines are not the ray's own: (R, L)."""
    return torch.arange(count) != line[:, None]


# The near field of a head that masks have isolated: `y = σ(gᵀδ)·vᵀδ`, so `gᵀδ = logit(y
# / vᵀδ)`.
#
# This is Theorem 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873),
# for one head of many. Usually a ray has one head. Heads with proportional W share a
# ray (rays.py): then `y = Σ_k σ(c_k gᵀδ)·V_kᵀδ` is solved for `gᵀδ`.
#
# The probes are `δ_i = s_i q_i + a_i p` over orthonormal rows q, with p along v and a_i
# such that all vᵀδ_i have the same size; q_0 is along the expected g and s_0 small,
# since gᵀq_0 is large. The rows may span all of space or only the columns of a W of low
# rank. Such a system, diagonal plus rank one, is solved in closed form
# (Sherman–Morrison): with t = Qp and y = Qg,
#
#     z = Sy + a(tᵀy)    so    y = S⁻¹z − S⁻¹a (tᵀS⁻¹z) / (1 + tᵀS⁻¹a).

_LOGIT = 0.6  # the size of gᵀδ for which probes are designed
_MAX_LOGIT = 4.0  # a larger one is measured again with a quarter of δ
_BY_SLOPES = Options(max_steps=50, target=1e-31)


@dataclass(frozen=True)
class Rays:
    """The heads at x_0, by ray: head k on a ray has slope c_k, `W x_0 = c_k g`, and value V_k.

    Unused places have V_k = 0. `v` is ΣV_k, and `v0` the value of heads with W = 0.
    """

    x: Tensor
    line: Tensor  # (R,)
    sign: Tensor  # (R,)
    g: Tensor  # (R, d)
    v: Tensor  # (R, d)
    v0: Tensor  # (d,)
    c: Tensor  # (R, K)
    V: Tensor  # (R, K, d)
    frame: Tensor  # (d, d): random orthonormal rows, over which probes are designed

    def __len__(self) -> int:
        return len(self.line)

    @cached_property
    def slopes(self) -> Tensor:
        """The number of heads on each ray."""
        return (self.V != 0).any(2).sum(1)

    def part(self, rows: Tensor) -> Rays:
        names = ("line", "sign", "g", "v", "c", "V")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def other_values(self) -> Tensor:
        """Return the values of all other heads for every ray, (R, n, d)."""
        rays, _, d = self.V.shape
        own = torch.eye(rays, dtype=torch.bool)
        others = self.V.expand(rays, -1, -1, -1)[~own].view(rays, -1, d)
        others = others[:, (others != 0).any(2).any(0)]
        if not self.v0.any():
            return others
        return torch.cat([others, self.v0.expand(rays, 1, d)], 1)


@dataclass(frozen=True)
class Rows:
    """Probes for every ray, (R, k, d); a row of zeros in the frame gives no probe of its own."""

    Q: Tensor
    s: Tensor
    a: Tensor
    t: Tensor
    deltas: Tensor

    @classmethod
    def design(cls, frame: Tensor, rays: Rays) -> Rows:
        """Design probes over the span of `frame` (R or 1, k, d)."""
        d = frame.shape[2]
        Q = starting_with(rays.g, frame)
        p, agreement = agreeing_direction(rays)
        mixed = (rays.slopes > 1)[:, None]
        size = _LOGIT * math.sqrt(d) / lengths(rays.g)[:, None]
        size = torch.where(mixed, size / 2, size)
        s = size.repeat(1, Q.shape[1])
        s[:, 0] *= 1.2 / math.sqrt(d)
        t = matvec(Q, p)
        a = size / math.sqrt(d) - s * t.abs()
        if mixed.any():  # every value must have the same sign on every row
            reach = (Q @ normalized(rays.V).mT).abs().amax(2)
            a = torch.where(mixed, s * (1.3 * reach / agreement[:, None] + 0.05), a)
        a = torch.where(t < 0, -a, a)
        deltas = torch.baddbmm(s[..., None] * Q, a[..., None], p[:, None])
        return cls(Q, s, a, t, deltas)

    def part(self, rows: Tensor) -> Rows:
        return Rows(*(getattr(self, each.name)[rows] for each in fields(self)))

    def solve(self, z: Tensor) -> Tensor:
        """Return g (R, J, d) of every ray from its logits (J, R, k)."""
        y = z / self.s
        a = self.a / self.s
        along = (y * self.t).sum(2, keepdim=True)
        along = along / (1 + (self.t * a).sum(1))[:, None]
        return (y - along * a).transpose(0, 1) @ self.Q


def starting_with(g: Tensor, frame: Tensor) -> Tensor:
    """Return the frame (R or 1, k, d) reflected so that its first row is along ±g (R, d)."""
    mirror = normalized(matvec(frame, g))
    mirror[:, 0] += torch.where(mirror[:, 0] < 0, -1.0, 1.0)
    square = (mirror * mirror).sum(1)[:, None, None]
    return frame - (2 / square * mirror[..., None]) * (mirror[:, None] @ frame)


def agreeing_direction(rays: Rays) -> tuple[Tensor, Tensor]:
    """Return a unit p (R, d) such that pᵀV_k > 0 for all values of a ray, and the least cosine.

    For one head it is v/|v|. If values point apart, there is no such p; then p is along
    Σ c_k V_k, where answers change most with small z.
    """
    p = rays.v.clone()
    least = ones(len(rays))
    for r in (rays.slopes > 1).nonzero()[:, 0].tolist():
        V = rays.V[r, : int(rays.slopes[r])]
        unit = normalized(V)
        p[r] = torch.linalg.pinv(unit, rtol=1e-6).sum(1)
        if (unit @ p[r]).min() < 0.1:
            p[r] = (rays.c[r, : len(V), None] * V).sum(0)
        least[r] = (unit @ p[r]).min() / lengths(p[r])
    return normalized(p), least.clamp(min=0.2)


def read_logits(
    isolated: IsolatedHeads,
    rays: Rays,
    x: Tensor,
    base: Tensor,
    rows: Tensor,
    owner: Tensor,
    tries: int = 6,
) -> Tensor:
    """Return `g(x_j)ᵀδ_p` (J, P) for rows δ_p of the rays `owner`; NaN if no gate fits the answer.

    `base` (J, R) are the answers at δ = 0. Large logits are measured again with a
    quarter of δ, since gᵀδ is linear in δ.
    """
    answers = isolated.grid(x, rows, owner) - base[:, owner]
    z = _logits(rays, rows, owner, answers)
    j, p = (~(z.abs() <= _MAX_LOGIT)).nonzero().unbind(1)
    for turn in range(1, tries):
        if not len(j):
            return z
        shorter = rows[p] / 4**turn
        ray = owner[p]
        answers = isolated.pairs(x[j], shorter, ray) - base[j, ray]
        again = _logits(rays, shorter, ray, answers)
        z[j, p] = 4**turn * again
        large = ~(again.abs() <= _MAX_LOGIT)
        j = j[large]
        p = p[large]
    z[j, p] = torch.nan
    return z


def _logits(
    rays: Rays,
    rows: Tensor,
    owner: Tensor,
    y: Tensor,
) -> Tensor:
    """Solve `y = Σ_k σ(c_k z)·V_kᵀδ` for z; y is (…, P)."""
    z = torch.logit(y / (rows * rays.v[owner]).sum(1))
    mixed = (rays.slopes > 1)[owner].nonzero()[:, 0]
    if len(mixed):
        ray = owner[mixed]
        deltas = rows[mixed]
        expected = (deltas * rays.g[ray]).sum(1)
        A = matvec(rays.V[ray], deltas)
        z[..., mixed] = mixed_gate(rays.c[ray], A, y[..., mixed], expected)
    return z


def mixed_gate(
    c: Tensor,
    A: Tensor,
    y: Tensor,
    expected: Tensor,
) -> Tensor:
    """Solve `Σ_k σ(c_k z)A_k = y` for z near `expected`; NaN where no z is found.

    If A_k has both signs, the sum is not monotonic in z, so there may be other
    solutions.
    """
    size = A.abs().sum(-1, keepdim=True).clamp(min=1e-300)
    slopes = c.expand(*y.shape, -1).flatten(0, -2)
    shares = (A / size).expand(*y.shape, -1).flatten(0, -2)
    wanted = (y / size[..., 0]).reshape(-1, 1)

    def linearize(z: Tensor, rows: Tensor) -> Point:
        own = slopes[rows]
        gate = torch.sigmoid(own * z)
        residual = (gate * shares[rows]).sum(1, keepdim=True) - wanted[rows]
        slope = (own * gate * (1 - gate) * shares[rows]).sum(1)
        return Point(z, residual, lambda: slope[:, None, None])

    z, loss = minimize(linearize, expected.expand_as(y).reshape(-1, 1), _BY_SLOPES)
    return torch.where(loss < 1e-20, z[:, 0], torch.nan).view(y.shape)
