"""Random inversion problems of every kind, for the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from keyhole.invert import Problem


@dataclass(frozen=True)
class Kind:
    """The properties of a problem in addition to W, V and B."""

    n: int = 4
    d: int = 3
    m: int = 3
    heads: int | None = None
    options: frozenset[str] = field(default_factory=frozenset[str])

    def __str__(self) -> str:
        sizes = f"n{self.n}-d{self.d}-m{self.m}-h{self.heads or 1}"
        return "-".join([sizes, *sorted(self.options)])


OPTIONS = ("causal", "residual", "key_bias", "output_bias", "known", "gamma")
KINDS = [
    *(Kind(options=frozenset(chosen)) for chosen in itertools.combinations(OPTIONS, 1)),
    *(
        Kind(heads=2, options=frozenset(chosen))
        for chosen in itertools.combinations(OPTIONS, 5)
    ),
    Kind(),
    Kind(n=1, heads=2),
    Kind(n=5, d=1, m=4),
    Kind(n=2, d=5, m=2, heads=3, options=frozenset({"causal", "key_bias"})),
    Kind(heads=2, options=frozenset(OPTIONS)),
]


def normal(stream: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=stream, dtype=torch.float64)


def draw(kind: Kind, seed: int = 0) -> tuple[Problem, Tensor]:
    """Return a problem of a kind, and an input that is not its solution."""
    stream = torch.Generator().manual_seed(seed)
    lead = () if kind.heads is None else (kind.heads,)
    known = normal(stream, kind.n, kind.d)
    hidden = torch.rand(known.shape, generator=stream, dtype=torch.float64) < 0.6
    known = known.masked_fill(hidden, torch.nan)
    m = kind.d if "residual" in kind.options else kind.m
    problem = Problem(
        W=normal(stream, *lead, kind.d, kind.d) / kind.d**0.5,
        V=normal(stream, *lead, kind.d, m),
        B=normal(stream, kind.n, m),
        key_bias=normal(stream, *lead, kind.d) if "key_bias" in kind.options else None,
        output_bias=normal(stream, m) if "output_bias" in kind.options else None,
        known=known if "known" in kind.options else None,
        causal="causal" in kind.options,
        residual="residual" in kind.options,
        gamma=0.7 if "gamma" in kind.options else 0.0,
    )
    return problem, normal(stream, kind.n, kind.d)


def planted(
    n: int, d: int, seed: int = 0, scale: float = 0.3
) -> tuple[Problem, Tensor]:
    """Return a problem and its true input."""
    stream = torch.Generator().manual_seed(seed)
    W = normal(stream, d, d) * scale / d**0.5
    V = normal(stream, d, d)
    X = normal(stream, n, d)
    problem = Problem(W=W, V=V, B=torch.zeros(n, d, dtype=torch.float64))
    return replace(problem, B=problem.output(X)), X


def plain_loss(problem: Problem, X: Tensor) -> Tensor:
    """Return the loss in its simplest form, which autodiff differentiates."""
    if problem.known is not None:
        X = torch.where(problem.known.isnan(), X, problem.known)
    off = problem.output(X) - problem.B
    return off.square().sum() + problem.gamma * X.square().sum()


def second(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of second derivatives by autodiff."""
    return lambda X: torch.autograd.functional.hessian(function, X)
