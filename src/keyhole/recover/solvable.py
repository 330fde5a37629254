"""Where a model's numbers leave the equations of an attack without a solution, it ends in a status.

Weights that overflow or are no numbers make decompositions fail, and torch then raises. It is the
model that makes this attack impossible, not a fault here, and nothing follows for the exposure.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch import Tensor, nn

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.numerics import LinAlgError


@contextmanager
def solvable(model: nn.Module) -> Generator[None]:
    """Ends the attack inside with a status where an equation has no solution."""
    try:
        yield
    except LinAlgError as error:
        raise Unsuccessful(Status.NOT_APPLICABLE, _reason(model, error)) from error


def expect_numbers(model: nn.Module, given: Iterable[Tensor]) -> None:
    """Refuse a model that gives something else than numbers: nothing can leak from it."""
    if all(bool(each.isfinite().all()) for each in given):
        return
    name = _not_finite(model)
    cause = "they overflow" if name is None else f"its weights hold some, in {name}"
    raise InputError(f"expected numbers from the model, got NaN or infinity: {cause}")


def _reason(model: nn.Module, error: Exception) -> str:
    name = _not_finite(model)
    if name is not None:
        return f"the model's weights hold NaN or infinity, in {name}: nothing can be solved for"
    words = " ".join(str(error).split())[:200]
    return f"the equations of this attack have no solution for this model: {words}"


def _not_finite(model: nn.Module) -> str | None:
    """The first weight that holds something else than numbers."""
    weights = model.named_parameters()
    return next((name for name, each in weights if not bool(each.isfinite().all())), None)
