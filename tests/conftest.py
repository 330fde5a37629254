"""Settings of all tests: threads, seeds, signals, and which tests are slow.

`make check` leaves slow tests out. These are tests that are marked as slow, because they start
processes that load torch, and tests that took long when all were last timed (timings.py).
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from timings import TESTS, name_of, slow_names, write

# Commands that tests start take one thread each: tests run in parallel.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same cases everywhere: what fails for one fails for all, and a landing is not a lottery.
settings.register_profile("keyhole", derandomize=True)
settings.load_profile("keyhole")
# A shell that starts the tests in the background has them ignore Ctrl-C, and whatever they start
# inherits that; here it must work. Ended from outside, tests unwind and end what they started.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.default_int_handler)

# All that is imported stays: to look through it for garbage again and again takes seconds.
gc.disable()

_seconds: dict[str, float] = {}


@pytest.fixture
def root() -> Path:
    """The root folder of the repository."""
    return Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread: for small matrices a second one only waits."""
    import torch  # not for the process that only hands tests to workers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--timings", action="store_true", help="write down in slow.txt what is slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests, and remember all tests before any is deselected."""
    slow = slow_names()
    for item in items:
        if name_of(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)
    config.stash[TESTS] = {item.nodeid: item for item in items}


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        name = name_of(report.nodeid)
        _seconds[name] = max(report.duration, _seconds.get(name, 0.0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("--timings") and not is_worker:
        write(_seconds)
