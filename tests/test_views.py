"""The slot through which results show themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keyhole.core import result as views


@pytest.fixture(autouse=True)
def _restored():
    before = list(views._views)
    yield
    views._views[:] = before


def test_the_last_that_was_given_shows():
    views.show_with(lambda result: f"first {result}")
    views.show_with(lambda result: f"second {result}")
    assert views.shown("result") == "second result"


def test_where_nobody_draws_it_is_left_to_repr():
    views._views.clear()
    assert views.shown("result") is None


def test_the_package_fills_it_and_loads_nothing():
    code = "import keyhole, sys; print(len(keyhole.core.result._views), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]
