"""Cliffs of singular values: where they are, and where there is none."""

from __future__ import annotations

import pytest
import torch

from keyhole.extract.arithmetic import decimals_of, exact_decimals
from keyhole.extract.output_layer import cliff


def answers(n, m, rank, noise=0.0, seed=0, decay=1.0):
    draw = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randn(size, rank, generator=draw, dtype=torch.float64) for size in (n, m)
    )
    sizes = decay ** torch.arange(rank, dtype=torch.float64)
    errors = torch.randn(n, m, generator=draw, dtype=torch.float64)
    return (left * sizes) @ right.T + noise * errors


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-4])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_a_cliff_is_seen_once_there_are_answers_behind_it(noise, decay):
    rows = answers(48, 400, 32, noise, decay=decay)
    seen = cliff(rows, 8)
    assert (seen.rank, seen.seen, seen.constant, seen.blocks) == (32, True, False, 0)
    assert seen.above > 10 * seen.below
    for count in (16, 31, 32, 36):  # too few of them behind it, or none
        assert not cliff(rows[:count], 8).seen


@pytest.mark.parametrize("seed", range(5))
def test_rounding_is_told_from_answers_by_its_known_size(seed):
    rows = answers(60, 500, 32, seed=seed)
    for decimals in (0, 1, 2):
        rounded = rows.round(decimals=decimals)
        assert decimals_of(rounded) == decimals
        assert cliff(rounded, 8, 10.0**-decimals).rank == 32
    noise = torch.rand(60, 500, generator=torch.Generator().manual_seed(seed)) - 0.5
    assert (
        cliff(noise.double(), 8, 1.0).rank == 0
    )  # of rounding alone nothing stands out


def test_other_errors_may_be_larger_than_rounding():
    rows = answers(48, 400, 32, 1e-5).round(decimals=6)
    assert (cliff(rows, 8, 1e-6).rank, cliff(rows, 8, 1e-6).seen) == (32, True)


def test_a_constant_and_its_plane():
    rows = answers(48, 400, 31) + torch.linspace(-1, 1, 400, dtype=torch.float64)
    seen = cliff(rows, 8)
    assert (seen.rank, seen.constant) == (32, True)


def test_directions_of_blocks():
    """64 directions, then two far below: one for each 32."""
    rows = answers(90, 400, 64) + 1e-3 * answers(90, 400, 2, seed=1)
    rows += 1e-7 * answers(90, 400, 90, seed=2)
    assert (cliff(rows, 8).rank, cliff(rows, 8).blocks) == (66, 2)
    other = answers(90, 400, 66) + 1e-7 * answers(90, 400, 90, seed=2)
    assert (cliff(other, 8).rank, cliff(other, 8).blocks) == (66, 0)  # a width of 66


def test_digits_are_counted():
    values = torch.linspace(-30, -0.1, 999, dtype=torch.float64) ** 3 / 900
    assert decimals_of(values) is None
    assert decimals_of(values.float().double()) is None
    for decimals in range(7):
        assert decimals_of(values.round(decimals=decimals)) == decimals
    for decimals in range(4):  # written as float32
        assert decimals_of(values.round(decimals=decimals).float().double()) == decimals


@pytest.mark.parametrize("scale", [1e-12, 1e-9, 1e-7, 1e-3, 1, 1e3, 1e6, 1e8, 1e12])
def test_no_scale_is_taken_for_rounding(scale):
    values = scale * torch.randn(
        8, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    assert decimals_of(values) is None
    assert exact_decimals(values) is None
    if scale < 1e12:  # such large numbers of float32 are whole
        assert decimals_of(values.float().double()) is None
    if scale >= 1e3:
        assert decimals_of(values.round()) == exact_decimals(values.round()) == 0


def test_small_answers_are_not_rounded_ones():
    values = torch.tensor([3.1e-9, -2e-8], dtype=torch.float64)
    assert exact_decimals(values) is None
    assert exact_decimals(1e-300 * values) is None
    mixed = torch.tensor([0.0, 0.3, 0.3 - 0.1 - 0.2, -1.25], dtype=torch.float64)
    assert exact_decimals(mixed) == 2
    assert exact_decimals(1e5 * mixed) == 0
    assert exact_decimals(0 * mixed) == 0
