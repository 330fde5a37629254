"""Least squares on answers: all parameters of any model, or any function with a Jacobian.

If errors are random, solving each answer for one number ignores what the answers show
jointly: for example, every one depends on v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from keyhole.core.numerics import least_squares
from keyhole.oracle.planted import Parametric

Model = Callable[
    [Tensor], tuple[Tensor, Tensor]
]  # unknowns -> residuals and their Jacobian


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


def levenberg(model: Model, start: Tensor, steps: int = 80) -> tuple[Tensor, float]:
    """Run Levenberg–Marquardt on `model(unknowns)`; return the point and its residual norm."""
    point = start
    damping = 1e-3
    miss, J = model(point)
    best = mark = float(torch.linalg.vector_norm(miss))
    for turn in range(1, steps + 1):
        if turn % 20 == 0:
            if best > 0.9 * mark:
                break  # a local minimum
            mark = best
        if not bool(torch.isfinite(J).all() & torch.isfinite(miss).all()):
            break  # outside of the model's range
        size = torch.linalg.vector_norm(J, dim=0).clamp(min=1e-12)
        A = torch.cat(
            [J / size, damping**0.5 * torch.eye(len(point), dtype=torch.float64)]
        )
        wanted = torch.cat([-miss, torch.zeros_like(point)]).unsqueeze(1)
        step = least_squares(A, wanted).squeeze(1) / size
        new_miss, new_J = model(point + step)
        reached = float(torch.linalg.vector_norm(new_miss))
        if reached < best:
            done = best - reached < 1e-3 * best and damping < 1e-12
            point = point + step
            miss = new_miss
            J = new_J
            best = reached
            damping = max(damping / 10, 1e-16)
            if done:
                break
        else:
            damping *= 10
            if damping > 1e8:
                break
    return point, best


_Model = TypeVar("_Model", bound=Parametric)
_REFINEMENTS = 30
_ROWS = 1024  # of a Jacobian that are held at a time
_ROUNDED = (
    1e-26  # relative sum of squares below which the fit stops at steps that gain little
)


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
        return put(flat).answers(tokens.unsqueeze(0)).squeeze(0)

    rows = torch.func.vmap(torch.func.jacrev(answer), in_dims=(None, 0))
    return put, rows, torch.cat([part.flatten() for part in start.values()])


def uncertainty(
    model: Parametric,
    free: Sequence[str],
    asked: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> Callable[[Tensor], Tensor]:
    """Return the standard error of a fitted model's answers, as a function of sequences.

    With J the Jacobian of the fitted answers in units of their errors, it is |L⁻¹j| for
    JᵀJ = LLᵀ.
    """
    _, rows, flat = _by_parameters(model, free)
    square, _ = _normal(
        rows, flat, asked, [torch.zeros_like(y).flatten() for _, y, _ in asked]
    )
    sizes, basis = torch.linalg.eigh(square)
    whitened = basis / sizes.clamp(min=1e-14 * float(sizes[-1])).sqrt()

    def error(sequences: Tensor) -> Tensor:
        j = rows(flat, sequences)
        return torch.linalg.vector_norm(
            (j @ whitened).reshape(len(sequences), -1), dim=1
        )

    return error


def _normal(
    rows: Callable[[Tensor, Tensor], Tensor],
    flat: Tensor,
    asked: Sequence[tuple[Tensor, Tensor, Tensor]],
    misses: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return JᵀJ and Jᵀ·misses, with J in units of the errors, a few rows at a time."""
    square = flat.new_zeros(len(flat), len(flat))
    slope = torch.zeros_like(flat)
    for (X, _, error), miss in zip(asked, misses, strict=True):
        parts = (X, error, miss.view(error.shape))
        for some, scale, off in zip(
            *(part.split(_ROWS) for part in parts), strict=True
        ):
            J = (rows(flat, some) / scale.unsqueeze(-1)).flatten(0, -2)
            square.addmm_(J.mT, J)
            slope += J.mT @ off.flatten()
    return square, slope


def refined(
    model: _Model, free: Sequence[str], asked: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> _Model:
    """Fit the `free` parameters of the model to answers, by Levenberg–Marquardt from their values.

    `asked` holds sequences (b, n, d), their answers (b, …) and the errors of those. The
    Jacobian comes from automatic differentiation, a row for each answer.
    """
    put, rows, flat = _by_parameters(model, free)
    asked = [part for part in asked if len(part[1])]
    sizes = [part[1].numel() for part in asked]

    def misses(flat: Tensor) -> Tensor:
        return torch.cat(
            [((put(flat).answers(X) - y) / error).flatten() for X, y, error in asked]
        )

    damping = 1e-6
    miss = misses(flat)
    rounded = _ROUNDED * sum(float((y / error).square().sum()) for _, y, error in asked)
    for _ in range(_REFINEMENTS):
        square, slope = _normal(rows, flat, asked, miss.split(sizes))
        diagonal = square.diagonal()
        diagonal = diagonal.clamp(min=1e-12 * float(diagonal.max().clamp(min=1e-300)))
        before = float(miss @ miss)
        while True:
            step, failed = torch.linalg.solve_ex(
                square + damping * torch.diag(diagonal), slope
            )
            ahead = misses(flat - step)
            if not failed and float(ahead @ ahead) < before:
                break
            damping *= 10
            if damping > 1e8 or before < rounded:
                return put(flat)
        flat = flat - step
        miss = ahead
        damping = max(damping / 10, 1e-14)
        if float(miss @ miss) > (0.25 if before < rounded else 0.999) * before:
            break
    return put(flat)
