"""Several heads from labels, against planted truth and a naive bisection of one score."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests import reference

from keyhole import extract, oracle
from keyhole.core.errors import InputError
from keyhole.extract import FittedSigns, Status


def test_two_heads_from_labels():
    target = oracle.plant("multi-head", dim=2, heads=2, seed=2)
    result = FittedSigns(heads=2, accuracy=1e-4)(oracle.SignOnly(target))
    assert result.status is Status.RECOVERED, result.reason
    unit = torch.linalg.vector_norm(sum(target.v))
    truth = oracle.MultiHead(target.W, [v / unit for v in target.v])
    stream = torch.Generator().manual_seed(3)
    fresh = torch.randn(64, 3, 2, generator=stream, dtype=torch.float64)
    off = (result.model(fresh) - truth(fresh)).abs().max() / truth(fresh).abs().max()
    assert off <= 1e-3


def test_a_score_next_to_its_last_token_is_where_the_sign_changes():
    """The docstring's λ² = −Φ/uᵀx, bisected one question at a time."""
    draw = np.random.default_rng(1)
    Ws = draw.normal(size=(2, 3, 3))
    vs = draw.normal(size=(2, 3))
    u = vs.sum(0)
    for _ in range(8):
        x = draw.normal(size=3)
        deltas = draw.normal(size=(2, 3))
        score = reference.multi_head(np.stack([*(x + deltas), x]), Ws, vs)
        if (score - u @ x) * (u @ x) >= 0:
            continue
        low = 1e-6
        high = 1e6
        for _ in range(120):
            scale = np.sqrt(low * high)
            tokens = np.stack([*(scale * x + deltas / scale), scale * x])
            alike = (reference.multi_head(tokens, Ws, vs) > 0) == (u @ x > 0)
            low, high = (low, scale) if alike else (scale, high)
        assert u @ x - low**2 * (u @ x) == pytest.approx(score, abs=1e-9)


def test_labels_of_several_heads_are_no_mismatch():
    """`auto` tries one head first; the sum of these values is zero, which single tokens show."""
    W = oracle.plant("multi-head", dim=3, heads=2, seed=0).W
    v = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    result = extract.Auto()(oracle.SignOnly(oracle.MultiHead(W, [v, -v])))
    assert result.status is not Status.MISMATCH
    with pytest.raises(InputError, match="accuracy must be"):
        FittedSigns(accuracy=0.5)
