"""Mask tokens: two extra tokens that take the attention of every head except one.

In `[x+δ ; x+D1 ; x+D2 ; x]` a head with `g = W x` gives x+D a weight proportional to `exp(gᵀD)`.
For the ray (line l, sign s) choose

    D1 = −sμ b + τ w,   D2 = −sμ' b − τ w,    w ⟂ g_l,  g_lᵀb = |g_l|,  τ|g_kᵀw| ≫ μ|g_kᵀb|, k ≠ l.

Up to e^{−margin}, which is below rounding,

- a head of another line sits on D1 or D2, whichever has gᵀD > 0: it does not see δ;
- a head on the opposite ray, `W x = −s g_l`, sits on them too (μ' = 2μ breaks the tie);
- a head with `W x = +s g_l` sees neither.

So the near field of one head is left, whatever H, d and the values are:

    f([x+δ ; x+D1 ; x+D2 ; x]) − f([x ; x+D1 ; x+D2 ; x]) = σ(s g_lᵀδ)·vᵀδ + v_0ᵀδ/4

(v_0: the value of a head with W = 0). The normals are needed to a few per cent only. Where it costs
little margin the D are taken orthogonal to the other heads' values: then the masked heads add
nothing to the answers, and no digits are lost to cancellation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.extract.bilinear import batch_rows, scalar
from keyhole.extract.heads.crossings import Lines
from keyhole.oracle.protocol import Oracle, ask

MARGIN = 50.0  # e^{−50} is far below rounding
_SPARE = 2.0  # margins are built this much too large, so that x may move
_PULL = 4.0  # g_kᵀω of a probe that shows leaks
_SIGNS = 256  # sign patterns that are tried for w
_STARTS, _KEPT, _ASCENT = 512, 24, 60  # random search for w where lines are crowded


@dataclass(frozen=True)
class Masks:
    """The two offsets of each ray, and their margin per unit of length (of a normal's length)."""

    D: Tensor  # (R, 2, d)
    margin: Tensor  # (R,)


@dataclass(frozen=True)
class Behind:
    """Asks about single heads, with all others behind masks. `v0` is the value of W = 0."""

    oracle: Oracle
    D: Tensor
    v0: Tensor

    def grid(self, x: Tensor, rows: Tensor, owner: Tensor) -> Tensor:
        """`f([x_j + row_p ; x_j + D_owner ; x_j]) − v_0ᵀrow_p/4`, (J, P), for all x and all rows.

        `owner` (P,) says to which ray a row belongs.
        """
        if not len(rows):
            return x.new_empty(len(x), 0)
        size = batch_rows(4, x.shape[1])
        parts: list[Tensor] = []
        for p in range(0, len(rows), size):
            offsets = self._offsets(rows[p : p + size], owner[p : p + size])
            blocks = x[:, None, None].split(max(1, size // len(offsets)))
            parts.append(torch.cat([self._put(offsets, block) for block in blocks]))
        return torch.cat(parts, 1) - rows @ self.v0 / 4

    def pairs(self, x: Tensor, rows: Tensor, owner: Tensor) -> Tensor:
        """The same for x_b and row_b, (B,)."""
        size = batch_rows(4, x.shape[1])
        parts: list[Tensor] = []
        for b in range(0, len(rows), size):
            offsets = self._offsets(rows[b : b + size], owner[b : b + size])
            parts.append(self._put(offsets, x[b : b + size, None]))
        return torch.cat(parts) - rows @ self.v0 / 4

    def _offsets(self, rows: Tensor, owner: Tensor) -> Tensor:
        """[δ ; D1 ; D2 ; 0] for each row."""
        offsets = rows.new_zeros(len(rows), 4, rows.shape[1])
        offsets[:, 0] = rows
        offsets[:, 1:3] = self.D.index_select(0, owner)
        return offsets

    def _put(self, offsets: Tensor, x: Tensor) -> Tensor:
        shape = torch.Size((*x.shape[:-3], *offsets.shape))
        tokens = torch.add(offsets, x, out=offsets.new_empty(shape))  # contiguous, in one pass
        return scalar(ask(self.oracle, tokens.view(-1, *shape[-2:]))).view(shape[:-2])

    def at_once(self, x: Tensor, rows: Tensor) -> Tensor:
        """What the rows (R, k, d) of every ray R add to its answer at the one token x: (R, k)."""
        rays, k, d = rows.shape
        zero = torch.zeros(rays, 1, d, dtype=rows.dtype)
        flat = torch.cat([zero, rows], 1).reshape(-1, d)
        owner = torch.arange(rays).repeat_interleave(k + 1)
        y = self.grid(x.unsqueeze(0), flat, owner).view(rays, k + 1)
        return y[:, 1:] - y[:, :1]


def mask_all(lines: Lines, reach: Tensor, stream: torch.Generator) -> Tensor:
    """(D, −D), which take every head with W x ≠ 0 while |g_kᵀδ| ≤ reach_k."""
    norm = _norm(lines.g)
    mu = float((_SPARE * (MARGIN + reach) / (norm * lines.slow)).max())
    unit = lines.g / norm.unsqueeze(1)
    w = _spread(unit.unsqueeze(0), stream)[0]
    D = mu / float((unit @ w).abs().min()) * w
    return torch.stack([D, -D])


def mask_others(
    lines: Lines,
    line: Tensor,
    sign: Tensor,
    reach: Tensor,
    stream: torch.Generator,
    values: Tensor | None = None,
) -> Masks:
    """Masks for the rays (line, sign), while |g_kᵀδ| ≤ reach[ray, k].

    `values` (R, n, d) are those of the other heads of each ray.
    """
    norm = _norm(lines.g)
    mu = (_SPARE * (MARGIN + reach) / (norm * lines.slow)).amax(1)
    shared = torch.bincount(line, minlength=len(norm))[line] > 1
    heavy = torch.where(shared, 2.0, 1.0).double()
    G = lines.g.expand(len(line), -1, -1)
    best: Masks | None = None
    if values is not None and 0 < values.shape[1] < lines.g.shape[1] - 1:
        basis = torch.linalg.qr(values.mT).Q
        inside = G - (G @ basis) @ basis.mT
        best = _offsets(inside, norm, line, sign, mu, heavy, stream)
        kept = (_norm(inside) / norm).amin(1) > 0.1
        best = Masks(best.D, torch.where(kept, best.margin, 0.0))
        if bool((best.margin >= 0.7 / math.sqrt(len(norm))).all()):
            return best  # about what independent lines allow
    free = _offsets(G, norm, line, sign, mu, heavy, stream)
    if best is None:
        return free
    better = best.margin < 0.4 * free.margin
    return Masks(
        torch.where(better[:, None, None], free.D, best.D),
        torch.where(better, free.margin, best.margin),
    )


def _offsets(
    G: Tensor,
    norm: Tensor,
    line: Tensor,
    sign: Tensor,
    mu: Tensor,
    heavy: Tensor,
    stream: torch.Generator,
) -> Masks:
    """D1 and D2 of the module's formula, for normals G (R, L, d) with reference lengths `norm`."""
    rays, count, d = G.shape
    own = G[torch.arange(rays), line]
    others = _others(line, count)
    unit = G / norm.unsqueeze(1)
    rest = unit[others].view(rays, count - 1, d)
    along = own / _norm(own).clamp(min=1e-300).unsqueeze(1)
    w = _spread(rest - (rest @ along.unsqueeze(2)) * along.unsqueeze(1), stream, along)
    b = _lift(G, own, line) * norm[line].unsqueeze(1)
    tau = torch.zeros_like(mu)
    if count > 1:
        margin = (rest @ w.unsqueeze(2)).squeeze(2).abs().clamp(min=1e-300)
        lean = (rest @ b.unsqueeze(2)).squeeze(2).abs()
        tau = (mu.unsqueeze(1) * (1 + heavy.unsqueeze(1) * lean) / margin).amax(1)
    back, side = (sign * mu).unsqueeze(1) * b, tau.unsqueeze(1) * w
    D = torch.stack([side - back, -side - heavy.unsqueeze(1) * back], 1)
    return Masks(D, mu / _norm(D).amax(1))


def _lift(G: Tensor, own: Tensor, line: Tensor) -> Tensor:
    """b with g_lᵀb = 1: orthogonal to the other lines where that is cheap, else along g_l."""
    plain = own / (own * own).sum(1, keepdim=True).clamp(min=1e-300)
    if G.shape[1] > G.shape[2]:
        return plain
    inverse, _ = torch.linalg.inv_ex(G @ G.mT)
    dual = (inverse[torch.arange(len(line)), line].unsqueeze(1) @ G).squeeze(1)
    exact = ((dual * own).sum(1) - 1).abs() < 1e-6
    good = (_norm(dual) < 3 * _norm(plain)) & exact
    return torch.where(good.unsqueeze(1), dual, plain)


def _spread(P: Tensor, stream: torch.Generator, avoid: Tensor | None = None) -> Tensor:
    """A unit w (R, d) in the span of the rows P (R, k, d) that makes min_k |P_kᵀw| large.

    Independent rows: `P w = signs` with |w|² = signsᵀ(PPᵀ)⁻¹signs, for the best of many patterns.
    Otherwise, more lines than dimensions: ascent from random starts.
    """
    rays, k, d = P.shape
    if k == 0:
        w = torch.randn(rays, d, generator=stream, dtype=torch.float64)
        w = w if avoid is None else w - (w * avoid).sum(1, keepdim=True) * avoid
        return w / _norm(w).unsqueeze(1)
    poor = torch.ones(rays, dtype=torch.bool)
    w = torch.zeros(rays, d, dtype=torch.float64)
    if k < d:
        inverse, _ = torch.linalg.inv_ex(P @ P.mT)
        signs = torch.randn(_SIGNS, k, generator=stream, dtype=torch.float64).sign()
        square = ((signs @ inverse) * signs).sum(2)
        square = torch.where(square > 0, square, torch.inf)
        least, best = square.min(1)
        w = (signs[best].unsqueeze(1) @ inverse @ P).squeeze(1)
        sound = inverse.diagonal(dim1=1, dim2=2).amax(1) < 1e6
        poor = ~(sound & (least < 4 * k))
    if bool(poor.any()):
        w[poor] = _ascend(P[poor], stream)
    return w / _norm(w).unsqueeze(1)


def _ascend(P: Tensor, stream: torch.Generator) -> Tensor:
    """Maximise min_k |P_kᵀw| over unit w: ascent on a soft minimum from random starts."""
    rays, k, _ = P.shape
    signs = torch.randn(_STARTS, k, generator=stream, dtype=torch.float64)
    starts = torch.cat([signs @ P, signs.sign() @ torch.linalg.pinv(P, rtol=1e-3).mT], 1)
    w = starts / _norm(starts).clamp(min=1e-300).unsqueeze(2)
    top = (w @ P.mT).abs().amin(2).topk(_KEPT, dim=1).indices
    w = w.gather(1, top.unsqueeze(2).expand(-1, -1, w.shape[2]))
    best, reached = w[:, 0].clone(), torch.zeros(rays, dtype=torch.float64)
    for turn in range(_ASCENT):
        shadow = w @ P.mT
        size = shadow.abs()
        margin, rows = size.amin(2).max(1)
        better = margin > reached
        best[better] = w[better, rows[better]]
        reached = torch.maximum(reached, margin)
        soft = torch.softmax(-4 * size / (0.05 + size.amin(2, keepdim=True)), 2)
        w = w + 0.3 * 0.95**turn * (soft * shadow.sign()) @ P
        w = w / _norm(w).unsqueeze(2)
    return best


def pull(lines: Lines, line: Tensor, g: Tensor, V: Tensor, stream: torch.Generator) -> Tensor:
    """Probes (R, k, d) that pull at every other head and do nothing at their own ray.

    Own values are 0, and own gᵀω where that leaves a direction: in two dimensions none is at right
    angles to v and g. Where there is room g_kᵀω has one sign for all k, and one answer
    proves a mask and is its baseline (k = 1). Where there is not, as with opposite heads, or own
    values are not exactly known, the baseline is an answer of its own: 0, ω and −ω (k = 3). Where
    own values leave no direction at all only the baseline is left, 0, and what a mask lets through
    shows in the test of the whole model.
    """
    rays, slots, d = V.shape
    if slots >= d:
        return torch.zeros(rays, 1, d, dtype=torch.float64)
    own = torch.cat([V, g.unsqueeze(1)], 1) if slots + 1 < d else V
    own = torch.linalg.qr(own.mT).Q
    if slots == 1 and rays + 1 < d // 2 and len(line.unique()) == rays:
        inside = g - (g @ own) @ own.mT  # (R, R, d)
        wanted = _PULL * (1 - torch.eye(rays, dtype=torch.float64))
        # Nothing is left of the ray itself: the ridge makes up for it.
        ridge = 1e-12 * float((g * g).sum(1).max()) * torch.eye(rays, dtype=torch.float64)
        weights = torch.linalg.solve(inside @ inside.mT + ridge, wanted)
        return weights.unsqueeze(1) @ inside
    others = _others(line, len(lines.g))
    unit = (lines.g / _norm(lines.g).unsqueeze(1)).expand(rays, -1, -1)
    rest = unit[others].view(rays, len(lines.g) - 1, d)
    w = _spread(rest - (rest @ own) @ own.mT, stream)
    pulls = (w @ lines.g.mT).abs().masked_fill(~others, torch.inf).amin(1, keepdim=True)
    w = _PULL / pulls.clamp(min=1e-300) * w
    return torch.stack([0 * w, w, -w], 1)


def _others(line: Tensor, count: int) -> Tensor:
    """For each ray all lines but its own: a mask (R, L)."""
    return torch.ones(len(line), count, dtype=torch.bool).scatter(1, line.unsqueeze(1), False)


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1)
