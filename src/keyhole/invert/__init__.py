"""Inputs from weights and outputs: one module per idea. Each method is called on a problem."""

from keyhole.invert.adam import Adam
from keyhole.invert.auto import Auto
from keyhole.invert.bounds import Bounds, bounds
from keyhole.invert.causal import TokenByToken
from keyhole.invert.certify import Certificate, certify
from keyhole.invert.closed_form import ClosedForm
from keyhole.invert.end_to_end import EndToEnd
from keyhole.invert.gradient_descent import GradientDescent
from keyhole.invert.hessian import gauss_newton_product, hessian, hessian_product
from keyhole.invert.hessian_blocks import hessian_blocks
from keyhole.invert.inversion import Inversion
from keyhole.invert.layers import Amplification, Layer, Layers, LayersInversion
from keyhole.invert.lbfgs import LBFGS
from keyhole.invert.leaking import degrade, leak_of
from keyhole.invert.leaks import (
    AttentionMaps,
    AttentionOutput,
    HiddenStates,
    KeyValues,
    Leak,
    Pooled,
    load_leak,
    save_leak,
)
from keyhole.invert.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.loss import gradient, jacobian, loss
from keyhole.invert.mean_field import mean_field
from keyhole.invert.modified_newton import ModifiedNewton
from keyhole.invert.newton_cg import NewtonCG
from keyhole.invert.peel import Peel
from keyhole.invert.problem import Problem
from keyhole.invert.regularized_newton import RegularizedNewton
from keyhole.invert.rehearsal import plant
from keyhole.invert.residual_stream import ResidualStream
from keyhole.invert.text import Mark, TextRecovery, recover_text, recover_texts, recovering

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
    "HiddenStates",
    "Inversion",
    "KeyValues",
    "Layer",
    "Layers",
    "LayersInversion",
    "Leak",
    "LevenbergMarquardt",
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
    "load_leak",
    "loss",
    "mean_field",
    "plant",
    "recover_text",
    "recover_texts",
    "recovering",
    "save_leak",
]
