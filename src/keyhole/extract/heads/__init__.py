"""Telling heads apart from their scores: the stages of multi_head.py, in the order they run.

far_field: the directions of `W_h x`. masks: tokens that silence all heads but one.
rays: the values and `W_h x` of every head, also of heads with proportional W.
"""
