"""Short questions asked in many words: copies of tokens get past a limit on lengths.

Ours. A head does not see how often a whole sequence is written: c copies of each token share out
the attention that one had, so `f` of a sequence written c times is `f` of the sequence. Where no
multiple of its length is allowed, a pair [a ; b] is asked as n copies of a and m of b,

    f = vᵀb + σ(z + log(n/m))·vᵀ(a − b),   z = (a − b)ᵀWb,

since n·e^score against m·e^score moves the logit by log(n/m); with v known the answer to [a ; b]
itself follows. v is then asked for first, d queries.

It needs a target that adds no positions to its inputs, as an attention layer itself does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count
from keyhole.extract.bilinear import ask_scores
from keyhole.oracle.protocol import Oracle, ask
from keyhole.oracle.wrapper import Wrapper

_EPSILON = torch.finfo(torch.float64).eps


class Copied(Wrapper):
    """A server that takes `min_tokens` to `max_tokens` tokens, asked whatever one likes."""

    def __init__(self, inner: Oracle, min_tokens: int, max_tokens: int | None = None) -> None:
        expect_count("a least number of tokens", min_tokens)
        super().__init__(inner, "copied")
        self._min, self._max = min_tokens, max_tokens
        self._v: Tensor | None = None

    @property
    def identity(self) -> str:  # another question, the same answer
        return super().identity.removesuffix("|copied")

    def __call__(self, sequences: Tensor) -> Tensor:
        length = sequences.shape[1]
        copies = max(1, math.ceil(self._min / length))
        if self._fits(copies * length):
            return ask(self.inner, sequences.repeat(1, copies, 1))
        if length != 2 or not self._fits(self._min):
            raise InputError(
                f"expected a multiple of {length} among the lengths that are answered, got "
                f"{self._min} to {self._max} tokens"
            )
        return self._ask_unevenly(sequences)

    def _fits(self, length: int) -> bool:
        return length >= self._min and (self._max is None or length <= self._max)

    def _ask_unevenly(self, pairs: Tensor) -> Tensor:
        """Pairs [a ; b] as n copies of a and one more of b, and what the answer tells."""
        n = self._min // 2
        m = self._min - n
        order = torch.tensor([0] * n + [1] * m)
        v = self._values()
        a, b = (pairs @ v).unbind(1)
        alpha = (ask(self.inner, pairs[:, order]) - b) / (a - b)
        # Rounding may put α just outside; a = b tells nothing, and nothing is lost.
        inside = alpha.nan_to_num(0.5).clamp(_EPSILON**2, 1 - _EPSILON)
        return b + torch.sigmoid(torch.logit(inside) - math.log(n / m)) * (a - b)

    def _values(self) -> Tensor:
        if self._v is None:
            tokens = torch.eye(self.dim, dtype=torch.float64).unsqueeze(1)
            self._v = ask_scores(self.inner, tokens.repeat(1, self._min, 1))
        return self._v
