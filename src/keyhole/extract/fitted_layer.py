"""A one-layer Transformer from coarse answers, by least squares (ours).

`F(X) = wᵀ ReLU(A · attn(X))` as in one_layer.py, whose bisection needs answers that are
exact to many digits. With fewer digits, or a sigmoid on top, weights are fitted, as in
fitted.py. The stages:

    F([x]) + F([−x]) = Σ_i w_i |a_iᵀx|     folds are added one by one, in the best of many random
                                           directions, and all are fitted again each
                                           time; their number is the smallest that
                                           explains the answers
    F([x]) − F([−x]) = (Aᵀw)ᵀx             on which side of its fold each neuron is on: the signs
                                           for which the w_i a_i add up to Aᵀw
    F(X) − F(−X) = (Aᵀw)ᵀattn(X)           W: one head, smooth, starting from W = 0
    all of them                            Gauss–Newton on every answer

If the error of answers is ±τ whatever their size, tokens are made longer: φ(tx) =
tφ(x).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import expect_count
from keyhole.core.float64 import normal, random_stream, zeros
from keyhole.core.numerics import least_squares
from keyhole.extract.arithmetic import rounding
from keyhole.extract.bilinear import random_units
from keyhole.extract.extraction import Step, setting
from keyhole.extract.fitted import (
    UNKNOWNS,
    Asked,
    Fitted,
    Norm,
    misfit,
    scores,
    smallest_error,
    tempered,
    token_size,
)
from keyhole.extract.gauss_newton import refined, uncertainty
from keyhole.extract.relu_network import Folds, neurons
from keyhole.oracle.planted import Head, OneLayer, Parametric
from keyhole.oracle.protocol import Oracle

_DIRECTIONS = 4096  # random directions from which the next fold is chosen
_EACH = 8  # queries for each unknown, of the network and of W
_EXPLAINED = 1.5  # root mean square of residuals, relative to the answers' rounding
_STARTS = 4  # of the search for folds
_ALL = ("W", "A", "w")
_LENGTHS = (2, 3, 4)
_SIDED = 0.1  # relative size of a linear part that signs need not explain

_Part = tuple[
    Tensor, Tensor, Tensor
]  # sequences, an even or odd part of their answers, its errors


@dataclass(frozen=True)
class FittedLayer(Fitted):
    """A one-layer Transformer of one head from coarse answers."""

    width: int = setting(8, "neurons that are tried at most")

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count("width", self.width)

    def expected_queries(self, dim: int) -> int | None:
        del dim

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = random_stream(self.seed)
        dim = oracle.dim
        gain = self.gain(oracle)
        size = token_size(_Odd(oracle), stream, gain, self.precision, Norm())
        tokens = torch.randn(
            _EACH * (self.width + 1) * dim, 1, dim, generator=stream
        ).double()
        asked = self._both_ways(oracle, size * gain / math.sqrt(dim) * tokens)
        even, odd = _parts(asked)
        folds = self._folds(even, stream)
        X, rise, error = odd
        v = least_squares(X[:, 0] / error[:, None], (rise / error)[:, None])[:, 0]
        n = folds.w.abs()[:, None] * folds.A
        sign = folds.w.sign()
        layer, _ = neurons(Folds(n, sign), v / 2, exact=_SIDED)
        A = layer.A
        w = layer.w
        if dim * (dim + len(A)) > UNKNOWNS:
            raise Unsuccessful(
                Status.UNVERIFIED, "the layer is too wide to be fitted at once"
            )
        heads: Asked = []
        for length in _LENGTHS:
            shape = math.ceil(_EACH * dim * dim / len(_LENGTHS) / 2), length, dim
            long = normal(stream, *shape) * size / math.sqrt(dim)
            long = torch.cat([gain * long[:, :-1], long[:, -1:] / gain], 1)
            pairs = self._both_ways(oracle, long)
            heads.append(_parts(pairs)[1])
            asked += pairs
        head = Head(zeros(dim, dim), v)
        for answers in (tempered(heads), heads):
            head = refined(head, ("W", "v"), answers)
        model = OneLayer(head.W, A, w)
        for answers in (tempered(asked), asked):
            model = refined(model, _ALL, answers)
        if (missed := misfit(model, asked)) > _EXPLAINED:
            raise _unexplained(missed, f"a layer with {len(w)} neurons")
        known_by = uncertainty(model, _ALL, asked)
        remark = f"{len(w)} neurons explain the answers"
        yield Step(
            model, model.unknowns, model.unknowns, remark=remark, uncertainty=known_by
        )

    def _both_ways(self, oracle: Oracle, sequences: Tensor) -> Asked:
        """Return answers to X and to −X with their errors, where both are finite."""
        answers = [scores(oracle, sign * sequences) for sign in (1, -1)]
        known = answers[0].isfinite() & answers[1].isfinite()
        asked: Asked = []
        for sign, each in zip((1, -1), answers, strict=True):
            error = rounding(oracle, each[known], self.precision) / math.sqrt(3)
            least = smallest_error(error, each[known])
            asked.append((sign * sequences[known], each[known], error.clamp(min=least)))
        return asked

    def _folds(self, even: _Part, stream: torch.Generator) -> _Folds:
        """Return the fewest folds that explain the even part of the answers to single tokens."""
        least = math.inf
        asked = [even]
        (X, wanted, error) = even
        x = X[:, 0]
        dim = X.shape[2]
        for _ in range(_STARTS):
            folds = _Folds(torch.zeros(0, dim).double(), torch.zeros(0).double())
            for _ in range(self.width):
                left = ((wanted - folds(X)) / error)[:, None]
                some = random_units(_DIRECTIONS, dim, stream)
                heights = (x @ some.mT).abs() / error[:, None]
                square = (heights * heights).sum(0)
                gain = (heights * left).sum(0)
                best = int((gain.square() / square).argmax())
                share = gain[best] / square[best]
                folds = _Folds(
                    torch.cat([folds.A, some[best : best + 1]]),
                    torch.cat([folds.w, share[None]]),
                )
                for answers in (tempered(asked), asked):
                    folds = refined(folds, ("A", "w"), answers)
                missed = misfit(folds, asked)
                least = min(least, missed)
                if missed <= _EXPLAINED:
                    return folds
        raise _unexplained(least, f"{self.width} neurons")


def _parts(both: Asked) -> tuple[_Part, _Part]:
    """Return F(X) + F(−X) and F(X) − F(−X), with their errors."""
    (X, up, above), (_, down, below) = both
    error = torch.hypot(above, below)
    return (X, up + down, error), (X, up - down, error)


def _unexplained(missed: float, what: str) -> Unsuccessful:
    return Unsuccessful(
        Status.UNVERIFIED,
        f"{what} leave residuals {missed:.1e} times the answers' own error: allow more neurons, or "
        "ask for answers with more digits",
    )


@dataclass(frozen=True, eq=False)
class _Folds(Parametric):
    """`Σ_i w_i |a_iᵀx|`, for single tokens."""

    A: Tensor
    w: Tensor
    kind = "folds"

    @property
    def dim(self) -> int:
        return self.A.shape[1]

    def answers(self, tokens: Tensor) -> Tensor:
        return (tokens[:, 0] @ self.A.mT).abs() @ self.w


class _Odd:
    """`F(X) − F(−X)`: one head, whose gates show how long tokens have to be."""

    def __init__(self, inner: Oracle) -> None:
        self.inner = inner
        self.dim = inner.dim

    def __call__(self, sequences: Tensor) -> Tensor:
        return scores(self.inner, sequences) - scores(self.inner, -sequences)
