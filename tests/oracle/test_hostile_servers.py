"""Whatever a server does, it ends in a one-line error, in bounded memory and time.

A dozen of the cases run by default; KEYHOLE_FULL=1 runs them all.
"""

from __future__ import annotations

import os
import random
import re
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hostile import DIM, Server, repeated
from hostile_attack import attack, resident
from hostile_cases import cases

from keyhole.core.errors import InputError
from keyhole.oracle import OpenInference, OracleError

CASES = cases()
SAMPLE = (
    CASES if os.environ.get("KEYHOLE_FULL") else random.Random(17).sample(CASES, 12)
)
MEMORY = 500e6
SECONDS = 30.0  # beyond the timeout, since other programs share the two cores


def test_the_table_is_long_and_names_each_case_once():
    assert len(CASES) >= 200
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc"
)
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_hostile_server_ends_in_a_one_line_error(case):
    threads = threading.active_count()
    error, seconds, memory = attack(case)
    assert isinstance(error, InputError | OracleError), repr(error)
    line = str(error)
    assert "127.0.0.1" in line  # it names the server
    assert line.isprintable()
    assert len(line) < 600
    assert re.search(case.match, line)
    assert seconds < case.timeout + SECONDS
    assert memory < MEMORY
    assert threading.active_count() == threads


@pytest.mark.release
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc"
)
def test_several_large_answers_share_the_memory_bound():
    numbers = repeated(
        b'{"outputs": [{"shape": [1], "data": [', b"0.25,", 3_999_000, b"1]}]}"
    )
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with (
        Server(numbers, "infer") as server,
        closing(
            OpenInference(server.url, "m", batch=1, retries=0, connections=4)
        ) as remote,
        pytest.raises(OracleError, match="expected 1 numbers"),
    ):
        remote(torch.zeros(4, 3, DIM, dtype=torch.float64))
    assert server.inferences == 4
    assert resident("VmHWM") - before < MEMORY
