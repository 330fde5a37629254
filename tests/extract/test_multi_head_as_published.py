"""Many heads as arXiv 2608.03294 has it: its own count of queries, and where float64 ends."""

from __future__ import annotations

import pytest

from keyhole import extract, oracle
from keyhole.extract import Status, same_function


@pytest.mark.parametrize(("d", "heads"), [(1, 1), (3, 1), (4, 2)])
def test_heads_by_interpolation_in_exactly_the_published_number_of_queries(d, heads):
    target = oracle.plant("multi-head", dim=d, heads=heads, seed=1)
    method = extract.MultiHeadAsPublished(heads=heads)
    result = method(target)
    assert result.status is Status.RECOVERED, result.reason
    assert (
        result.queries
        == method.expected_queries(d)
        == 4 * heads * d * d - 2 * heads + 1
    )
    assert same_function(result.model, target, 1e-6)


def test_more_heads_than_digits_allow_are_not_called_recovered():
    for seed in range(3):
        target = oracle.plant("multi-head", dim=4, heads=6, seed=seed)
        result = extract.MultiHeadAsPublished(heads=6, seed=seed)(target)
        assert result.status is not Status.RECOVERED
    # One head more than there are leaves equations without a solution.
    one = oracle.plant("head", dim=3, seed=1)
    assert extract.MultiHeadAsPublished(heads=2)(one).status is not Status.RECOVERED
