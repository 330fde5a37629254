"""A percentage is only 100% for all, and only 0% for nothing."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyhole.core.text import percent


@pytest.mark.parametrize(
    ("share", "decimals", "words"),
    [
        (0.0, 0, "0%"),
        (1.0, 0, "100%"),
        (8 / 9, 0, "89%"),
        (0.996, 0, ">99%"),
        (0.004, 0, "<1%"),
        (0.9996, 1, ">99.9%"),
        (0.0004, 1, "<0.1%"),
        (0.25, 1, "25.0%"),
        (0.00004, 2, "<0.01%"),
    ],
)
def test_how_shares_are_written(share, decimals, words):
    assert percent(share, decimals) == words


@given(st.floats(0, 1), st.integers(0, 3))
@example(1 - 2**-53, 0)
@example(5e-324, 2)
def test_all_and_nothing_are_never_rounded_to(share, decimals):
    written = percent(share, decimals)
    assert (written == f"{1:.{decimals}%}") == (share == 1)
    assert (written == f"{0:.{decimals}%}") == (share == 0)
    assert abs(float(written.strip("<>%")) / 100 - share) <= 10.0 ** -(decimals + 2)
