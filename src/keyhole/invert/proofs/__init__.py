"""Proofs in ball arithmetic that an input has the given output."""
