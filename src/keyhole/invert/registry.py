"""The methods of inversion by name, and the exposures on which the audit tries them.

To add a method, write the solver in its own module and add one entry to METHODS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from keyhole.core.exposure import Exposure
from keyhole.core.registry import Entry, Registry
from keyhole.invert.solvers.adam import Adam
from keyhole.invert.solvers.auto import Auto
from keyhole.invert.solvers.closed_form import ClosedForm
from keyhole.invert.solvers.gradient_descent import (
    GradientDescent,
    GradientDescentAsPublished,
)
from keyhole.invert.solvers.lbfgs import LBFGS
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.modified_newton import ModifiedNewton
from keyhole.invert.solvers.multistart import Solve
from keyhole.invert.solvers.newton_cg import NewtonCG
from keyhole.invert.solvers.regularized_newton import RegularizedNewton
from keyhole.invert.solvers.token_by_token import TokenByToken

STARTS = 256  # the default number of starts of a named method


@dataclass(frozen=True)
class Row:
    """One exposure that the audit tries a method on.

    The layer's output is rounded to `decimals`. `maps` says whether the attention maps
    leak with it. `settings` are the method's hyperparameters in the audit.
    """

    exposure: Exposure
    remedy: str
    maps: bool = False
    decimals: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


_OUTPUT = (
    "Keep the outputs of layers inside; return what is computed from the last of them."
)
_MAPS = "Do not return attention maps with outputs: both are linear equations."
_ROUNDED = "Rounding hides the input of a badly conditioned layer only: keep the outputs inside."
_output = partial(Exposure, "KH-INPUTS-LAYER-OUTPUT")
_PUBLISHED = "Gradient descent with a fixed step, as published (Section 3.2)."
_BRIEF = {"starts": 16, "seconds": 60.0}


def closed_form(
    seconds: float | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> ClosedForm:
    """Make a ClosedForm whose final search, for rounded maps, has these options."""
    return ClosedForm(
        method=LevenbergMarquardt(seconds=seconds, device=device, seed=seed)
    )


def _search(
    name: str,
    method: type[Solve],
    note: str = "",
) -> Entry[Solve, Row]:
    """Return the entry of a search from many starts."""
    return Entry(name, partial(method, starts=STARTS), method=method, note=note)


METHODS: Registry[Solve, Row] = Registry(
    Entry(
        "auto",
        Auto,
        (
            Row(_output(), _OUTPUT, settings=_BRIEF),
            Row(
                _output(defences=("decimals-3",)), _ROUNDED, decimals=3, settings=_BRIEF
            ),
            Row(
                Exposure("KH-INPUTS-ATTENTION-MAPS"), _MAPS, maps=True, settings=_BRIEF
            ),
        ),
    ),
    _search("levenberg-marquardt", LevenbergMarquardt),
    _search("newton-cg", NewtonCG),
    _search("modified-newton", ModifiedNewton),
    _search("regularized-newton", RegularizedNewton),
    _search("lbfgs", LBFGS),
    _search("adam", Adam),
    _search("gradient-descent", GradientDescent),
    _search("gradient-descent-as-published", GradientDescentAsPublished, _PUBLISHED),
    Entry("closed-form", closed_form, method=ClosedForm),
    Entry("token-by-token", TokenByToken),
)
