"""Extraction over the network, from a real MLServer on the loopback address."""

from __future__ import annotations

import re
from contextlib import closing

import pytest
import torch
from hostile import Server, raw

import served_target
from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.oracle import OpenInference, OracleError

pytestmark = pytest.mark.slow  # a server


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A planted head behind MLServer, stopped when the tests are done."""
    target = oracle.plant(dim=8, seed=3)
    with served_target.served(target, tmp_path_factory.mktemp("served")) as url:
        yield url, target


def test_answers_cross_the_network_in_full_precision(served):
    url, target = served
    remote = OpenInference(url, "target", batch=7)
    assert remote.dim == 8
    sequences = torch.randn(20, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(
        remote(sequences), target(sequences), rtol=1e-14, atol=1e-14
    )
    remote.close()


def test_a_head_is_stolen_over_the_network(served, tmp_path):
    url, target = served
    with (
        closing(OpenInference(url, "target")) as remote,
        oracle.Ledger(remote, tmp_path / "run.db") as ledger,
    ):
        result = extract.SingleHead()(ledger)
    assert result.status is Status.RECOVERED
    assert torch.allclose(result.model.W, target.W, rtol=0, atol=1e-12)


def test_a_refusal_of_the_server_is_a_one_line_error(served):
    url, _ = served
    with pytest.raises(OracleError, match="status 404") as caught:
        OpenInference(url, "nobody")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="has dimension 8, not 9"):
        OpenInference(url, "target", dim=9)
    with pytest.raises(InputError, match="expected a URL"):
        OpenInference("localhost", "target")
    remote = OpenInference(url, "target")
    with pytest.raises(
        InputError, match=re.escape("expected sequences of shape (batch, n, 8)")
    ):
        remote(torch.zeros(1, 2, 9, dtype=torch.float64))
    remote.close()


def test_a_dead_server_ends_in_a_status():
    with Server(raw(), "none") as server:
        remote = OpenInference(server.url, "m", retries=1, timeout=2)
    with closing(remote):
        result = extract.SingleHead()(remote)
    assert result.status is Status.ORACLE_FAILED
