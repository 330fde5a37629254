"""Methods by the names that people type."""

from __future__ import annotations

from typing import Protocol

import torch

from keyhole.errors import InputError
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.adam import Adam
from keyhole.invert.solvers.auto import Auto
from keyhole.invert.solvers.closed_form import ClosedForm
from keyhole.invert.solvers.gradient_descent import GradientDescent
from keyhole.invert.solvers.lbfgs import LBFGS
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.modified_newton import ModifiedNewton
from keyhole.invert.solvers.multistart import Watch
from keyhole.invert.solvers.newton_cg import NewtonCG
from keyhole.invert.solvers.regularized_newton import RegularizedNewton

_SEARCHES = {
    "levenberg-marquardt": LevenbergMarquardt,
    "newton-cg": NewtonCG,
    "modified-newton": ModifiedNewton,
    "regularized-newton": RegularizedNewton,
    "lbfgs": LBFGS,
    "adam": Adam,
    "gradient-descent": GradientDescent,
}
NAMES = ("auto", *_SEARCHES, "closed-form")


class Called(Protocol):
    def __call__(self, problem: Problem, *, watch: Watch | None = None) -> Inversion: ...


def named(
    name: str,
    *,
    starts: int = 256,
    solutions: int = 16,
    seconds: float | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Called:
    """The method called `name`."""
    if starts < 1 or solutions < 1:
        raise InputError(f"expected at least one start and one solution, got {starts}, {solutions}")
    if seconds is not None and not seconds > 0:
        raise InputError(f"expected more than 0 seconds, got {seconds}")
    _check_device(device)
    if name == "closed-form":
        return ClosedForm(method=LevenbergMarquardt(seconds=seconds, seed=seed, device=device))
    if name == "auto":
        return Auto(starts=starts, solutions=solutions, seconds=seconds, seed=seed, device=device)
    if name not in _SEARCHES:
        raise InputError(f"expected a method among {', '.join(NAMES)}, got {name}")
    return _SEARCHES[name](
        starts=starts, solutions=solutions, seconds=seconds, seed=seed, device=device
    )


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch says it in one way or the other
        raise InputError(f"expected a device of this machine (cpu), got {device}") from error
