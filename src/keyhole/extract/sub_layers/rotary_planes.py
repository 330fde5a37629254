"""Rotary positions found out: the planes in which places turn keys, and by how much.

Keys κ known up to a k×k matrix A, at one place and again m places further on, satisfy

    κ_m = κ·ρ_m,    ρ_m = A⁻¹ R_m A,

so ρ_m is similar to a rotation: its eigenvalues are e^{±imθ_f} and its eigenvectors the planes.
What is left of A is one complex number for each plane, and that commutes with all positions: it
goes into the queries. One step tells fast planes apart, a long one those that hardly turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares

_WEIGHT = 0.7  # of the long step beside the short one, so that all eigenvalues differ
_TURN = 1e-3  # how far from length 1 an eigenvalue of a rotation may be computed


@dataclass(frozen=True)
class Planes:
    """`basis` (k, k) takes keys to coordinates: f and f + k/2 are plane f, of frequency θ_f."""

    basis: Tensor
    frequencies: Tensor

    def coordinates(self, keys: Tensor) -> Tensor:
        return keys @ self.basis

    def turned(self, coordinates: Tensor, places: Tensor) -> Tensor:
        """Keys so many places in front of where they are: R_{−m} of each row (n, k)."""
        angles = places.unsqueeze(1) * self.frequencies
        cos, sin = angles.cos(), -angles.sin()
        x, y = coordinates.chunk(2, 1)
        return torch.cat([x * cos - y * sin, x * sin + y * cos], 1)


def find_planes(keys: Tensor, moved: Sequence[Tensor], steps: tuple[int, int]) -> Planes:
    """Planes from keys (n, k) and the first of them `steps` places further in front."""
    short, long = (least_squares(keys[: len(part)], part) for part in moved)
    values, vectors = torch.linalg.eig(short + _WEIGHT * long)
    values, vectors = values[values.imag != 0], vectors[:, values.imag != 0]
    turns = [_turn(vectors, matrix) for matrix in (short, long)]
    fits = torch.stack([(turn.abs() - 1).abs() for turn in turns]).amax()
    if vectors.shape[1] < keys.shape[1] or not bool(fits < _TURN):
        raise Unsuccessful(
            Status.NOT_APPLICABLE, "places change the scores otherwise than rotary positions do"
        )
    # Keys turn by −θ for every place that they are further in front; of each pair, that one.
    once = -turns[0].angle() / steps[0]
    first = once > 0
    once, vectors = once[first], vectors[:, first]
    cycle = 2 * math.pi / steps[1]
    rough = -turns[1].angle()[first] / steps[1]
    theta = rough + cycle * ((once - rough) / cycle).round()
    if len(theta) * 2 != keys.shape[1]:
        raise Unsuccessful(Status.MISMATCH, "the turns of rotary positions do not come in pairs")
    return Planes(torch.cat([vectors.real, vectors.imag], 1), theta)


def _turn(vectors: Tensor, matrix: Tensor) -> Tensor:
    """The eigenvalue of each vector."""
    images = matrix.to(vectors.dtype) @ vectors
    return (vectors.conj() * images).sum(0) / (vectors.conj() * vectors).sum(0)
