"""Least squares on answers: all parameters of any model, or any function with a Jacobian.

If errors are random, solving each answer for one number ignores what the answers show
jointly: for example, every one depends on v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from keyhole.core.least_squares import Options, Point, minimize, qr
from keyhole.oracle.planted import Parametric

# unknowns -> residuals and their Jacobian
Model = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SingleTokens:
    """Sequences of one token (rows of `tokens`) and their answers, `vᵀx`."""

    tokens: Tensor
    answers: Tensor

    def questions(self, rows: slice) -> Tensor:
        return self.tokens[rows].unsqueeze(1)


@dataclass(frozen=True)
class Pairs:
    """Sequences `[ξx_j + gδ_i ; ξx_j]` and their answers; i, j, ξ, g have one entry for each."""

    deltas: Tensor
    xs: Tensor
    i: Tensor
    j: Tensor
    xi: Tensor
    g: Tensor
    answers: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Pairs]) -> Pairs:
        """Join several lists of queries with the same δ and x."""
        columns = zip(*((p.i, p.j, p.xi, p.g, p.answers) for p in parts), strict=True)
        return cls(
            parts[0].deltas, parts[0].xs, *(torch.cat(column) for column in columns)
        )

    def questions(self, rows: slice) -> Tensor:
        last = self.xi[rows, None] * self.xs[self.j[rows]]
        return torch.stack(
            [last + self.g[rows, None] * self.deltas[self.i[rows]], last], dim=1
        )


_BY_QR = Options(solver=qr, shrink=10, grow=10, most=1e8, rtol=1e-3, patience=20)


def levenberg(
    model: Model,
    start: Tensor,
    steps: int = 80,
) -> tuple[Tensor, float]:
    """Run Levenberg–Marquardt on `model(unknowns)`; return the point and its residual norm."""

    def linearize(x: Tensor, _: Tensor) -> Point:
        residuals, J = model(x[0])
        return Point(x, residuals[None], lambda: J[None])

    x, loss = minimize(linearize, start[None], replace(_BY_QR, max_steps=steps))
    return x[0], float(loss) ** 0.5


_Model = TypeVar("_Model", bound=Parametric)
_STEPS = 60
_ROWS = 1024  # of a Jacobian that are held at a time
# relative sum of squares below which the fit stops at steps that gain little
_ROUNDED = 1e-26

# Sequences (b, n, d), their answers (b, …) and the errors of those.
Asked = Sequence[tuple[Tensor, Tensor, Tensor]]


def _by_parameters(
    model: _Model, free: Sequence[str]
) -> tuple[Callable[[Tensor], _Model], Callable[[Tensor, Tensor], Tensor], Tensor]:
    """Return the model as a function of its `free` parameters, its Jacobian, and the parameters."""
    start = {
        name: torch.as_tensor(getattr(model, name), dtype=torch.float64)
        for name in free
    }
    shapes = {name: part.shape for name, part in start.items()}
    kept = {each.name for each in fields(cast("Any", model))}

    def put(flat: Tensor) -> _Model:
        """Return the model with these parameters, unchecked, and without cached values."""
        moved = copy(model)
        parts = flat.split([shape.numel() for shape in shapes.values()])
        for derived in vars(moved).keys() - kept:
            del vars(moved)[derived]
        for (name, shape), part in zip(shapes.items(), parts, strict=True):
            object.__setattr__(moved, name, part.view(shape))
        return moved

    def answer(flat: Tensor, tokens: Tensor) -> Tensor:
        return put(flat).answers(tokens[None]).squeeze(0)

    rows = torch.func.vmap(torch.func.jacrev(answer), in_dims=(None, 0))
    return put, rows, torch.cat([part.flatten() for part in start.values()])


def uncertainty(
    model: Parametric,
    free: Sequence[str],
    asked: Asked,
) -> Callable[[Tensor], Tensor]:
    """Return the standard error of a fitted model's answers, as a function of sequences.

    With J the Jacobian of the fitted answers in units of their errors, it is |L⁻¹j| for
    JᵀJ = LLᵀ.
    """
    _, rows, flat = _by_parameters(model, free)
    none = torch.zeros(sum(y.numel() for _, y, _ in asked), dtype=torch.float64)
    sizes, basis = torch.linalg.eigh(_Answers(flat[None], none, rows, asked).normal[0])
    whitened = basis / sizes.clamp(min=1e-14 * float(sizes[-1])).sqrt()

    def error(sequences: Tensor) -> Tensor:
        j = rows(flat, sequences)
        return torch.linalg.vector_norm(
            (j @ whitened).reshape(len(sequences), -1), dim=1
        )

    return error


class _Answers(Point):
    """Residuals of answers; J is computed for a few rows at a time, and not kept."""

    def __init__(
        self,
        flat: Tensor,
        residuals: Tensor,
        rows: Callable[[Tensor, Tensor], Tensor],
        asked: Asked,
    ) -> None:
        super().__init__(flat, residuals[None])
        self._rows = rows
        self._asked = asked

    @cached_property
    def _both(self) -> tuple[Tensor, Tensor]:
        """JᵀJ and Jᵀr, with J in units of the errors."""
        flat = self.x[0]
        normal = flat.new_zeros(len(flat), len(flat))
        slope = torch.zeros_like(flat)
        sizes = [y.numel() for _, y, _ in self._asked]
        residuals = self.residuals[0].split(sizes)
        for (X, _, error), own in zip(self._asked, residuals, strict=True):
            parts = (X, error, own.view(error.shape))
            for tokens, scale, r in zip(
                *(part.split(_ROWS) for part in parts), strict=True
            ):
                J = (self._rows(flat, tokens) / scale[..., None]).flatten(0, -2)
                normal.addmm_(J.mT, J)
                slope += J.mT @ r.flatten()
        return normal[None], slope[None]

    @cached_property
    def normal(self) -> Tensor:
        return self._both[0]

    def backward(self, r: Tensor) -> Tensor:
        del r  # those at this point
        return self._both[1]


def refined(
    model: _Model,
    free: Sequence[str],
    asked: Asked,
) -> _Model:
    """Fit the `free` parameters of the model to answers, by least squares from their values.

    The Jacobian comes from automatic differentiation, a row for each answer.
    """
    put, rows, flat = _by_parameters(model, free)
    asked = [part for part in asked if len(part[1])]

    def linearize(x: Tensor, _: Tensor) -> Point:
        at = put(x[0])
        parts = [((at.answers(X) - y) / error).flatten() for X, y, error in asked]
        return _Answers(x, torch.cat(parts), rows, asked)

    square = sum(float((y / error).square().sum()) for _, y, error in asked)
    options = Options(
        max_steps=_STEPS, damping=1e-6, rtol=1e-3, floor=_ROUNDED * square, most=1e8
    )
    return put(minimize(linearize, flat[None], options)[0][0])
