"""Shared by all tests: two witnesses of how far a stolen head is from the planted one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Commands that tests start take one thread each: tests run beside each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same cases everywhere: what fails for one fails for all, and a landing is not a lottery.
settings.register_profile("keyhole", derandomize=True)
settings.load_profile("keyhole")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture(autouse=True)
def _one_thread():
    """Small matrices: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
