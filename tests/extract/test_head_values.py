"""The values of several heads, separated by what their sum leaves."""

from __future__ import annotations

import torch
from planted_layers import layer

from keyhole.extract.full_output import open_vectors, separate_values
from keyhole.oracle import Counted


def test_values_are_separated_with_few_queries():
    truth = layer(10, 3, 10, False)
    counted = Counted(truth)
    vectors, total = open_vectors(counted)
    V = separate_values(vectors, total, torch.Generator().manual_seed(0))
    assert len(V) == 3
    for V_h in truth.V:
        assert min(float((V_h - found).abs().max()) for found in V) < 1e-11
    assert counted.queries <= 10 + 16 * 3 + 4 * 10
