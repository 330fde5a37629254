"""The norm, bias and residual around the attention of a sub-layer, found out and undone.

An RMS norm in front maps a token x to `t = x / √(mean(x²) + ε)`, which is any vector shorter than
√d: it is undone by asking `x = t·√(ε / (1 − mean(t²)))`. With three lengths λ of one token,

    y([λx]) = λ·x·(residual) + b + t(λx)·M,

`y([0]) = b`, the growth far out is the residual, and `ε` follows from how short tokens fade.
Without a norm y([x]) is affine, and single tokens cannot tell a residual from values: that waits
until the values of the heads are known (values.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import KeyholeError
from keyhole.extract.bilinear import batch_rows
from keyhole.oracle.protocol import Oracle, ask

_SAME = 1e-9  # relative
_ALMOST = 1e-5
_FAR = 2.0**30
_FADING = tuple(2.0**-n for n in range(5, 45, 5))  # shorter and shorter tokens, to see ε


class LostSum(KeyholeError):
    """What attention adds does not follow from the answers to these questions: tokens too long."""


@dataclass(frozen=True)
class Surroundings:
    """A sub-layer to be asked with the tokens t that its attention sees; the last one answers.

    `asking` is the length of the last token, where answers can be used for one length only.
    """

    oracle: Oracle
    b: Tensor
    epsilon: float | None = None
    residual: bool = False
    every_token: bool = False
    causal: bool = False
    asking: float | None = None
    precision: float = 1e-11  # of answers, relative
    # Of more than two tokens: the direction of an answer, and what is to be taken off of it
    direction: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def dim(self) -> int:
        return self.oracle.dim

    @property
    def outputs(self) -> int:
        return len(self.b)

    @property
    def radius(self) -> float:
        """All tokens t are shorter than this."""
        return math.inf if self.epsilon is None else math.sqrt(self.dim)

    def answer(self, tokens: Tensor) -> Tensor:
        """`Σ_h Σ_j a_hj·t_j M_h` for the last of the tokens (batch, n, d)."""
        if self.epsilon is not None:
            left = 1 - tokens.square().mean(-1, keepdim=True)
            tokens = tokens * (self.epsilon / left).sqrt()
        rows = batch_rows(*tokens.shape[1:])
        answers = torch.cat([_last(self.oracle, part) for part in tokens.split(rows)]) - self.b
        return answers - tokens[:, -1] if self.residual else answers


def open_surroundings(oracle: Oracle, stream: torch.Generator) -> Surroundings:
    """Which tokens answer; is there a norm in front? If so its ε, and is the input added behind?"""
    d = oracle.dim
    x = torch.randn(d, generator=stream, dtype=torch.float64)
    x = x * math.sqrt(d) / torch.linalg.vector_norm(x)
    every_token, causal = _seen(oracle, x)
    b, near, twice = _last(oracle, torch.stack([0 * x, x, 2 * x]).unsqueeze(1))
    plain = Surroundings(oracle, b, every_token=every_token, causal=causal)
    size = max(float(part.abs().max()) for part in (b, near, twice))
    if not size:
        raise Unsuccessful(Status.NOT_IDENTIFIABLE, "every answer is zero")
    if float((twice - 2 * near + b).abs().max()) <= _SAME * size:
        return plain
    far, further = _last(oracle, _FAR * torch.stack([x, 2 * x]).unsqueeze(1))
    growth = (further - far) / _FAR
    residual = len(growth) == d and float((growth - x).abs().max()) <= _ALMOST * float(
        x.abs().max()
    )
    if not residual and float(growth.abs().max()) > _ALMOST:
        raise _another_kind()
    return replace(plain, epsilon=_epsilon(plain, x, near, residual), residual=residual)


def _seen(oracle: Oracle, x: Tensor) -> tuple[bool, bool]:
    """Does every token answer, and does the first one see the second?"""
    pairs = ask(oracle, torch.stack([torch.stack([x, -x]), torch.stack([x, 2 * x])]))
    if pairs.ndim != 3:
        return False, False
    apart = (pairs[0, 0] - pairs[1, 0]).abs().max()
    return True, bool(apart <= _SAME * pairs.abs().max())


def _epsilon(plain: Surroundings, x: Tensor, near: Tensor, residual: bool) -> float:
    """ε of an RMS norm, from tokens so short that it shows; x has a mean square of 1."""
    behind = x if residual else torch.zeros_like(near)
    ordinary = near - plain.b - behind  # √(1 + ε) shorter than what long tokens bring
    for short in _FADING:
        faded = _last(plain.oracle, short * x[None, None])[0] - plain.b - short * behind
        ratio = float(faded @ ordinary / (ordinary @ ordinary))
        if float((faded - ratio * ordinary).abs().max()) > _ALMOST * float(ordinary.abs().max()):
            break
        if ratio < 1 / 2:  # (1 + ε)·short² = ratio²·(short² + ε)
            return short**2 * (1 - ratio**2) / (ratio**2 - short**2)
    raise _another_kind()


def _another_kind() -> Unsuccessful:
    return Unsuccessful(
        Status.NOT_APPLICABLE,
        "answers to longer and longer tokens are neither those of attention alone nor of attention "
        "behind an RMS norm: a norm behind a sub-layer takes away the length of every answer",
    )


def _last(oracle: Oracle, sequences: Tensor) -> Tensor:
    answers = ask(oracle, sequences)
    if answers.ndim not in (2, 3):
        shape = tuple(answers.shape[1:])
        raise Unsuccessful(Status.NOT_APPLICABLE, f"expected vectors, got answers of shape {shape}")
    return answers[:, -1] if answers.ndim == 3 else answers


def read_total(view: Surroundings, length: float, stream: torch.Generator) -> Tensor:
    """`Σ_h M_h` (d×m), and a residual that is not separated yet: one query for each row."""
    d = view.dim
    rows = view.answer(length * torch.eye(d, dtype=torch.float64).unsqueeze(1)) / length
    x = torch.randn(d, generator=stream, dtype=torch.float64)
    x = x * length / torch.linalg.vector_norm(x)
    apart = view.answer(x[None, None])[0] - x @ rows
    if float(apart.abs().max()) > 1e-6 * length * float(rows.abs().max()):
        raise Unsuccessful(Status.NOT_APPLICABLE, "single tokens are not answered by a linear map")
    return rows
