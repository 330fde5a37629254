"""Rotary positions undone: the key that a token would have at position 0.

`RoFormer`, arXiv 2104.09864: a cached key is `R_p k`, with `R_p` a rotation by the position `p` in
each plane of two coordinates. So `k = R_pᵀ (R_p k)`. Models that stretch their context multiply the
rotation by a factor, which is divided out as well.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from keyhole.models.anatomy import Anatomy


def unrotate(parts: Anatomy, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys (b, heads, n, k) of a KV cache without their positions (b, n)."""
    if not parts.rotary:
        return keys
    rotary = cast("Any", parts.base).rotary_emb
    cos, sin = (part.unsqueeze(1) for part in rotary(keys.new_zeros(1), positions))
    half = keys.shape[-1] // 2
    turned = torch.cat([keys[..., half:], -keys[..., :half]], -1)
    return (keys * cos + turned * sin) / (cos.square() + sin.square())


def rotate(parts: Anatomy, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys (b, heads, n, k) as a KV cache holds them at positions (b, n)."""
    if not parts.rotary:
        return keys
    rotary = cast("Any", parts.base).rotary_emb
    cos, sin = (part.unsqueeze(1) for part in rotary(keys.new_zeros(1), positions))
    half = keys.shape[-1] // 2
    turned = torch.cat([-keys[..., half:], keys[..., :half]], -1)
    return keys * cos + turned * sin
