"""Positions of numbers along an axis, also of the largest and smallest floats."""

from __future__ import annotations

import math

import pytest

from keyhole.report.page import SMALLEST, Axis


def test_powers_of_ten_are_equally_far_apart():
    axis = Axis.around([1, 1000], 0, 300)
    assert [axis.place(value) for value in (1, 10, 100, 1000)] == [0, 100, 200, 300]
    assert axis.ticks == [(0, 0), (100, 1), (200, 2), (300, 3)]


@pytest.mark.parametrize(
    "values", [[0.0], [5e-324], [1.7e308], [0.0, 1.7e308], [1.0], [7.0, 7.0]]
)
def test_any_finite_numbers_stand_inside(values):
    axis = Axis.around(values, 10, 200)
    for value in values:
        assert 10 <= axis.place(value) <= 200
    assert len(axis.ticks) >= 2
    assert all(10 <= at <= 200 and math.isfinite(mark) for at, mark in axis.ticks)


def test_nothing_stands_where_the_smallest_does():
    assert Axis.around([0.0, 1.0], 0, 100).place(0.0) == 0
    assert SMALLEST > 0
