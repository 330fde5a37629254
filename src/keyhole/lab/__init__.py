"""What researchers use: reproductions as published, planted targets, proofs, experiments.

Only the command line imports it.
"""
