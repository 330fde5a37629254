"""Queries and keys of every head: a low-rank factor from a few rows, the other by linear solves.

Scores are `z = q·κ` with `q = xQ_h + q_h` and `κ = R_{−m} wK_g` for a key w that stands m places
before x (rotary positions; else R = 1). Scores of a few x with a basis of keys, each at a place of
its own, are a matrix of rank k for all heads that share keys together; its right factor is all κ,
up to a k×k matrix. Then every other x takes two or three queries, whose scores are linear in its q:
with some keys, and with itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.sub_layers.attention_weights import Reader
from keyhole.extract.sub_layers.rotary_planes import Planes, find_planes

# For each dimension of the scores, x in the first step and keys in the second; with positions more,
# since errors of the planes grow with every solve.
_ROWS, _ROWS_TURNED = 9 / 8, 3 / 2
_KEYS, _KEYS_TURNED = 9 / 8, 5 / 4
_SHIFTS = (1, 61)  # places by which keys are moved: for fast planes, and for slow ones
_RANK = 1e-6


@dataclass(frozen=True)
class Factors:
    """`Q` (H, d, k), `q` (H, k), `K` (G, d, k), `frequencies` (G, k/2 or 0)."""

    Q: Tensor
    q: Tensor
    K: Tensor
    frequencies: Tensor


@dataclass(frozen=True)
class _Rows:
    """A few x, a basis of keys in blocks, and the scores of both (len(xs), H, d)."""

    reader: Reader
    xs: Tensor
    keys: Tensor
    scores: Tensor

    @property
    def places(self) -> Tensor:
        """How far in front of x each key stands."""
        sizes = [len(part) for part in self.keys.split(self.reader.keys)]
        return torch.cat([torch.arange(size, 0, -1.0) for size in sizes]).to(torch.float64)

    def shifted(self, gap: int, keys: int) -> Tensor:
        """Scores of the first so many keys, each `gap` places further in front of x."""
        blocks = self.keys[: math.ceil(keys / self.reader.keys) * self.reader.keys].split(
            self.reader.keys
        )
        return torch.cat([self.reader.scores(b, self.xs, gap)[..., :-1] for b in blocks], -1)


def read_factors(
    reader: Reader, groups: list[list[int]], length: float, positions: bool, stream: torch.Generator
) -> Factors:
    d, k = reader.values.shape[1:]
    keys = length * random_orthogonal(d, stream)
    count = math.ceil((_ROWS_TURNED if positions else _ROWS) * k / len(groups[0]))
    xs = length * random_orthogonal(d, stream)[: min(count, d)]
    rows = _Rows(reader, xs, keys, torch.empty(0))
    rows = _Rows(reader, xs, keys, rows.shifted(0, d))
    moved = [rows.shifted(gap, math.ceil(_KEYS_TURNED * k)) for gap in _SHIFTS] if positions else []
    K: list[Tensor] = []
    planes: list[Planes | None] = []
    for group in groups:
        right, plane = _keys_of(rows, moved, group, k)
        K.append(keys.mT @ right / length**2)
        planes.append(plane)
    Q, q = _read_queries(reader, groups, K, planes, length, stream)
    none = torch.zeros(0, dtype=torch.float64)
    frequencies = [none if plane is None else plane.frequencies for plane in planes]
    return Factors(Q, q, torch.stack(K), torch.stack(frequencies))


def _keys_of(
    rows: _Rows, moved: list[Tensor], group: list[int], k: int
) -> tuple[Tensor, Planes | None]:
    """κ of every key at x's own place (d, k), and the planes in which places turn it."""
    left, sizes, right = torch.linalg.svd(rows.scores[:, group].flatten(0, 1), full_matrices=False)
    if len(sizes) > k and float(sizes[k]) > _RANK * float(sizes[0]):
        raise Unsuccessful(
            Status.MISMATCH,
            f"the scores of heads that share values have a rank above {k}, the width of the values",
        )
    right = right[:k].mT
    if not moved:
        return right, None
    inverse = (left[:, :k] / sizes[:k]).mT
    turned = [(inverse @ part[:, group].flatten(0, 1)).mT for part in moved]
    plane = find_planes(right, turned, _SHIFTS)
    return plane.turned(plane.coordinates(right), -rows.places), plane


def _read_queries(
    reader: Reader, groups: list[list[int]], K: list[Tensor], planes: list[Planes | None],
    length: float, stream: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Q and q from the queries q(x) at d + 1 points x, each by least squares."""
    d, k = reader.values.shape[1:]
    basis = random_orthogonal(d, stream)
    points = length * torch.cat([basis, -basis.sum(0, keepdim=True) / math.sqrt(d)])
    wanted = (_KEYS if planes[0] is None else _KEYS_TURNED) * k
    count = math.ceil(wanted / reader.keys)  # of queries for each point
    size = math.ceil(wanted / count)
    keys = [length * random_orthogonal(d, stream)[:size] for _ in range(count)]
    scores = [reader.scores(part, points) for part in keys]
    places = torch.arange(size, 0, -1.0, dtype=torch.float64)
    heads = sum(len(group) for group in groups)
    Q = torch.empty(heads, d, k, dtype=torch.float64)
    q = torch.empty(heads, k, dtype=torch.float64)
    affine = torch.cat([torch.ones(d + 1, 1, dtype=torch.float64), points], 1)
    for group, keys_of, plane in zip(groups, K, planes, strict=True):
        own = (points @ keys_of).unsqueeze(1)
        parts = [part @ keys_of for part in keys]
        if plane is not None:
            parts = [plane.turned(part, places) for part in parts]
        system = torch.cat([torch.cat([p.expand(d + 1, -1, -1), own], 1) for p in parts], 1)
        measured = torch.cat([part[:, group] for part in scores], -1).mT
        solved = torch.linalg.lstsq(system, measured).solution  # (d + 1, k, heads of the group)
        both = least_squares(affine, solved.flatten(1)).unflatten(1, (k, -1)).movedim(2, 0)
        q[group], Q[group] = both[:, 0], both[:, 1:]
    return Q, q
