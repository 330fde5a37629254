"""Several heads on one ray: `W_k x = c_k g` with c_k > 0. Masks cannot part them, their gate can:

    y(δ) = Σ_k σ(c_k gᵀδ)·V_kᵀδ,    k = 1 … K ≤ 3.

First along one direction e, where `y(te)/t = Σ_k σ(κ_k t)·A_k` has 2K unknowns: slopes from a grid,
A by linear least squares, then Levenberg–Marquardt; the smallest K that fits gives the slopes. Then
all unknowns (g, c, V) at once, from half as many answers again as unknowns, so that a fit to
rounding is a proof. ΣV_k = v is known and joins the equations.

That the factors c_k are the same at every x is an assumption: the judge's fresh queries test it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.extract.heads.crossings import Lines
from keyhole.extract.heads.far_field import Unlucky
from keyhole.extract.heads.masks import Behind, mask_others
from keyhole.extract.heads.near_field import Rays
from keyhole.oracle.protocol import Oracle

MOST = 3  # slopes on a ray
_PROFILE = 48  # answers along one direction
_GRID = torch.logspace(-1.4, 1.3, 19, dtype=torch.float64)  # slopes relative to the guess
_STARTS = 10
_LIKELY = 1e-8  # as below, along one direction
_FITS = 1e-10  # misses below this share of the answers are rounding
_SHARP = 1e-8  # singular values of a fit that settles its unknowns, relative to the largest

Model = Callable[[Tensor], tuple[Tensor, Tensor]]


def fit_ray(oracle: Oracle, lines: Lines, rays: Rays, ray: int, stream: torch.Generator) -> Rays:
    """The rays with g, c and V of one of them fitted."""
    own = torch.tensor([ray])
    part, values = rays.part(own), rays.other_values()[own]
    guess, v = part.g[0], part.v[0]

    def ask(delta: Tensor) -> Tensor:
        reach = (delta @ lines.g.mT).abs().amax(0) + 5
        masks = mask_others(lines, part.line, part.sign, reach.unsqueeze(0), stream, values)
        return Behind(oracle, masks.D, rays.v0).at_once(rays.x, delta.unsqueeze(0)).squeeze(0)

    t, e = _profile(guess, stream)
    profile = ask(t.unsqueeze(1) * e) / t
    delta, y = torch.zeros(0, len(v), dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    for count in range(1, MOST + 1):
        slopes = _slopes(t, profile, float(v @ e), count)
        if slopes is None:
            continue
        more = int(1.5 * (len(v) * (count + 1) + count - 1)) + 8 - len(y)
        new = _spread_probes(guess * slopes[0], more, stream)
        delta, y = torch.cat([delta, new]), torch.cat([y, ask(new)])
        fitted = _fit(delta, y, slopes[0] * guess, slopes / slopes[0], v)
        if fitted is not None:
            return _with_ray(rays, ray, *fitted)
    raise Unlucky(
        Status.MISMATCH,
        f"a direction W x whose gate no {MOST} heads explain: more heads, or no attention",
    )


def _with_ray(rays: Rays, ray: int, g: Tensor, c: Tensor, V: Tensor) -> Rays:
    room = max(rays.c.shape[1], len(c)) - rays.c.shape[1]
    all_c = torch.nn.functional.pad(rays.c, (0, room), value=1.0)
    all_V = torch.nn.functional.pad(rays.V, (0, 0, 0, room))
    all_c[ray, : len(c)], all_V[ray, : len(c)] = c, V
    all_g = rays.g.clone()
    all_g[ray] = g
    return replace(rays, g=all_g, c=all_c, V=all_V)


def _profile(guess: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Multiples t of a direction e with gᵀe about 1: both signs, from 1/16 to 24."""
    e = torch.randn(len(guess), generator=stream, dtype=torch.float64)
    norm = torch.linalg.vector_norm(guess)
    e = guess / norm + 0.5 * e / torch.linalg.vector_norm(e)
    t = torch.logspace(-1.2, 1.4, _PROFILE // 2, dtype=torch.float64)
    return torch.cat([t, -t]), e / (e @ guess)


def _spread_probes(g: Tensor, count: int, stream: torch.Generator) -> Tensor:
    """δ with gᵀδ of both signs from 0.2 to 16 and a random part across."""
    norm = torch.linalg.vector_norm(g)
    across = torch.randn(count, len(g), generator=stream, dtype=torch.float64)
    across = across - (across @ g).unsqueeze(1) * g / norm**2
    z = torch.exp(4.3 * torch.rand(count, generator=stream, dtype=torch.float64) - 1.5)
    z = torch.where(torch.rand(count, generator=stream, dtype=torch.float64) < 0.5, -z, z)
    return (across * 2 / len(g) ** 0.5 + z.unsqueeze(1) * g / norm) / norm


def _slopes(t: Tensor, profile: Tensor, total: float, count: int) -> Tensor | None:
    """κ, the largest first, with `profile = Σ_k σ(κ_k t)·A_k` and ΣA = total; None if none fits."""
    ones = torch.ones(1, count, dtype=torch.float64)
    wanted = torch.cat([profile, torch.tensor([total], dtype=torch.float64)])

    def gates(kappa: Tensor) -> Tensor:
        return torch.cat(
            [torch.sigmoid(t.unsqueeze(1) * kappa), ones.expand(*kappa.shape[:-2], 1, -1)], -2
        )

    def model(log_kappa: Tensor) -> tuple[Tensor, Tensor]:
        kappa = log_kappa.exp()
        gate = gates(kappa.unsqueeze(0))
        slope = gate * (1 - gate) * torch.nn.functional.pad(t, (0, 1)).unsqueeze(1) * kappa
        return _projected(gate, wanted, lambda A: slope * A)

    grid = torch.tensor(list(combinations(_GRID.tolist(), count)), dtype=torch.float64)
    trial = gates(grid.unsqueeze(1))
    span = torch.linalg.qr(trial).Q
    inside = (span @ (span.mT @ wanted.unsqueeze(1))).squeeze(2)
    miss = torch.linalg.vector_norm(wanted - inside, dim=1)
    enough = _LIKELY * float(torch.linalg.vector_norm(wanted))
    # The best start for each largest slope: the very best ones often share one bad valley.
    best = {float(grid[k, -1]): k for k in miss.argsort(descending=True).tolist()}
    starts = sorted(best.values(), key=miss.tolist().__getitem__)
    for start in starts[: _STARTS if count > 1 else 1]:
        log_kappa, left = levenberg(model, grid[start].log(), steps=200)
        if left < enough:
            return log_kappa.exp().sort(descending=True).values
    return None


def _projected(
    Phi: Tensor, wanted: Tensor, slope: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Misses and Jacobian of `Φ A = wanted` with the linear unknowns A eliminated.

    `slope(A)` are the derivatives of Φ A by the others (variable projection, after Kaufman).
    """
    Q, R = torch.linalg.qr(Phi)
    inside = Q.mT @ wanted
    A = torch.linalg.solve_triangular(R, inside.unsqueeze(1), upper=True).squeeze(1)
    J = slope(A)
    return Q @ inside - wanted, J - Q @ (Q.mT @ J)


def _fit(
    delta: Tensor, y: Tensor, g: Tensor, c: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """g, c and V from all answers, starting at g and c; None if they do not explain them."""
    count, d = len(c), len(v)
    weight = float(torch.linalg.vector_norm(delta, dim=1).max())
    tie = weight * torch.eye(d, dtype=torch.float64).repeat(1, count)
    wanted = torch.cat([y, weight * v])

    def split(unknowns: Tensor) -> tuple[Tensor, Tensor]:
        return unknowns[:d], torch.nn.functional.pad(unknowns[d:], (1, 0)).exp()

    def linear(g: Tensor, c: Tensor) -> Tensor:
        return torch.cat([_by_values(delta, g, c), tie])

    def model(unknowns: Tensor) -> tuple[Tensor, Tensor]:
        g, c = split(unknowns)

        def slope(V: Tensor) -> Tensor:
            by_others = _by_others(delta, g, c, V.view(count, d))
            return torch.nn.functional.pad(by_others, (0, 0, 0, d))

        return _projected(linear(g, c), wanted, slope)

    unknowns, left = levenberg(model, torch.cat([g, c[1:].log()]))
    if not left < _FITS * float(torch.linalg.vector_norm(wanted)):
        return None
    g, c = split(unknowns)
    V = least_squares(linear(g, c), wanted.unsqueeze(1)).view(count, d)
    _require_sharp(delta, g, c, V)
    return g, c, V


def _by_values(delta: Tensor, g: Tensor, c: Tensor) -> Tensor:
    """Derivatives of y by the values: y is linear in them."""
    gate = torch.sigmoid((delta @ g).unsqueeze(1) * c)
    return (gate.unsqueeze(2) * delta.unsqueeze(1)).flatten(1)


def _by_others(delta: Tensor, g: Tensor, c: Tensor, V: Tensor) -> Tensor:
    """Derivatives of y by (g, log c_2 …)."""
    z = (delta @ g).unsqueeze(1) * c
    gate = torch.sigmoid(z)
    slope = gate * (1 - gate) * (delta @ V.mT)
    return torch.cat([(slope * c).sum(1, keepdim=True) * delta, (slope * z)[:, 1:]], 1)


def _require_sharp(delta: Tensor, g: Tensor, c: Tensor, V: Tensor) -> None:
    """Rounding of 1e-14 in the answers moves the unknowns by about 1e-14 / sharpness."""
    count, d = V.shape
    by_values = _by_values(delta, g, c).view(-1, count, d)
    by_difference = (by_values[:, 1:] - by_values[:, :1]).flatten(1)  # ΣV is known
    J = torch.cat([_by_others(delta, g, c, V), by_difference], 1)
    sizes = torch.linalg.svdvals(J / torch.linalg.vector_norm(J, dim=0))
    if not float(sizes[-1]) > _SHARP * float(sizes[0]):
        raise Unsuccessful(
            Status.NOT_IDENTIFIABLE,
            f"{count} heads share a direction W x with slopes too close to be told apart",
        )


def levenberg(model: Model, start: Tensor, steps: int = 80) -> tuple[Tensor, float]:
    """Levenberg–Marquardt on `model(unknowns) -> (misses, Jacobian)`; the point and |misses|."""
    point, damping = start, 1e-3
    miss, J = model(point)
    best = mark = float(torch.linalg.vector_norm(miss))
    for turn in range(1, steps + 1):
        if turn % 20 == 0:
            if best > 0.9 * mark:
                break  # a minimum that is not zero
            mark = best
        if not bool(torch.isfinite(J).all() & torch.isfinite(miss).all()):
            break  # out of the model's range: nothing to go by
        size = torch.linalg.vector_norm(J, dim=0).clamp(min=1e-12)
        A = torch.cat([J / size, damping**0.5 * torch.eye(len(point), dtype=torch.float64)])
        wanted = torch.cat([-miss, torch.zeros_like(point)]).unsqueeze(1)
        step = least_squares(A, wanted).squeeze(1) / size
        new_miss, new_J = model(point + step)
        reached = float(torch.linalg.vector_norm(new_miss))
        if reached < best:
            done = best - reached < 1e-3 * best and damping < 1e-12
            point, miss, J, best = point + step, new_miss, new_J, reached
            damping = max(damping / 10, 1e-16)
            if done:
                break
        else:
            damping *= 10
            if damping > 1e8:
                break
    return point, best
