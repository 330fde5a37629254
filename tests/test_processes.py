"""Processes that tests start end with them, and receive Ctrl-C even if tests ignore it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import warm_process
from command_line import finished, started

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("pid", "w") as file:
    file.write(f"{child.pid}\\n")
time.sleep(600)
"""


def expect_family_to_end(cwd, process_started):
    """A test fails that has started a process with a child, both of which would run for long."""
    note = cwd / "pid"
    with pytest.raises(ZeroDivisionError), process_started:
        fail_once_there_is(note)
    wait_until(lambda: not is_alive(int(note.read_text())), 10)


def fail_once_there_is(note: Path) -> None:
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"), 60)
    raise ZeroDivisionError


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(process)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return not state.startswith(
        "Z"
    )  # one that has ended, and that nobody has asked about


def test_a_process_and_its_children_end_with_the_test(tmp_path):
    expect_family_to_end(
        tmp_path, started([sys.executable, "-c", FAMILY], cwd=tmp_path)
    )


@pytest.mark.slow
def test_a_warm_process_and_its_children_end_with_the_test(tmp_path):
    expect_family_to_end(
        tmp_path, warm_process.started(warm_process.code, FAMILY, cwd=tmp_path)
    )


def test_ctrl_c_is_heard(tmp_path):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert finished([sys.executable, "-c", code], cwd=tmp_path).stdout == "True\n"


@pytest.mark.release
def test_ctrl_c_is_heard_in_tests_that_a_shell_started_in_the_background(
    root, tmp_path
):
    test = f"{root / 'tests/test_processes.py'}::test_ctrl_c_is_heard"
    pytest_itself = (
        f"{sys.executable} -m pytest -p no:cacheprovider --basetemp={tmp_path} {test}"
    )
    ignoring = ["sh", "-c", f"trap '' INT; exec {pytest_itself}"]
    done = finished(ignoring, cwd=root)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
