"""W of every ray on all of space, full rank or low, from isolated gates.

Asking tokens `x_j = x_0 + η_j u_j`, with u_j orthonormal and orthogonal to x_0: the masks built at
x_0 still hold there, since their margins are relative to |D|. So

    W x_0 = g_0,    W u_j = (g(x_j) − g_0) / η_j.

One answer per (x_j, ray) proves the masks and is the baseline of the others: its probe ω pulls at
every other head (`g_kᵀω` about 4), so that a leak shows, and has no value for its own, so that a
sound mask leaves nothing of it. (Where lines crowd or share a ray it takes three.) η_j is halved
where a mask leaks. The baseline is measured rather than predicted because the oracle's rounding of
`v_kᵀ(x+D)` is then the same as in the answers that it is subtracted from.

Low rank (Theorem 5.1 of arXiv 2601.16873, adaptively). Columns are measured on all d rows, a few
more at a time, until some bring nothing new. Then the singular vectors of all of them
span the columns of W, and every further one needs r answers instead of d:
about `rd + (d − r)r` in all, and d − r more for each column that was measured in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.extract.heads.crossings import Lines
from keyhole.extract.heads.far_field import Unlucky
from keyhole.extract.heads.masks import Behind, mask_others, pull
from keyhole.extract.heads.near_field import Rays, Rows, read_logits, starting_with
from keyhole.extract.low_rank import unknowns
from keyhole.oracle.protocol import Oracle

_EPSILON = torch.finfo(torch.float64).eps
_HALVINGS = 14
_REACH = 6.0  # the largest gᵀδ of probes
_NOISE = 256.0  # a column this many times above rounding is something new


@dataclass(frozen=True)
class Tokens:
    """The asking tokens and the answers at δ = 0."""

    B: Tensor  # (d, d): x_0's direction, then the u_j
    eta: Tensor  # (d,): |x_0|, then the η_j
    x: Tensor  # (d, d): x_0, then the x_j
    base: Tensor  # (d, R)


class Columns:
    """Measures the columns `W u_j` of every ray, a wave at a time."""

    def __init__(
        self,
        oracle: Oracle,
        lines: Lines,
        rays: Rays,
        v: Tensor,
        stream: torch.Generator,
        caution: float = 1.0,
    ) -> None:
        reach = _REACH * _norm(lines.g) / _norm(rays.g).unsqueeze(1)
        masks = mask_others(lines, rays.line, rays.sign, reach, stream, rays.other_values())
        self._behind = Behind(oracle, masks.D, rays.v0)
        self._rays = rays
        d = len(v)
        step = min(0.5, 0.4 * float(masks.margin.min()) * d**0.5 / 3.5) / caution
        self._tokens = asking_tokens(self._behind, lines, rays, v, step, stream)
        self._rows = Rows.design(rays.frame.unsqueeze(0), rays)
        self._measured = torch.zeros(len(rays), d, d, dtype=torch.float64)  # g_0, then g_j − g_0
        self._measured[:, 0] = rays.g
        self._basis = torch.zeros_like(self._measured)
        self._basis[:, 0] = rays.g / _norm(rays.g).unsqueeze(1)
        signal = (self._rows.deltas[:, 0] * rays.v).sum(1).abs()
        values = float(_norm(rays.V).max())
        noise = _EPSILON * values * (_norm(masks.D).amax(1) + _norm(rays.x)) / signal
        self._resolution = _NOISE * noise * _norm(rays.g)
        self._growing = torch.ones(len(rays), dtype=torch.bool)
        self._stop = torch.full((len(rays),), d)  # columns measured on all rows
        self.rank = torch.full((len(rays),), d)
        self.done = 1
        self.complete = False

    @property
    def matrices(self) -> Tensor:
        """W (R, d, d) of each ray's first slope, zero where it was never measured."""
        return (self._measured / self._tokens.eta.unsqueeze(1)).mT @ self._tokens.B

    @property
    def floor(self) -> int:
        """Degrees of freedom of all heads, as far as their ranks are known."""
        d = len(self._rays.x)
        return sum(unknowns(d, int(r)) for r in self.rank)

    @property
    def known(self) -> int:
        """How many of them are measured.

        Of a W of rank r, m columns are r numbers each once their span, r(d − r) more, is known.
        """
        d = len(self._rays.x)
        if self.complete:
            return self.floor
        full = torch.minimum(self._stop, torch.tensor(self.done)).tolist()
        return sum(
            d + min(d * m, r * (d - r + m)) for m, r in zip(full, self.rank.tolist(), strict=True)
        )

    def grow(self) -> None:
        """One more wave; or the rest, once every rank is known."""
        d = len(self._rays.x)
        live = self._growing.nonzero().squeeze(1)
        if not len(live) or self.done == d:
            self._finish()
            return
        m = self.done
        stop = min(d, m + max(1, min(m // 2, 4), m // 4))
        rows = self._rows.part(live)
        z = self._read(rows.deltas, live, m, stop)
        self._measured[live, m:stop] = rows.solve(z) - self._rays.g[live].unsqueeze(1)
        self._weigh(live, stop)
        self.done = stop

    def _read(self, deltas: Tensor, rays: Tensor, start: int, stop: int) -> Tensor:
        """The logits (J, w, k) of probes (w, k, d) of some rays, for columns start to stop."""
        tokens, some = self._tokens, slice(start, stop)
        used = torch.arange(deltas.shape[1]) < self.rank[rays].unsqueeze(1)
        owner, rows = rays.unsqueeze(1).expand_as(used)[used], deltas[used]
        asked = read_logits(
            self._behind, self._rays, tokens.x[some], tokens.base[some], rows, owner
        )
        if bool(asked.isnan().any()):
            raise Unlucky(Status.MISMATCH, "an isolated gate answers outside its range")
        z = torch.zeros(stop - start, *used.shape, dtype=torch.float64)
        z[:, used] = asked
        return z

    def _weigh(self, live: Tensor, stop: int) -> None:
        """Which rays have shown all their columns: some of the last wave bring nothing new."""
        fresh = self._measured[live, self.done : stop]
        known = self._basis[live, : self.done]
        for _ in range(2):  # twice against rounding
            fresh = fresh - (fresh @ known.mT) @ known
        Q, R = torch.linalg.qr(fresh.mT)
        new = R.diagonal(dim1=1, dim2=2).abs().amin(1) > self._resolution[live]
        self._basis[live, self.done : stop] = Q.mT
        self._settle_rank(live[~new], stop)

    def _settle_rank(self, rays: Tensor, stop: int) -> None:
        """The columns of these rays are the span of their first singular vectors."""
        if not len(rays):
            return
        _, sizes, span = torch.linalg.svd(self._measured[rays, :stop], full_matrices=False)
        above = sizes > stop**0.5 * self._resolution[rays].unsqueeze(1)
        self._growing[rays] = False
        self._stop[rays] = stop
        self.rank[rays] = above.sum(1).clamp(min=1)
        self._basis[rays, :stop] = span * above.unsqueeze(2)

    def _finish(self) -> None:
        """The other columns of rays of low rank, on as many rows as the rank."""
        d = len(self._rays.x)
        for stop in self._stop[self._stop < d].unique().tolist():
            rays = (self._stop == stop).nonzero().squeeze(1)
            span = self._basis[rays, : int(self.rank[rays].max())]
            rows = Rows.design(span, self._rays.part(rays))
            g = rows.solve(self._read(rows.deltas, rays, stop, d))
            self._measured[rays, stop:] = g - self._rays.g[rays].unsqueeze(1)
            self._measured[rays] = (self._measured[rays] @ span.mT) @ span
        self.complete = True


def asking_tokens(
    behind: Behind, lines: Lines, rays: Rays, v: Tensor, step: float, stream: torch.Generator
) -> Tokens:
    """x_j as far from x_0 as every mask allows, each proven by the answer at δ = 0."""
    count, d = rays.g.shape
    size = float(_norm(rays.x))
    B = starting_with(rays.x.unsqueeze(0), rays.frame.unsqueeze(0))[0]
    B[0] = rays.x / size
    pulls = pull(lines, rays.line, rays.g, rays.V, stream)
    many = pulls.shape[1]
    rows, owner = pulls.reshape(-1, d), torch.arange(count).repeat_interleave(many)

    def answers(x: Tensor) -> Tensor:
        return behind.grid(x, rows, owner).view(len(x), count, many)

    origin = answers(rays.x.unsqueeze(0))
    shift = origin - v @ rays.x  # the same at every x while masks hold
    values = float(_norm(rays.V).max())
    noise = 2e-14 * values * (_norm(behind.D).amax(1) + size)
    inexact = torch.where(rays.slopes > 1, 1e-10, 1e-12 if many > 1 else 2e-14)  # of own values
    noise = noise + inexact * values * _norm(pulls).amax(1)
    eta = torch.full((d,), step * size, dtype=torch.float64)
    eta[0] = size
    base = origin[:, :, 0].repeat(d, 1)
    pending = torch.arange(1, d)
    for _ in range(_HALVINGS):
        x = rays.x + eta[pending].unsqueeze(1) * B[pending]
        y = answers(x)
        base[pending] = y[:, :, 0]
        leaks = (y - shift - (x @ v)[:, None, None]).abs().amax(2) > noise
        pending = pending[leaks.any(1)]
        if not len(pending):
            return Tokens(B, eta, torch.cat([rays.x[None], rays.x + eta[1:, None] * B[1:]]), base)
        eta[pending] /= 2
    raise Unlucky(Status.MISMATCH, "no asking tokens near x_0 keep the masks")


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1)
