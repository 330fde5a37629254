"""The heads at one last token, one by one: their values and `g = W x_0`.

Masks (masks.py) isolate the ray of each line of the far field and each sign, and a few
answers show whether it has a head, so opposite heads are found by measurement. With the
gate fully open its answer is `vᵀδ`: d answers give v. Then d gates in the near field
give g, and three more answers test that one logistic explains them.

The v_h must add up to Σ_h v_h, which answers of length one give. If they do not, some
heads cancel in answers of length two (W and −W with equal v), and a third token is used
to find them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.functional import pad

from keyhole.core import Status
from keyhole.core.float64 import Stream, identity, normal, ones, tensor, uniform, zeros
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import (
    equalised,
    lengths,
    matvec,
    normalized,
    random_orthogonal,
    random_units,
)
from keyhole.extract.gauss_newton import levenberg
from keyhole.extract.heads.far_field import (
    BadToken,
    Lines,
    Probe,
    find_hidden_lines,
    find_lines,
)
from keyhole.extract.heads.masks import (
    IsolatedHeads,
    Rays,
    Rows,
    mask_all,
    mask_others,
    read_logits,
)
from keyhole.oracle.protocol import Oracle

NOTHING = 1e-9  # smaller values, relative to the largest, count as zero
_OPEN = 60.0  # gᵀδ of an open gate
_TESTS = tensor([-2.5, 1.0, 3.0])  # gᵀδ of the answers that test g
_LOGISTIC = 1e-9  # the relative error to which one logistic must predict other answers


def find_rays(
    oracle: Oracle,
    v: Tensor,
    stream: Stream,
) -> tuple[Lines, Rays]:
    """Return every head at a random token x_0, and the lines with more exact normals."""
    x = random_units(1, len(v), stream)[0]
    frame = random_orthogonal(len(v), stream)
    lines = find_lines(Probe(oracle, x, v), stream)
    at = _Token(oracle, x, v, lines, frame, stream).balanced()
    rays = at.rays()
    if rays is None:
        hidden = find_hidden_lines(Probe(oracle, at.x, v), stream)
        at = replace(at, lines=at.lines.union(hidden)).balanced()
        rays = at.rays()
    if rays is None:
        raise BadToken(
            Status.MISMATCH, "the values of the heads found do not add up to f([x])"
        )
    return _settle(oracle, at.lines, rays, stream)


@dataclass(frozen=True)
class _Token:
    """A last token x and the lines that the far field has there."""

    oracle: Oracle
    x: Tensor
    v: Tensor  # Σ_h v_h
    lines: Lines
    frame: Tensor
    stream: Stream

    def balanced(self) -> _Token:
        """Scale x so that |W||x|² is about 1: probes are then about as long as x."""
        if not len(self.lines.g):
            return self
        size = lengths(self.x)
        factor = float((lengths(self.lines.g).median() / size) ** -0.5 / size)
        return replace(self, x=factor * self.x, lines=self.lines.scaled(factor))

    @property
    def scale(self) -> float:
        """The size of the values."""
        return max(self.lines.scale, float(lengths(self.v)))

    def rays(self) -> Rays | None:
        """Return all rays with values; None if a gate never opens, or values miss a part of v."""
        v0 = self._zero_value()
        count = len(self.lines.g)
        line = torch.arange(count).repeat_interleave(2)
        sign = tensor([1.0, -1.0]).repeat(count)
        values = zeros(0, len(self.v))
        if count:
            opened = self._open_values(v0, line, sign)
            if opened is None:
                return None
            present, values = opened
            line = line[present]
            sign = sign[present]
        missing = float(lengths(self.v - v0 - values.sum(0)))
        if missing > NOTHING * self.scale:
            return None
        return Rays(
            self.x,
            line,
            sign,
            sign[:, None] * self.lines.g[line],
            values,
            v0,
            ones(len(line), 1),
            values[:, None],
            self.frame,
        )

    def _zero_value(self) -> Tensor:
        """Return v_0 of heads with W = 0, from `v_0ᵀδ/4` with all others masked; 2 answers if 0."""
        x = self.x
        g = self.lines.g
        size = 1 / float(lengths(g).max()) if len(g) else float(lengths(x))
        Q = size * self.frame
        D = Q[:2]
        if len(g):
            D = mask_all(self.lines, (g @ Q.mT).abs().amax(1) + 5, self.stream)
        isolated = IsolatedHeads(self.oracle, D[None], torch.zeros_like(x))
        answer = isolated.at_once(x, Q[:2].sum(0)[None, None]).abs()
        noise = 1e-12 * self.scale * float(lengths(D).max())
        if answer <= NOTHING * self.scale * size + noise:
            return torch.zeros_like(x)
        return 4 * isolated.at_once(x, Q[None])[0] @ Q / size**2

    def _open_values(
        self,
        v0: Tensor,
        line: Tensor,
        sign: Tensor,
    ) -> tuple[Tensor, Tensor] | None:
        """Return which rays have heads, and the sum of each one's values; None if a gate is shut.

        All δ of a ray have the same gᵀδ, and doubling one of them shows whether the
        gate is open.
        """
        lines = self.lines
        d = len(self.x)
        g = sign[:, None] * lines.g[line]
        Q = equalised(g, self.frame)
        length = _OPEN * math.sqrt(d) / (lengths(g) * lines.slow[line])
        y = zeros(len(line), 3)
        D = zeros(len(line), 2, d)
        mix = (1 + 0.3 * normal(self.stream, d)) / d
        todo = torch.arange(len(line))
        for _ in range(4):
            delta = length[todo, None, None] * Q[todo]
            reach = 2 * (delta @ lines.g.mT).abs().amax(1)
            reach[torch.arange(len(todo)), line[todo]] = 5.0
            D[todo] = mask_others(lines, line[todo], sign[todo], reach, self.stream).D
            probes = torch.stack([mix @ delta, delta[:, 0], 2 * delta[:, 0]], 1)
            isolated = IsolatedHeads(self.oracle, D[todo], v0)
            y[todo] = isolated.at_once(self.x, probes)
            present = y.abs().amax(1) > NOTHING * self.scale * length
            doubled = y[:, 2] - 2 * y[:, 1]
            shut = doubled.abs() > 1e-11 * self.scale * length
            todo = (present & shut).nonzero()[:, 0]
            if not len(todo):
                delta = length[present, None, None] * Q[present]
                isolated = IsolatedHeads(self.oracle, D[present], v0)
                others = isolated.at_once(self.x, delta[:, 1:])
                answers = torch.cat([y[present, 1:2], others], 1)
                values = (answers[:, None] @ delta)[:, 0]
                return present, values / length[present, None] ** 2
            length[todo] *= 8
        return None


def _settle(
    oracle: Oracle,
    lines: Lines,
    rays: Rays,
    stream: Stream,
) -> tuple[Lines, Rays]:
    """Find g and the slopes of every ray; the second pass has the better normals of the first."""
    todo = torch.arange(len(rays))
    for _ in range(2):
        if not len(todo):
            return lines, rays
        part = rays.part(todo)
        values = rays.other_values()[todo]
        g, is_single = _near_field(oracle, lines, part, values, stream)
        rays.g[todo] = torch.where(is_single[:, None], g, part.g)
        todo = todo[~is_single]
        lines = _sharpened(lines, rays, todo)
    for ray in todo.tolist():
        rays = fit_ray(oracle, lines, rays, ray, stream)
    return _sharpened(lines, rays, todo[:0]), rays


def _near_field(
    oracle: Oracle,
    lines: Lines,
    rays: Rays,
    values: Tensor,
    stream: Stream,
) -> tuple[Tensor, Tensor]:
    """Return g of rays from d logits, and whether one logistic explains three more answers."""
    rows = Rows.design(rays.frame[None], rays)
    count, k, d = rows.deltas.shape
    tests = normal(stream, count, 3, d) / math.sqrt(d)
    tests = tests + normalized(rays.g)[:, None]
    tests = tests * (_TESTS / matvec(tests, rays.g))[..., None]
    probes = torch.cat([rows.deltas, tests], 1)
    reach = (probes @ lines.g.mT).abs().amax(1) + 5
    masks = mask_others(lines, rays.line, rays.sign, reach, stream, values)
    isolated = IsolatedHeads(oracle, masks.D, rays.v0)
    x = rays.x[None]
    ray = torch.arange(count)
    with_zero = torch.cat([zeros(count, 1, d), tests], 1).flatten(0, 1)
    y = isolated.grid(x, with_zero, ray.repeat_interleave(4)).view(count, 4)
    base = y[:, 0]
    deltas = rows.deltas.flatten(0, 1)
    owner = ray.repeat_interleave(k)
    z = read_logits(isolated, rays, x, base[None], deltas, owner, tries=2)
    g = rows.solve(z.view(1, count, k))[:, 0]
    expected = torch.sigmoid(matvec(tests, g)) * matvec(tests, rays.v)
    sizes = lengths(masks.D).amax(1) + lengths(probes).amax(1)
    noise = 1e-14 * float(lengths(rays.V).max()) * sizes
    allowed = _LOGISTIC * lengths(tests) * lengths(rays.v)[:, None] + noise[:, None]
    residual = y[:, 1:] - y[:, :1] - expected
    return g, (residual.abs() < allowed).all(1)


def _sharpened(
    lines: Lines,
    rays: Rays,
    unknown: Tensor,
) -> Lines:
    """Return lines with the normals of the near field, if all rays of a line are settled.

    g is that of the fastest gate on the line; `slow` is the slope of the slowest
    relative to it.
    """
    settled = torch.bincount(rays.line, minlength=len(lines.g)) > 0
    settled[rays.line[unknown]] = False
    size = lengths(rays.g)
    slope = size * torch.where((rays.V != 0).any(2), rays.c, torch.inf).amin(1)
    fastest = torch.zeros_like(lines.slow)
    fastest = fastest.scatter_reduce(0, rays.line, size, "amax")
    slowest = torch.full_like(fastest, torch.inf)
    slowest = slowest.scatter_reduce(0, rays.line, slope, "amin")
    g = lines.g.clone()
    chosen = (size == fastest[rays.line]) & settled[rays.line]
    g[rays.line[chosen]] = rays.sign[chosen, None] * rays.g[chosen]
    return Lines(g, torch.where(settled, slowest / fastest, lines.slow), lines.scale)


# Several heads on one ray: `W_k x = c_k g` with c_k > 0. Masks cannot separate them,
# but their sum of gates can:
#
#     y(δ) = Σ_k σ(c_k gᵀδ)·V_kᵀδ,    k = 1 … K ≤ 4.
#
# First they are fitted along one direction e, where `y(te)/t = Σ_k σ(κ_k t)·A_k` has 2K
# unknowns: slopes from a grid, A by linear least squares, then Levenberg–Marquardt; the
# smallest K that fits gives the slopes. Then all unknowns (g, c, V) are fitted at once,
# from 1.5 times as many answers as unknowns, so a fit to rounding is a proof. ΣV_k = v
# is known and joins the equations.
#
# It is an assumption that the factors c_k are the same at every x; the judge's fresh
# queries test it.

MAX_SLOPES = 4  # on a ray
_PROFILE = 48  # answers along one direction
# slopes relative to the guess
_GRID = torch.logspace(-1.4, 1.3, 19, dtype=torch.float64)
_STARTS = 10
_LIKELY = 1e-8  # like `_FITS`, along one direction
_FITS = 1e-10  # smaller residuals, relative to the answers, are rounding
_SHARP = 1e-8  # least relative singular value of a fit that determines its unknowns


def fit_ray(
    oracle: Oracle,
    lines: Lines,
    rays: Rays,
    ray: int,
    stream: Stream,
) -> Rays:
    """Return the rays with g, c and V of one of them fitted."""
    own = torch.tensor([ray])
    part = rays.part(own)
    values = rays.other_values()[own]
    guess = part.g[0]
    v = part.v[0]

    def ask(delta: Tensor) -> Tensor:
        reach = (delta @ lines.g.mT).abs().amax(0) + 5
        masks = mask_others(lines, part.line, part.sign, reach[None], stream, values)
        isolated = IsolatedHeads(oracle, masks.D, rays.v0)
        return isolated.at_once(rays.x, delta[None])[0]

    t, e = _profile(guess, stream)
    profile = ask(t[:, None] * e) / t
    delta = zeros(0, len(v))
    y = zeros(0)
    for count in range(1, MAX_SLOPES + 1):
        slopes = _slopes(t, profile, float(v @ e), count)
        if slopes is None:
            continue
        more = int(1.5 * (len(v) * (count + 1) + count - 1)) + 8 - len(y)
        new = _spread_probes(guess * slopes[0], more, stream)
        delta = torch.cat([delta, new])
        y = torch.cat([y, ask(new)])
        fitted = _fit(delta, y, slopes[0] * guess, slopes / slopes[0], v)
        if fitted is not None:
            return _with_ray(rays, ray, *fitted)
    raise BadToken(
        Status.NOT_APPLICABLE,
        f"a direction W x whose gate no {MAX_SLOPES} heads explain: more heads than that have "
        "proportional W, or it is no attention",
    )


def _with_ray(
    rays: Rays,
    ray: int,
    g: Tensor,
    c: Tensor,
    V: Tensor,
) -> Rays:
    """Return the rays with g, c and V of one of them replaced."""
    more = max(0, len(c) - rays.c.shape[1])
    all_c = pad(rays.c, (0, more), value=1.0)
    all_V = pad(rays.V, (0, 0, 0, more))
    all_g = rays.g.clone()
    all_c[ray, : len(c)] = c
    all_V[ray, : len(c)] = V
    all_g[ray] = g
    return replace(rays, g=all_g, c=all_c, V=all_V)


def _profile(guess: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
    """Return multiples t of a direction e with gᵀe about 1: both signs, from 1/16 to 24."""
    aside = normal(stream, len(guess))
    e = normalized(guess) + 0.5 * aside / lengths(aside)
    t = torch.logspace(-1.2, 1.4, _PROFILE // 2, dtype=torch.float64)
    return torch.cat([t, -t]), e / (e @ guess)


def _spread_probes(
    g: Tensor,
    count: int,
    stream: Stream,
) -> Tensor:
    """Return δ with gᵀδ of both signs from 0.2 to 16 and a random part orthogonal to g."""
    norm = lengths(g)
    across = normal(stream, count, len(g))
    across = across - (across @ g)[:, None] * g / norm**2
    size, side = uniform(stream, 2, count)
    z = torch.exp(4.3 * size - 1.5)
    z = torch.where(side < 0.5, -z, z)
    return (across * 2 / len(g) ** 0.5 + z[:, None] * g / norm) / norm


def _slopes(
    t: Tensor,
    profile: Tensor,
    total: float,
    count: int,
) -> Tensor | None:
    """Return κ, largest first, with `profile = Σ_k σ(κ_k t)·A_k` and ΣA = total, or None."""
    wanted = torch.cat([profile, tensor([total])])

    def gates(kappa: Tensor) -> Tensor:
        sum_of_A = ones(*kappa.shape[:-2], 1, count)
        return torch.cat([torch.sigmoid(t[:, None] * kappa), sum_of_A], -2)

    def model(log_kappa: Tensor) -> tuple[Tensor, Tensor]:
        kappa = log_kappa.exp()
        gate = gates(kappa[None])
        slope = gate * (1 - gate) * pad(t, (0, 1))[:, None] * kappa
        return _projected(gate, wanted, lambda A: slope * A)

    grid = tensor(list(combinations(_GRID.tolist(), count)))
    span = torch.linalg.qr(gates(grid[:, None])).Q
    inside = (span @ (span.mT @ wanted[:, None]))[..., 0]
    residual = lengths(wanted - inside)
    enough = _LIKELY * float(lengths(wanted))
    # The best start for each largest slope: the best of all often lead to one local
    # minimum.
    best = {float(grid[k, -1]): k for k in residual.argsort(descending=True).tolist()}
    starts = sorted(best.values(), key=residual.tolist().__getitem__)
    for start in starts[: _STARTS if count > 1 else 1]:
        log_kappa, left = levenberg(model, grid[start].log(), steps=200)
        if left < enough:
            return log_kappa.exp().sort(descending=True).values
    return None


def _projected(
    Phi: Tensor,
    wanted: Tensor,
    slope: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return residuals and Jacobian of `Φ A = wanted` with the linear unknowns A eliminated.

    `slope(A)` are the derivatives of Φ A by the others (variable projection, after
    Kaufman).
    """
    Q, R = torch.linalg.qr(Phi)
    inside = Q.mT @ wanted
    A = torch.linalg.solve_triangular(R, inside[:, None], upper=True)[:, 0]
    J = slope(A)
    return Q @ inside - wanted, J - Q @ (Q.mT @ J)


def _fit(
    delta: Tensor,
    y: Tensor,
    g: Tensor,
    c: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Fit g, c and V to all answers, starting at g and c; None if they do not explain them."""
    count = len(c)
    d = len(v)
    weight = float(lengths(delta).max())
    tie = weight * identity(d).repeat(1, count)
    wanted = torch.cat([y, weight * v])

    def split(unknowns: Tensor) -> tuple[Tensor, Tensor]:
        return unknowns[:d], pad(unknowns[d:], (1, 0)).exp()

    def linear(g: Tensor, c: Tensor) -> Tensor:
        return torch.cat([_by_values(delta, g, c).flatten(1), tie])

    def model(unknowns: Tensor) -> tuple[Tensor, Tensor]:
        g, c = split(unknowns)

        def slope(V: Tensor) -> Tensor:
            return pad(_by_others(delta, g, c, V.view(count, d)), (0, 0, 0, d))

        return _projected(linear(g, c), wanted, slope)

    unknowns, left = levenberg(model, torch.cat([g, c[1:].log()]))
    if not left < _FITS * float(lengths(wanted)):
        return None
    g, c = split(unknowns)
    V = least_squares(linear(g, c), wanted[:, None]).view(count, d)
    _require_sharp(delta, g, c, V)
    return g, c, V


def _by_values(
    delta: Tensor,
    g: Tensor,
    c: Tensor,
) -> Tensor:
    """Return the derivatives of y by the values, (n, K, d): y is linear in them."""
    gate = torch.sigmoid((delta @ g)[:, None] * c)
    return gate[..., None] * delta[:, None]


def _by_others(
    delta: Tensor,
    g: Tensor,
    c: Tensor,
    V: Tensor,
) -> Tensor:
    """Return the derivatives of y by (g, log c_2 …)."""
    z = (delta @ g)[:, None] * c
    gate = torch.sigmoid(z)
    slope = gate * (1 - gate) * (delta @ V.mT)
    return torch.cat([(slope * c).sum(1, keepdim=True) * delta, (slope * z)[:, 1:]], 1)


def _require_sharp(
    delta: Tensor,
    g: Tensor,
    c: Tensor,
    V: Tensor,
) -> None:
    """Raise BadToken if rounding of 1e-14 in the answers moves the unknowns too far."""
    by_values = _by_values(delta, g, c)
    by_difference = (by_values[:, 1:] - by_values[:, :1]).flatten(1)  # ΣV is known
    J = torch.cat([_by_others(delta, g, c, V), by_difference], 1)
    sizes = torch.linalg.svdvals(J / J.norm(dim=0))
    if not sizes[-1] > _SHARP * sizes[0]:
        raise BadToken(
            Status.NOT_APPLICABLE,
            f"{len(c)} heads share a direction W x with slopes too close to be separated",
        )
