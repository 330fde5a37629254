"""Solvers of one attention layer, one per file, and the loop over many starts that they share."""
