import pytest

from keyhole.core.errors import InputError
from keyhole.core.machine import expect_device


@pytest.mark.parametrize("name", ["", "gpu", "meta", "cpu:7", "cuda:99", "cuda:-1"])
def test_a_device_that_nothing_can_be_read_back_from(name):
    expect_device("cpu")
    with pytest.raises(
        InputError, match=rf"{name} is not a device of this machine: choose "
    ):
        expect_device(name)
