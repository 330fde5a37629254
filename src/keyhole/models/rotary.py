"""Rotary positions of cached keys: removed, and put back, as the model itself rotates them.

RoFormer, arXiv 2104.09864: a model caches the key k of the token at position p as

    R_p k,    R_p a rotation by angles p·θ_i in each plane i of two coordinates,

so `k = R_pᵀ (R_p k)`. Models that stretch their context multiply the rotation by a
factor, which is divided out as well.

The angles come from one of the model's own modules, which maps positions to cosines and
sines. Models differ in which coordinates make a plane (neighbours, or the two halves),
and in whether the first numbers of a key are rotated or the last. All ways are tried on
one repeated token: the right one gives equal keys at all positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

# The arguments of a module that change from call to call are replaced by these in a
# `Rotation`.
_POSITIONS = "its positions"
_STATES = "its states"
_UNEVEN = 0.01  # how much cos² + sin² may differ between angles, relative to the mean


@dataclass(frozen=True, eq=False)
class Rotation:
    """The module that gives the angles, its arguments by place or name, and the planes.

    `angles` selects one angle for each plane from the module's output. The two
    coordinates of a plane are `neighbours` or half of the rotated numbers apart, and
    these are the first numbers of a key or the `last` ones.
    """

    module: str
    arguments: tuple[tuple[int | str, Any], ...]
    angles: slice
    neighbours: bool = False
    last: bool = False

    def turn(
        self,
        base: nn.Module,
        keys: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Rotate keys (b, heads, n, k) as a cache holds them at positions (b, n)."""
        return self._rotated(keys, *self._cos_sin(base, keys, positions))

    def undo(
        self,
        base: nn.Module,
        keys: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Remove positions (b, n) from the keys (b, heads, n, k) of a cache."""
        return self.undone(keys, *self._cos_sin(base, keys, positions))

    def undone(
        self,
        keys: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        factor = cos.square() + sin.square()  # squared
        return self._rotated(keys, cos / factor, -sin / factor)

    def _cos_sin(
        self,
        base: nn.Module,
        keys: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines (b, 1, n, planes) that the model rotates keys by."""
        current = {_POSITIONS: positions, _STATES: keys.new_zeros(1)}
        given = [(place, current.get(value, value)) for place, value in self.arguments]
        args = [value for place, value in given if isinstance(place, int)]
        named = {place: value for place, value in given if isinstance(place, str)}
        pair = _pair(cast("Any", base.get_submodule(self.module))(*args, **named))
        cos, sin = cast("tuple[Tensor, Tensor]", pair)
        return cos[..., self.angles].unsqueeze(1), sin[..., self.angles].unsqueeze(1)

    def _rotated(
        self,
        keys: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        size = 2 * cos.shape[-1]
        axis = -1 if self.neighbours else -2
        start = keys.shape[-1] - size if self.last else 0
        before, part, after = keys.tensor_split([start, start + size], -1)
        x, y = part.unflatten(-1, (-1, 2) if self.neighbours else (2, -1)).unbind(axis)
        rotated = torch.stack([x * cos - y * sin, y * cos + x * sin], axis).flatten(-2)
        return torch.cat([before, rotated, after], -1)


# with the cosines and sines (…, 1, n, planes) of one call
Turn = tuple[Rotation, Tensor, Tensor]


def turn_of(
    module: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    output: Any,
    length: int,
) -> Turn | None:
    """Return the rotation if a call mapped `length` positions to cosines and sines, else None."""
    given = [*enumerate(args), *kwargs.items()]
    arguments = tuple((place, _placeholder(value)) for place, value in given)
    pair = _pair(output)
    if pair is None or not any(value is _POSITIONS for _, value in arguments):
        return None
    cos, sin = pair
    lengths = (cos.float().square() + sin.float().square()).flatten()
    if cos.ndim not in (2, 3) or cos.shape[-2] != length or cos.shape[-1] % 2:
        return None
    if float(lengths.max() - lengths.min()) > _UNEVEN * float(lengths.mean()):
        return None
    # an angle for each plane, or each angle twice
    half = cos.shape[-1] // 2
    angles = slice(None)
    if torch.equal(cos[..., :half], cos[..., half:]):
        angles = slice(half)
    elif torch.equal(cos[..., ::2], cos[..., 1::2]):
        angles = slice(None, None, 2)
    rotation = Rotation(module, arguments, angles)
    return rotation, cos[..., angles].unsqueeze(-3), sin[..., angles].unsqueeze(-3)


def ways_to_undo(
    keys: Tensor, turns: Sequence[Turn]
) -> Iterator[tuple[Rotation, Tensor]]:
    """Yield every way in which keys (1, heads, n, k) may be rotated, with the unrotated keys."""
    for rotation, cos, sin in turns:
        if 2 * cos.shape[-1] > keys.shape[-1]:
            continue
        for last, neighbours in product((False, True), repeat=2):
            tried = replace(rotation, neighbours=neighbours, last=last)
            yield tried, tried.undone(keys, cos, sin)


def _placeholder(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _STATES if value.is_floating_point() else _POSITIONS


def _pair(output: Any) -> tuple[Tensor, Tensor] | None:
    """Return the cosines and sines that a module gave, as a pair or as complex numbers."""
    if isinstance(output, Tensor) and output.is_complex():
        return output.real, output.imag
    pair = cast("tuple[Any, ...]", output) if isinstance(output, tuple) else ()
    if len(pair) != 2 or not all(isinstance(each, Tensor) for each in pair):
        return None
    cos, sin = cast("tuple[Tensor, Tensor]", pair)
    return (cos, sin) if cos.is_floating_point() and cos.shape == sin.shape else None
