"""Intervals that hold the truth, whatever errors the answers have."""

from __future__ import annotations

import pytest
import reference_noise as reference
import torch

from keyhole import oracle
from keyhole.extract.intervals import Forms, Interval, best_logit

HEAD = oracle.plant(dim=5, seed=0)


def test_intervals_hold_every_corner():
    stream = torch.Generator().manual_seed(3)
    deltas = torch.nn.functional.normalize(
        torch.randn(4, 5, generator=stream, dtype=torch.float64) + HEAD.v, dim=1
    )
    X = torch.linalg.qr(torch.randn(5, 5, generator=stream, dtype=torch.float64))[0]
    tau = 1e-2
    slack = torch.full((4,), 1e-2, dtype=torch.float64)
    v = Interval.around(HEAD.v, torch.zeros_like(HEAD.v))
    signal = Interval.around(deltas @ HEAD.v, slack)
    forms = Forms(
        oracle.Noisy(HEAD, tau), deltas, X, v, signal, tau, 2.2e-16, 10.0, None
    )
    forms.measure(stream, None)
    truth = deltas @ HEAD.W @ X.mT
    assert bool(
        (forms.interval.low <= truth).all() & (truth <= forms.interval.high).all()
    )
    asked = forms.asked
    for k in range(len(asked.i)):
        i = int(asked.i[k])
        j = int(asked.j[k])
        low, high = reference.corner_forms(
            float(asked.answers[k]),
            tau,
            float(X[j] @ HEAD.v),
            float(signal.middle[i]),
            1e-2,
            float(asked.g[k]),
            float(asked.xi[k]),
        )
        # One answer's corners; the interval is at most a little wider, unless others
        # cut it.
        assert forms.interval.low[i, j] >= low - 0.02 * (high - low)
        assert forms.interval.high[i, j] <= high + 0.02 * (high - low)


def test_best_logit_is_where_the_logit_is_most_precise():
    assert best_logit(1e-9) == pytest.approx(1.5434, abs=0.02)  # z·sinh z = 1 + cosh z
    assert best_logit(0.2) < best_logit(1e-3)
