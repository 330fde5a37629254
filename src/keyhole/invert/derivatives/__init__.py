"""First and second derivatives of the loss, in closed form, and the bounds of the paper."""
