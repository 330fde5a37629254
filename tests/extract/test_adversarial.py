"""Oracles that are no model: whatever the method, they end in a status.

benchmarks/adversarial.py runs more of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from keyhole.extract import Status

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from adversarial import BEHAVIOURS, attack, methods


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_ends_in_a_status(behaviour):
    for seed in range(9):
        every = methods(seed)
        method = every[(seed + BEHAVIOURS.index(behaviour)) % len(every)]
        result = attack(behaviour, seed, method)
        assert result.status is not Status.RECOVERED, (seed, method)
        assert result.status.advice
        assert "\n" not in result.reason
