"""Telling heads apart from their scores: the stages of multi_head.py, in the order they run.

far_field, crossings: the directions of `W_h x`. masks: tokens that silence all heads but one.
rays, near_field, columns: one head's parameters. slopes: heads with proportional W.
canonical: what cannot be told apart, and when two sets of heads are one function.
"""
