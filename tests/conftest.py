"""Settings of all tests: threads, seeds, signals, and which tests are slow.

`make check` leaves slow tests out: those marked as slow, because they start processes that load
torch, and those that took long when all were last timed (timings.py).
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
# Draw the same cases everywhere, so that a failure repeats.
settings.register_profile("keyhole", derandomize=True)
settings.load_profile("keyhole")
# A shell that starts the tests in the background makes them and their children ignore Ctrl-C, which
# tests must be able to send. SIGTERM unwinds tests, so that they end their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.default_int_handler)

# Modules stay loaded; without this, every collection would search them for seconds.
gc.disable()

_seconds: dict[str, float] = {}


@pytest.fixture
def root() -> Path:
    """The root folder of the repository."""
    return Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _one_thread():
    """Use one thread: for small matrices a second one only waits."""
    import torch  # not in the process that only distributes tests to workers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--timings", action="store_true", help="write the slow tests into slow.txt")


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
