"""Pieces of ReLU networks: kinks on a half circle, folds, and heads steered to an input."""
