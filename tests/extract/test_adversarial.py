"""200 seeded oracles that are no model: whatever the method, they end in a status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from keyhole.extract import Status

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from adversarial import BEHAVIOURS, attack, methods


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("turn", range(4))
def test_ends_in_a_status(behaviour, turn):
    for seed in range(10 * turn, 10 * turn + 10):
        every = methods(seed)
        method = every[(seed + BEHAVIOURS.index(behaviour)) % len(every)]
        result = attack(behaviour, seed, method)
        assert result.status is not Status.RECOVERED, (seed, method)
        assert result.status.advice
        assert "\n" not in result.reason
