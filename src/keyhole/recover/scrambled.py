"""Leaks behind a secret: rotated, scrambled, or mixed, under a key that the owner keeps.

Rows that attention reads can be multiplied by a secret matrix if the weights are changed to match,
so a cache or a store may hold them that way at no cost in answers. For each matrix of rows X (n, k)
of a leak (hidden states have one, keys and values one for each head), with b = 16 tokens a block:

    rotated      X R            R orthogonal, secret, the same for all texts
    scrambled    P X M          M invertible, secret, the same for all texts; P exchanges the tokens
                                of a block, anew for every block and text, all heads alike
    mixed        S P X M        S (b, b) invertible and secret besides: a row is of no one token

*Shadow in the Cache* (arXiv 2508.09442) proposes the last for KV caches (KV-Cloak), with a secret
matrix added to X besides and permutations of each head's own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.recover.leaks import HiddenStates, KeyValues, Leak, Pooled

FORMS = ("rotated", "scrambled", "mixed")
BLOCK = 16  # tokens
_STRETCH = 2.0  # the largest singular value of a secret map, and one over the least


def matrices_of(leak: Leak) -> list[Tensor]:
    """The matrices of rows (n, k) that a secret is applied to, one by one."""
    if isinstance(leak, KeyValues):
        return [*leak.keys, *leak.values]
    if isinstance(leak, HiddenStates):
        return [leak.values]
    if isinstance(leak, Pooled):
        return [leak.values[None]]
    raise InputError(
        f"expected hidden states, keys and values or a pooled embedding, got {leak.exposure}"
    )


def with_matrices(leak: Leak, matrices: list[Tensor]) -> Leak:
    """The leak with other rows."""
    if isinstance(leak, KeyValues):
        half = len(matrices) // 2
        keys, values = torch.stack(matrices[:half]), torch.stack(matrices[half:])
        return replace(leak, keys=keys.float(), values=values.float())
    rows = matrices[0].float()
    return replace(leak, values=rows[0] if isinstance(leak, Pooled) else rows)


def blocks(length: int) -> list[slice]:
    """The blocks that the tokens of a text are in; the last may be shorter."""
    return [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


def hidden_behind(leak: Leak, form: str, key: int, stream: torch.Generator) -> Leak:
    """The leak as an attacker without `key` finds it; `stream` draws what is drawn anew."""
    if form not in FORMS:
        raise InputError(f"expected a form among {', '.join(FORMS)}, got {form}")
    if form != "rotated" and isinstance(leak, Pooled):
        raise InputError(f"expected rows of several tokens to be {form}, got {leak.exposure}")
    matrices = [matrix.double() for matrix in matrices_of(leak)]
    if form != "rotated":
        order = torch.cat([
            part.start + torch.randperm(part.stop - part.start, generator=stream)
            for part in blocks(len(matrices[0]))
        ])  # fmt: skip
        matrices = [matrix[order] for matrix in matrices]
    secret = torch.Generator().manual_seed(key)
    changed: list[Tensor] = []
    for matrix in matrices:
        rows = matrix @ _map(matrix.shape[1], secret, orthogonal=form == "rotated")
        if form == "mixed":
            mix = _map(BLOCK, secret)
            rows = torch.cat([mix[: len(part), : len(part)] @ part for part in rows.split(BLOCK)])
        changed.append(rows)
    return with_matrices(leak, changed)


def _map(size: int, stream: torch.Generator, orthogonal: bool = False) -> Tensor:
    """A random orthogonal matrix, or an invertible one with singular values from ½ to 2."""

    def rotation() -> Tensor:
        return torch.linalg.qr(torch.randn(size, size, generator=stream, dtype=torch.float64)).Q

    if orthogonal:
        return rotation()
    sizes = torch.rand(size, generator=stream, dtype=torch.float64) * 2 - 1
    return rotation() * _STRETCH**sizes @ rotation()
