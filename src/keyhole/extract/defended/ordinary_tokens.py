"""Random tokens that look like anybody's: neither along a coordinate nor along one another."""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful

_APART = 0.85  # |cosine| that two tokens of one sequence may have
_DRAWS = 1000
_PEAK = 0.9  # |coordinate| that a unit token may have


def usual_norm_of(dim: int) -> float:
    """d^¼: the scores of a W of spectral norm 2 then have a deviation of about 1.

    So they have in a working layer, and nobody knows better of a target that is a black box.
    """
    return dim**0.25


def ordinary_tokens(count: int, beside: Tensor, stream: torch.Generator) -> Tensor:
    """Random unit tokens (count, d), each neither along an axis nor along a token of `beside`."""
    dim = beside.shape[1]
    kept = torch.empty(0, dim, dtype=torch.float64)
    for _ in range(_DRAWS):
        drawn = torch.randn(2 * count + 8, dim, generator=stream, dtype=torch.float64)
        drawn = torch.nn.functional.normalize(drawn, dim=1)
        odd = torch.cat([drawn.abs() / _PEAK, (drawn @ beside.mT).abs() / _APART], 1)
        kept = torch.cat([kept, drawn[odd.amax(1) < 1] if dim > 1 else drawn])
        if len(kept) >= count:
            return kept[:count]
    raise Unsuccessful(
        Status.NOT_APPLICABLE,
        f"{dim} dimensions have no room for {len(beside) + 1} tokens of which none are alike",
    )


def are_ordinary(units: Tensor) -> Tensor:
    """Which of the sequences (b, n, d) of unit tokens have none along an axis or another."""
    cosines = (units @ units.mT).abs()
    cosines.diagonal(dim1=-2, dim2=-1).zero_()
    return (cosines.amax((-2, -1)) < _APART) & (units.abs().amax((-2, -1)) < _PEAK)


def ordinary_sequence(length: int, dim: int, stream: torch.Generator) -> Tensor:
    """A sequence (length, d) of such tokens."""
    tokens = torch.empty(0, dim, dtype=torch.float64)
    for _ in range(length):
        tokens = torch.cat([tokens, ordinary_tokens(1, tokens, stream)])
    return tokens


def spread_tokens(dim: int, stream: torch.Generator) -> Tensor:
    """d such tokens at right angles to one another: what they are multiplied by is solved for best.

    In few dimensions a random basis may have an axis in it; then another one is drawn.
    """
    for _ in range(_DRAWS):
        basis, R = torch.linalg.qr(torch.randn(dim, dim, generator=stream, dtype=torch.float64))
        if dim == 1 or float(basis.abs().max()) < _PEAK:
            return (basis * R.diagonal().sign()).mT
    raise Unsuccessful(
        Status.NOT_APPLICABLE, f"{dim} dimensions have no basis without a token along an axis"
    )
