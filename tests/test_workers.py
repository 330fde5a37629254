"""Who does the work, without starting anybody: what runs here, and clusters that are not there."""

from __future__ import annotations

import pytest

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.tasks import Here, Pool, cluster, workers_at


def test_here_is_an_executor_of_one():
    here = Here()
    assert here.submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        here.submit(divmod, 7, 0).result()


def test_a_given_executor_is_not_made_again():
    with Pool(Here(), 1) as pool:
        assert pool.executor().submit(abs, -1).result() == 1
        assert not pool.broke()


def test_without_an_address_there_is_no_cluster():
    with cluster(None) as (executor, size):
        assert (executor, size) == (None, 0)


@pytest.mark.parametrize("address", ["nowhere", "tcp://"])
def test_what_is_no_address_is_one_line(address):
    with pytest.raises((InputError, KeyholeError)) as error, workers_at(address):
        pytest.fail("nobody is there")
    assert "\n" not in str(error.value)
