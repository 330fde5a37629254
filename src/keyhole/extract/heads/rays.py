"""The heads at one asking token, one by one: their values and `g = W x_0`.

By masks (masks.py). For each line of the far field and each sign
the ray is isolated; a few answers tell whether a head is there, so that opposite heads are found
and not guessed. With the gate fully open its answer is `vᵀδ`: d answers give v; then d gates in the
near field give g, and three more test that one logistic explains them.

The books must balance: Σ_h v_h is known from answers of length one. If they do not, heads are
hidden from answers of length two (W and −W with equal v), and a third token is used to find them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.heads.crossings import Lines, find_hidden_lines, find_lines
from keyhole.extract.heads.far_field import Probe, Unlucky
from keyhole.extract.heads.masks import Behind, mask_all, mask_others
from keyhole.extract.heads.near_field import Rays, Rows, read_logits
from keyhole.extract.heads.slopes import fit_ray
from keyhole.oracle.protocol import Oracle

NOTHING = 1e-9  # values below this share of the largest are taken for none
_OPEN = 60.0  # gᵀδ of an open gate
_TESTS = torch.tensor([-2.5, 1.0, 3.0], dtype=torch.float64)  # gᵀδ of the answers that test g
_EXACT = 1e-9  # a gate is one logistic if it predicts other answers to this


def find_rays(oracle: Oracle, v: Tensor, stream: torch.Generator) -> tuple[Lines, Rays]:
    """Every head at a random token x_0, and the lines sharpened by what was measured."""
    x = torch.randn(len(v), generator=stream, dtype=torch.float64)
    x = x / _norm(x)
    frame = random_orthogonal(len(v), stream)
    lines = find_lines(Probe(oracle, x, v), stream)
    x, lines = _balanced(x, lines)
    rays, rest = _values(oracle, x, v, lines, frame, stream)
    if rays is None or rest > NOTHING:
        lines = lines.union(find_hidden_lines(Probe(oracle, x, v), stream))
        x, lines = _balanced(x, lines)
        rays, rest = _values(oracle, x, v, lines, frame, stream)
        if rays is None or rest > NOTHING:
            raise Unlucky(Status.MISMATCH, "the values of the heads found do not add up to f([x])")
    return _settle(oracle, lines, rays, stream)


def _balanced(x: Tensor, lines: Lines) -> tuple[Tensor, Lines]:
    """x scaled so that |W||x|² is about 1: probes are then about as long as x."""
    if not len(lines.g):
        return x, lines
    factor = float((_norm(lines.g).median() / _norm(x)) ** -0.5 / _norm(x))
    return factor * x, lines.scaled(factor)


def _values(
    oracle: Oracle,
    x: Tensor,
    v: Tensor,
    lines: Lines,
    frame: Tensor,
    stream: torch.Generator,
) -> tuple[Rays | None, float]:
    """All rays with their values, and what is missing to v (relative); None: a gate stays open."""
    scale = max(lines.scale, float(_norm(v)))
    v0 = _zero_value(oracle, x, lines, scale, frame, stream)
    line = torch.arange(len(lines.g)).repeat_interleave(2)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(lines.g))
    empty = torch.zeros(0, len(v), dtype=torch.float64)
    present, values = line > 0, empty
    if len(line):
        behind = Behind(oracle, empty, v0)
        opened = _open_values(behind, x, lines, line, sign, scale, frame, stream)
        if opened is None:
            return None, math.inf
        present, values = opened
    line, sign = line[present], sign[present]
    ones = torch.ones(len(line), 1, dtype=torch.float64)
    g = sign.unsqueeze(1) * lines.g[line]
    rays = Rays(x, line, sign, g, values, v0, ones, values.unsqueeze(1), frame)
    rest = float(_norm(v - v0 - values.sum(0)))
    return rays, rest / scale if scale else rest


def _zero_value(
    oracle: Oracle, x: Tensor, lines: Lines, scale: float, frame: Tensor, stream: torch.Generator
) -> Tensor:
    """v_0 of heads with W = 0, from `v_0ᵀδ/4` with all others masked: 2 answers if none."""
    size = 1 / float(_norm(lines.g).max()) if len(lines.g) else float(_norm(x))
    Q = size * frame
    D = mask_all(lines, (lines.g @ Q.mT).abs().amax(1) + 5, stream) if len(lines.g) else Q[:2]
    behind = Behind(oracle, D.unsqueeze(0), torch.zeros_like(x))
    seen = float(behind.at_once(x, Q[:2].sum(0)[None, None]).abs())
    noise = 1e-12 * scale * float(_norm(D).max())
    if seen <= NOTHING * scale * size + noise:
        return torch.zeros_like(x)
    return 4 * behind.at_once(x, Q.unsqueeze(0)).squeeze(0) @ Q / size**2


def _open_values(
    behind: Behind,
    x: Tensor,
    lines: Lines,
    line: Tensor,
    sign: Tensor,
    scale: float,
    frame: Tensor,
    stream: torch.Generator,
) -> tuple[Tensor, Tensor] | None:
    """Which of the rays have heads, and the sum of their values.

    All δ of a ray have the same gᵀδ, and doubling one of them shows whether the gate is open.
    """
    d = len(x)
    g = sign.unsqueeze(1) * lines.g[line]
    Q = equalised(g, frame)
    length = _OPEN * math.sqrt(d) / (_norm(g) * lines.slow[line])
    y = torch.zeros(len(line), 3, dtype=torch.float64)
    D = torch.zeros(len(line), 2, d, dtype=torch.float64)
    mix = (1 + 0.3 * torch.randn(d, generator=stream, dtype=torch.float64)) / d
    todo = torch.arange(len(line))
    for _ in range(4):
        delta = length[todo, None, None] * Q[todo]
        reach = 2 * (delta @ lines.g.mT).abs().amax(1)
        reach[torch.arange(len(todo)), line[todo]] = 5.0
        D[todo] = mask_others(lines, line[todo], sign[todo], reach, stream).D
        probe = torch.stack([mix @ delta, delta[:, 0], 2 * delta[:, 0]], 1)
        y[todo] = replace(behind, D=D[todo]).at_once(x, probe)
        present = y.abs().amax(1) > NOTHING * scale * length
        closed = (y[:, 2] - 2 * y[:, 1]).abs() > 1e-11 * scale * length
        todo = (present & closed).nonzero().squeeze(1)
        if not len(todo):
            delta = length[present, None, None] * Q[present]
            rest = replace(behind, D=D[present]).at_once(x, delta[:, 1:])
            answers = torch.cat([y[present, 1:2], rest], 1)
            values = (answers.unsqueeze(1) @ delta).squeeze(1)
            return present, values / length[present].unsqueeze(1) ** 2
        length[todo] *= 8
    return None


def equalised(g: Tensor, Q: Tensor) -> Tensor:
    """The orthogonal rows Q turned so that all have the same positive product with g (R, d)."""
    target = Q.sum(0) / math.sqrt(len(Q))
    mirror = g / _norm(g).unsqueeze(1) - target
    square = (mirror * mirror).sum(1).clamp(min=1e-28)[:, None, None]
    return Q - (mirror @ Q.mT).unsqueeze(2) * (2 / square * mirror.unsqueeze(1))


def _settle(
    oracle: Oracle, lines: Lines, rays: Rays, stream: torch.Generator
) -> tuple[Lines, Rays]:
    """g and the slopes of every ray. The second turn has the sharper normals of the first."""
    todo = torch.arange(len(rays))
    for _ in range(2):
        if not len(todo):
            return lines, rays
        part = rays.part(todo)
        values = rays.other_values()[todo]
        g, single = _near_field(oracle, lines, part, values, stream)
        rays.g[todo] = torch.where(single.unsqueeze(1), g, part.g)
        todo = todo[~single]
        lines = _sharpened(lines, rays, todo)
    for ray in todo.tolist():
        rays = fit_ray(oracle, lines, rays, ray, stream)
    return _sharpened(lines, rays, todo[:0]), rays


def _near_field(
    oracle: Oracle,
    lines: Lines,
    rays: Rays,
    values: Tensor,
    stream: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """g of rays from d logits, and whether one logistic explains three more answers."""
    rows = Rows.design(rays.frame.unsqueeze(0), rays)
    count, k, d = rows.deltas.shape
    tests = torch.randn(count, 3, d, generator=stream, dtype=torch.float64) / math.sqrt(d)
    tests = tests + (rays.g / _norm(rays.g).unsqueeze(1)).unsqueeze(1)
    tests = tests * (_TESTS / (tests @ rays.g.unsqueeze(2)).squeeze(2)).unsqueeze(2)
    zero = torch.zeros(count, 1, d, dtype=torch.float64)
    both = torch.cat([rows.deltas, tests], 1)
    reach = (both @ lines.g.mT).abs().amax(1) + 5
    masks = mask_others(lines, rays.line, rays.sign, reach, stream, values)
    behind = Behind(oracle, masks.D, rays.v0)
    x, owner = rays.x.unsqueeze(0), torch.arange(count)
    fixed = torch.cat([zero, tests], 1)
    y = behind.grid(x, fixed.view(-1, d), owner.repeat_interleave(4)).view(count, 4)
    flat = rows.deltas.view(-1, d)
    z = read_logits(behind, rays, x, y[:, 0].unsqueeze(0), flat, owner.repeat_interleave(k), 2)
    g = rows.solve(z.view(1, count, k)).squeeze(1)
    signal = (tests @ rays.v.unsqueeze(2)).squeeze(2)
    expected = torch.sigmoid((tests @ g.unsqueeze(2)).squeeze(2)) * signal
    noise = 1e-14 * float(_norm(rays.V).max()) * (_norm(masks.D).amax(1) + _norm(both).amax(1))
    allowed = _EXACT * _norm(tests) * _norm(rays.v).unsqueeze(1) + noise.unsqueeze(1)
    return g, ((y[:, 1:] - y[:, :1] - expected).abs() < allowed).all(1)


def _sharpened(lines: Lines, rays: Rays, unknown: Tensor) -> Lines:
    """Lines with the normals of the near field, where all rays of a line are settled.

    g is the fastest gate's on the line; `slow` relates the slowest to it.
    """
    settled = torch.bincount(rays.line, minlength=len(lines.g)) > 0
    settled[rays.line[unknown]] = False
    size = _norm(rays.g)
    slope = size * torch.where((rays.V != 0).any(2), rays.c, torch.inf).amin(1)
    fastest = torch.zeros_like(lines.slow).scatter_reduce(0, rays.line, size, "amax")
    slowest = torch.full_like(lines.slow, torch.inf).scatter_reduce(0, rays.line, slope, "amin")
    g = lines.g.clone()
    rows = ((size == fastest[rays.line]) & settled[rays.line]).nonzero().squeeze(1)
    g[rays.line[rows]] = rays.sign[rows].unsqueeze(1) * rays.g[rows]
    return Lines(g, torch.where(settled, slowest / fastest, lines.slow), lines.scale)


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1)
