import math

import pytest

from keyhole.core.errors import InputError, expect_count, expect_number, expect_seed


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_a_seed_has_32_bits(seed):
    expect_seed(0)
    expect_seed(2**32 - 1)
    with pytest.raises(
        InputError, match=f"a seed must be from 0 to 4,294,967,295, not {seed}"
    ):
        expect_seed(seed)


def test_counts_have_both_ends():
    expect_count("texts", None)
    expect_count("texts", 1)
    with pytest.raises(InputError, match="texts must be 1 or more, not 0"):
        expect_count("texts", 0)
    with pytest.raises(
        InputError, match="texts must be at most 9,223,372,036,854,775,807"
    ):
        expect_count("texts", 2**63)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_numbers_are_finite(value):
    expect_number("rate", 0.0, least=0)
    for bounds in ({"least": 0}, {"above": 0}):
        with pytest.raises(InputError, match="rate must be"):
            expect_number("rate", value, **bounds)
