"""Least squares against NumPy's: the same digits every time, and no NaN in LAPACK."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from any_function import normal
from keyhole.core.numerics import LinAlgError, least_squares, with_ridge


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 8),
    rank=st.integers(1, 8),
    sides=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_it_is_the_shortest_that_fits_best(rows, columns, rank, sides, seed):
    """Also if there are few rows, or columns depend on each other."""
    rank = min(rank, rows, columns)
    A = normal(seed, rows, rank) @ normal(seed + 1, rank, columns)
    B = normal(seed + 2, rows, sides)
    wanted = np.linalg.lstsq(A.numpy(), B.numpy(), rcond=1e-10)[0]
    found = least_squares(A, B, rcond=1e-10).numpy()
    scale = max(1.0, np.abs(wanted).max())
    assert np.abs(found - wanted).max() <= 1e-6 * scale


def test_the_quick_way_and_the_careful_way_agree():
    A = normal(0, 9, 4)
    B = normal(1, 9, 2)
    torch.testing.assert_close(least_squares(A, B), least_squares(A, B, rcond=1e-12))
    dependent = torch.cat([A, A[:, :1]], dim=1)
    wanted = np.linalg.pinv(dependent.numpy(), rcond=1e-10) @ B.numpy()
    np.testing.assert_allclose(least_squares(dependent, B).numpy(), wanted, atol=1e-10)


def test_batches():
    A = normal(0, 5, 6, 3)
    B = normal(1, 5, 6, 2)
    for found, a, b in zip(least_squares(A, B), A, B, strict=True):
        torch.testing.assert_close(found, least_squares(a, b))


def test_the_same_digits_every_time():
    A = normal(0, 40, 17)
    B = normal(1, 40, 5)
    first = least_squares(A, B)
    assert all(
        torch.equal(least_squares(A.clone(), B.clone()), first) for _ in range(20)
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_refused(bad):
    A = normal(0, 4, 2)
    B = normal(1, 4, 1)
    A[1, 1] = bad
    with pytest.raises(LinAlgError, match="the answers overflow"):
        least_squares(A, B)
    with pytest.raises(LinAlgError, match="the answers overflow"):
        least_squares(B, A)


def test_a_ridge_makes_any_gram_matrix_solvable():
    stream = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 5, generator=stream, dtype=torch.float64)
    for size in (1.0, 1e-150, 1e150, 0.0):
        square = (size * rows).mT @ (size * rows)
        solved = torch.linalg.solve(with_ridge(square), square)
        assert bool(solved.isfinite().all())
        if size:
            assert torch.allclose(rows @ solved, rows, rtol=0, atol=1e-3)
        else:
            assert not bool(solved.any())
