"""The derivatives of the inversion loss in closed form, and the paper's bounds on them."""
