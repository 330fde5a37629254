"""Read the input of an attention layer back from its weights and output.

Each method is a class that is called on a `Problem` and returns an `Inversion`.
Recovery of text from whole models lives in keyhole.recover; its names can be imported
from this package too.
"""

from typing import TYPE_CHECKING, Any

from keyhole.invert.derivatives.bounds import Bounds, bounds
from keyhole.invert.derivatives.equations import gradient, jacobian, loss
from keyhole.invert.derivatives.hessian import hessian, hessian_blocks, hessian_product
from keyhole.invert.inversion import Inversion
from keyhole.invert.krawczyk import Certificate, certify
from keyhole.invert.problem import Problem, plant
from keyhole.invert.run import run
from keyhole.invert.solvers.adam import Adam
from keyhole.invert.solvers.auto import Auto
from keyhole.invert.solvers.closed_form import ClosedForm
from keyhole.invert.solvers.gradient_descent import (
    GradientDescent,
    GradientDescentAsPublished,
)
from keyhole.invert.solvers.lbfgs import LBFGS
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.mean_field import mean_field
from keyhole.invert.solvers.modified_newton import ModifiedNewton
from keyhole.invert.solvers.newton_cg import NewtonCG
from keyhole.invert.solvers.regularized_newton import RegularizedNewton
from keyhole.invert.solvers.token_by_token import TokenByToken

__all__ = [
    "LBFGS",
    "Adam",
    "AttentionMaps",
    "AttentionOutput",
    "Auto",
    "Bounds",
    "Certificate",
    "ClosedForm",
    "GradientDescent",
    "GradientDescentAsPublished",
    "HiddenStates",
    "Inversion",
    "KeyValues",
    "Leak",
    "LevenbergMarquardt",
    "Logits",
    "Mark",
    "ModifiedNewton",
    "NewtonCG",
    "Pooled",
    "Problem",
    "RegularizedNewton",
    "TextRecovery",
    "TokenByToken",
    "bounds",
    "certify",
    "degrade",
    "gradient",
    "hessian",
    "hessian_blocks",
    "hessian_product",
    "jacobian",
    "leak_of",
    "load_leak",
    "loss",
    "mean_field",
    "plant",
    "recover_text",
    "recover_texts",
    "recovering",
    "run",
]

if TYPE_CHECKING:
    from keyhole.recover import (
        AttentionMaps,
        AttentionOutput,
        HiddenStates,
        KeyValues,
        Leak,
        Logits,
        Mark,
        Pooled,
        TextRecovery,
        degrade,
        leak_of,
        load_leak,
        recover_text,
        recover_texts,
        recovering,
    )
else:  # imported on demand, because inverting one layer needs no transformers

    def __getattr__(name: str) -> Any:
        if name in __all__:
            from keyhole import recover

            return getattr(recover, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
