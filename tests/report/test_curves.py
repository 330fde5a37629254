"""Positions on logarithmic axes, against logarithms by hand."""

from __future__ import annotations

import math

import pytest

from exposures import called
from keyhole.core import Finding, Status
from keyhole.report.page import HEIGHT, SMALLEST, WIDTH, curve


def finding(trace, bound=None) -> Finding:
    return Finding(
        called("full scores"),
        "A",
        Status.RECOVERED,
        "",
        "",
        None,
        1,
        0.0,
        bound,
        1.0,
        tuple(trace),
    )


def test_points_stand_where_their_logarithms_are():
    drawn = curve(finding([(10, 1.0), (100, 1e-5), (4000, 1e-10)], bound=1000))
    assert (drawn.across.low, drawn.across.high, drawn.up.low, drawn.up.high) == (
        1,
        4,
        -10,
        0,
    )
    wide = drawn.across.end - drawn.across.begin
    high = drawn.up.begin - drawn.up.end
    left = drawn.across.begin
    top = drawn.up.end
    expected = [
        (left, top),
        (left + wide / 3, top + high / 2),
        (left + wide * (math.log10(4000) - 1) / 3, top + high),
    ]
    for point, wanted in zip(drawn.points, expected, strict=True):
        assert point == pytest.approx(wanted, abs=0.1)
    assert drawn.bound == pytest.approx(left + wide * 2 / 3, abs=0.1)
    assert drawn.about == (
        "Error 1.0e+00 after 10 queries, 1.0e-10 after 4,000; the lower bound is 1,000."
    )
    assert [power for _, power in drawn.across.ticks] == [1, 2, 3, 4]
    assert len(drawn.up.ticks) <= 8


@pytest.mark.parametrize(
    "trace",
    [
        [(1, 0.0)],
        [(0, 1.0), (5, 1.0)],
        [(-3, -1.0)],
        [(10**400, 1e300)],
        [(n, 1.0 / n) for n in range(1, 5000)],
        [(1, math.nan), (2, 1.0)],
    ],
)
def test_whatever_a_file_says_stays_in_the_picture(trace):
    drawn = curve(finding(trace, bound=10**400))
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in drawn.points)
    assert 1 <= len(drawn.points) <= 301
    assert drawn.bound is None


def test_no_trace_no_picture():
    assert curve(finding([])) is None
    assert curve(finding([(1, math.inf)])) is None
    assert curve(finding([(2, SMALLEST)], bound=0)).bound is None
