"""Inputs from weights and outputs: one module per idea. Each method is called on a problem."""

from keyhole.invert.inversion import Inversion
from keyhole.invert.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.mean_field import mean_field
from keyhole.invert.problem import Problem
from keyhole.invert.rehearsal import plant

__all__ = ["Inversion", "LevenbergMarquardt", "Problem", "mean_field", "plant"]
