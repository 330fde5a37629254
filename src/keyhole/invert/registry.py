"""Every method of inversion under the name that people type, and what the audit tries it on.

To add one, write the solver in its own module and add one entry to METHODS.
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
from keyhole.invert.solvers.end_to_end import EndToEnd
from keyhole.invert.solvers.gradient_descent import GradientDescent
from keyhole.invert.solvers.gradient_descent_as_published import GradientDescentAsPublished
from keyhole.invert.solvers.lbfgs import LBFGS
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.modified_newton import ModifiedNewton
from keyhole.invert.solvers.newton_cg import NewtonCG
from keyhole.invert.solvers.peel import Peel
from keyhole.invert.solvers.regularized_newton import RegularizedNewton
from keyhole.invert.solvers.residual_stream import ResidualStream
from keyhole.invert.solvers.solver import Solve
from keyhole.invert.solvers.token_by_token import TokenByToken
from keyhole.invert.structure.layers import SolveLayers

STARTS = 256  # of every search from many starts, unless told otherwise


@dataclass(frozen=True)
class Row:
    """One exposure that the audit tries a method on: what of a layer's work is handed out.

    `decimals` is how far the output is rounded, `maps` whether the attention maps come with it;
    `settings` are the method's hyperparameters there.
    """

    exposure: Exposure
    remedy: str
    maps: bool = False
    decimals: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


_OUTPUT = "Keep the outputs of layers inside; return what is computed from the last of them."
_MAPS = "Do not return attention maps beside outputs: together they are linear equations."
_ROUNDED = "Rounding hides the input of a badly conditioned layer only: keep the outputs inside."
_output = partial(Exposure, "KH-INPUTS-LAYER-OUTPUT")
_BRIEF = {"starts": 16, "seconds": 60.0}


def closed_form(seconds: float | None = None, device: str = "cpu", seed: int = 0) -> ClosedForm:
    """The options are those of the search for the last digits, where maps were rounded."""
    return ClosedForm(method=LevenbergMarquardt(seconds=seconds, device=device, seed=seed))


def peel(
    starts: int = 64,
    solutions: int = 4,
    branches: int = 8,
    seconds: float | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Peel:
    """The options are those of the search at each layer, but for `branches`."""
    search = LevenbergMarquardt(
        starts=starts, steps=200, solutions=solutions, seconds=seconds, device=device, seed=seed
    )
    return Peel(search, branches)


def end_to_end(starts: int = 32, seed: int = 0) -> EndToEnd:
    return EndToEnd(LevenbergMarquardt(starts=starts, seed=seed))


def _search(name: str, method: type[Solve]) -> Entry[Solve, Row]:
    """A search from many starts."""
    return Entry(name, partial(method, starts=STARTS), method=method)


METHODS: Registry[Solve, Row] = Registry(
    "method",
    Entry("auto", Auto, (
        Row(_output(), _OUTPUT, settings=_BRIEF),
        Row(_output(defences=("decimals-3",)), _ROUNDED, decimals=3, settings=_BRIEF),
        Row(Exposure("KH-INPUTS-ATTENTION-MAPS"), _MAPS, maps=True, settings=_BRIEF),
    )),
    _search("levenberg-marquardt", LevenbergMarquardt),
    _search("newton-cg", NewtonCG),
    _search("modified-newton", ModifiedNewton),
    _search("regularized-newton", RegularizedNewton),
    _search("lbfgs", LBFGS),
    _search("adam", Adam),
    _search("gradient-descent", GradientDescent),
    _search("gradient-descent-as-published", GradientDescentAsPublished),
    Entry("closed-form", closed_form, method=ClosedForm),
    Entry("token-by-token", TokenByToken),
    Entry("residual-stream", ResidualStream),
)  # fmt: skip

# Several layers, of which only the last output is known; the audit looks at single layers.
STACK_METHODS: Registry[SolveLayers, Row] = Registry(
    "method",
    Entry("peel", peel, method=Peel),
    Entry("end-to-end", end_to_end, method=EndToEnd),
)
