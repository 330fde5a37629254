"""Inputs from weights and outputs: one module per idea. Each method is called on a problem.

What reads text from a whole model's leaks is keyhole.recover; its names can be had from here too.
"""

from typing import TYPE_CHECKING, Any

from keyhole.invert.derivatives.bounds import Bounds, bounds
from keyhole.invert.derivatives.hessian import gauss_newton_product, hessian, hessian_product
from keyhole.invert.derivatives.hessian_blocks import hessian_blocks
from keyhole.invert.derivatives.loss import gradient, jacobian, loss
from keyhole.invert.inversion import Inversion
from keyhole.invert.planted import plant, plant_layers
from keyhole.invert.problem import Problem
from keyhole.invert.proofs.certify import Certificate, certify
from keyhole.invert.run import run, run_layers
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
from keyhole.invert.solvers.token_by_token import TokenByToken
from keyhole.invert.structure.layers import Amplification, Layer, Layers, LayersInversion
from keyhole.invert.structure.layers_file import load_layers, save_layers
from keyhole.invert.structure.mean_field import mean_field

__all__ = [
    "LBFGS",
    "Adam",
    "Amplification",
    "AttentionMaps",
    "AttentionOutput",
    "Auto",
    "Bounds",
    "Certificate",
    "ClosedForm",
    "EndToEnd",
    "GradientDescent",
    "GradientDescentAsPublished",
    "HiddenStates",
    "Inversion",
    "KeyValues",
    "Layer",
    "Layers",
    "LayersInversion",
    "Leak",
    "LevenbergMarquardt",
    "Logits",
    "Mark",
    "ModifiedNewton",
    "NewtonCG",
    "Peel",
    "Pooled",
    "Problem",
    "RegularizedNewton",
    "ResidualStream",
    "TextRecovery",
    "TokenByToken",
    "bounds",
    "certify",
    "degrade",
    "gauss_newton_product",
    "gradient",
    "hessian",
    "hessian_blocks",
    "hessian_product",
    "jacobian",
    "leak_of",
    "load_layers",
    "load_leak",
    "loss",
    "mean_field",
    "plant",
    "plant_layers",
    "recover_text",
    "recover_texts",
    "recovering",
    "run",
    "run_layers",
    "save_layers",
    "save_leak",
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
        recover_texts,
        recovering,
        save_leak,
    )
else:  # on demand: an inversion of one layer needs no transformers

    def __getattr__(name: str) -> Any:
        if name in __all__:
            from keyhole import recover

            return getattr(recover, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
