"""Settings of all tests: threads, seeds, signals, and which tests are slow.

`make check` leaves slow tests out: those marked as slow, because they start processes
that load torch, and those that took long when `make timings` last timed all (slow.txt).
"""

from __future__ import annotations

import gc
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

# Commands that tests start take one thread each: tests run in parallel.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Draw the same cases everywhere, so that a failure repeats.
settings.register_profile("keyhole", derandomize=True)
settings.load_profile("keyhole")
# A shell that starts the tests in the background makes them and their children ignore
# Ctrl-C, which tests must be able to send. SIGTERM unwinds tests, so that they end
# their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.default_int_handler)

# Modules stay loaded; without this, every collection would search them for seconds.
gc.disable()

QUICK = 0.05  # seconds
SLOW = Path(__file__).with_name("slow.txt")
_HEADER = (
    f"# Tests of which a case took more than {QUICK} s, written by `make timings`: `make check`\n"
    "# leaves them out.\n"
)
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


@pytest.fixture
def keyhole(tmp_path, monkeypatch, capsys):
    """Run a command in the test's folder: `keyhole("audit demo --json")`."""
    import command_line  # loads torch

    return partial(
        command_line.inside, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--timings", action="store_true", help="write the slow tests into slow.txt"
    )


def name_of(node: str) -> str:
    """Return the file and function of a node id, without folders and cases."""
    path, _, rest = node.partition("::")
    return f"{Path(path).name}::{rest.partition('[')[0]}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests before any test is deselected."""
    lines = SLOW.read_text("utf-8").splitlines()
    slow = {line.split()[-1] for line in lines if not line.startswith("#")}
    for item in items:
        if name_of(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)


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
        slow = [
            (seconds, name) for name, seconds in _seconds.items() if seconds > QUICK
        ]
        lines = [
            f"{seconds:6.1f} {name}\n" for seconds, name in sorted(slow, reverse=True)
        ]
        SLOW.write_text(_HEADER + "".join(lines), "utf-8")
