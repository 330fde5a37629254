"""Servers that refuse questions: too short or too long ones, and ones no honest client asks.

A refusal is an `http.Refused` with the status a server would answer with, here as over the network.
A batch with one such question in it is refused as a whole.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import Oracle, ask
from keyhole.oracle.wrapper import Wrapper

_UNFIT = 422  # "unprocessable content": understood, and not answered
_FACTOR = 2.0  # of the usual norm, within which a token's norm is usual
_PEAK = 0.9  # of a token's squared norm in one coordinate: an axis is being probed
_COLLINEAR = 0.9  # |cosine| of two tokens of one sequence: a direction is being probed


class LengthLimited(Wrapper):
    """Sequences of fewer than `min_tokens` tokens, or of more than `max_tokens`, are refused.

    The published attacks ask with one token and with two.
    """

    def __init__(
        self, inner: Oracle, min_tokens: int | None = None, max_tokens: int | None = None
    ) -> None:
        expect_lengths(min_tokens, max_tokens)
        super().__init__(inner, f"tokens:{min_tokens}:{max_tokens}")
        self.min_tokens = min_tokens or 1
        self.max_tokens = max_tokens

    def __call__(self, sequences: Tensor) -> Tensor:
        length = sequences.shape[1]
        if length < self.min_tokens:
            raise Refused(f"expected {self.min_tokens} tokens or more, got {length}", _UNFIT)
        if self.max_tokens is not None and length > self.max_tokens:
            raise Refused(f"expected at most {self.max_tokens} tokens, got {length}", _UNFIT)
        return ask(self.inner, sequences)


def expect_lengths(min_tokens: int | None, max_tokens: int | None) -> None:
    """Refuse limits between which there is nothing."""
    expect_count("a least number of tokens", min_tokens)
    expect_count("a largest number of tokens", max_tokens)
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise InputError(
            f"expected at least as many tokens at most as at least, got {min_tokens} to "
            f"{max_tokens}"
        )


class UsualOnly(Wrapper):
    """Questions unlike those of honest clients are refused, each judged by itself.

    A token is unusual if its norm is not within a factor of 2 of `usual_norm`, or if one coordinate
    holds over 90% of its squared norm; a sequence is unusual if two of its tokens are collinear
    (|cosine| over 0.9). Learnt embeddings with a few large coordinates would need wider limits.
    """

    def __init__(self, inner: Oracle, usual_norm: float) -> None:
        expect_number("a usual norm", usual_norm, above=0)
        super().__init__(inner, f"usual:{usual_norm!r}")
        self.usual_norm = usual_norm

    def __call__(self, sequences: Tensor) -> Tensor:
        reason = self.unusual(sequences)
        if reason:
            raise Refused(f"expected inputs like honest ones, got {reason}", _UNFIT)
        return ask(self.inner, sequences)

    def unusual(self, sequences: Tensor) -> str:
        """What no honest client would ask; empty if there is nothing."""
        norms = torch.linalg.vector_norm(sequences, dim=-1)
        low, high = self.usual_norm / _FACTOR, self.usual_norm * _FACTOR
        if not bool(((norms >= low) & (norms <= high)).all()):
            return f"a token whose norm is not between {low:g} and {high:g}"
        units = sequences / norms.unsqueeze(-1)
        if self.dim > 1 and float(units.abs().max()) > math.sqrt(_PEAK):
            return "a token along one coordinate"
        cosines = (units @ units.mT).abs()
        cosines.diagonal(dim1=-2, dim2=-1).zero_()
        return "two tokens along one direction" if float(cosines.max()) > _COLLINEAR else ""
