import pytest

from keyhole import invert, oracle
from keyhole.core.errors import InputError
from keyhole.core.machine import available, expect_memory


def test_what_does_not_fit_is_refused_before_it_is_taken():
    assert 2**20 < available() < 2**60
    expect_memory(2**20, "a megabyte")
    with pytest.raises(InputError, match=r"too much needs 1,000,000 TB of memory"):
        expect_memory(10**18, "too much")


@pytest.mark.parametrize("kind", ["head", "multi-head", "one-layer", "relu", "attention"])
def test_a_target_that_does_not_fit(kind):
    with pytest.raises(InputError, match=f"{kind} of d = 1,000,000,000,000 needs .* of memory"):
        oracle.plant(kind, dim=10**12)


def test_a_problem_that_does_not_fit():
    with pytest.raises(InputError, match=r"1,000,000,000 tokens of d = 2 with 1 heads needs"):
        invert.plant(10**9, 2)
