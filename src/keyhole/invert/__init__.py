"""Inputs from weights and outputs: one module per idea. Each method is called on a problem."""

from keyhole.invert.problem import Problem

__all__ = ["Problem"]
