"""The interval for hits: against scipy, against plain sums, and by its coverage."""

from __future__ import annotations

from fractions import Fraction

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import reference
from keyhole.core import Estimate
from keyhole.core.errors import InputError
from keyhole.core.finding import hits_in_all


@given(st.data())
def test_against_a_sum_over_every_possibility(data):
    population = data.draw(st.integers(1, 40))
    drawn = data.draw(st.integers(1, population))
    hits = data.draw(st.integers(0, drawn))
    confidence = data.draw(
        st.sampled_from([Fraction(19, 20), Fraction(99, 100), Fraction(1, 2)])
    )
    assert hits_in_all(hits, drawn, population, confidence) == reference.hits_in_all(
        hits, drawn, population, confidence
    )


@pytest.mark.parametrize(
    ("hits", "drawn"), [(0, 20), (17, 20), (20, 20), (178, 200), (3, 7)]
)
def test_a_large_whole_is_clopper_and_pearsons(hits, drawn):
    population = 10**9
    low, high = (count / population for count in hits_in_all(hits, drawn, population))
    exact = scipy.stats.binomtest(hits, drawn).proportion_ci(0.95, method="exact")
    assert low == pytest.approx(exact.low, abs=1e-6)
    assert high == pytest.approx(exact.high, abs=1e-6)


def test_all_that_is_drawn_leaves_no_doubt():
    assert hits_in_all(3, 7, 7) == (3, 3)


def test_it_holds_as_often_as_it_says():
    """The coverage over all samples of 10 from 60, by the hypergeometric distribution."""
    for truth in range(61):
        chances = scipy.stats.hypergeom(60, truth, 10)
        held = sum(
            chances.pmf(hits)
            for hits in range(11)
            if hits <= truth
            and hits_in_all(hits, 10, 60)[0] <= truth <= hits_in_all(hits, 10, 60)[1]
        )
        assert held >= 0.95


@pytest.mark.parametrize(
    "wrong", [(3, 2, 9, 3, 9), (1, 2, 9, 0, 9), (0, 0, 0, 0, 0), (1, 2, 9, 5, 4)]
)
def test_an_estimate_that_cannot_be(wrong):
    with pytest.raises(InputError, match="no sample gives this estimate"):
        Estimate(*wrong)


def test_in_words():
    estimate = Estimate.of(178, 200, 100_000)
    assert str(estimate) == (
        "of 100,000 texts, 84–93% can be read exactly (178 of 200 tried were; 95% confidence)"
    )
    assert Estimate.of(3, 7, 7).share == "43%"
    assert str(Estimate.of(3, 7, 7)) == "of 7 texts, 3 can be read exactly: all tried"
    assert Estimate.of(20, 20, 100_000).share == "83–100%"
    assert Estimate.of(0, 20, 100_000).share == "0–17%"
