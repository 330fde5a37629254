"""The limits of a server are stated in errors, can be raised, and let good answers through."""

from __future__ import annotations

import json
import socket
import zlib
from contextlib import closing

import pytest
import torch
from hostile import DIM, METADATA, Server, answer, raw

from keyhole.core.errors import InputError
from keyhole.endpoints import open_endpoint
from keyhole.oracle import Limits, OpenInference, OracleError

QUESTIONS = torch.zeros(4, 3, DIM, dtype=torch.float64)


def _metadata(dim):
    return answer(
        json.dumps(METADATA | {"inputs": [{"name": "x", "shape": [-1, -1, dim]}]})
    )


def test_a_dimension_beyond_the_limit_can_be_requested():
    for asked in ({"dim": 20_000}, {"limits": Limits(dim=20_000)}):
        with (
            Server(_metadata(20_000), "metadata") as server,
            closing(OpenInference(server.url, "m", **asked)) as remote,
        ):
            assert remote.dim == 20_000


def test_limits_apply_to_a_target_given_by_its_address():
    with Server(_metadata(20), "metadata") as server:
        with pytest.raises(
            OracleError,
            match=r"dimension 20, above the limit of 10: give --endpoint dim",
        ):
            open_endpoint(f"{server.url}/v2/models/m", Limits(dim=10))
        with closing(open_endpoint(f"{server.url}/v2/models/m/versions/1")) as remote:
            assert remote.dim == 20


def test_the_error_states_a_smaller_body_limit():
    stated = r"has more than 50 bytes \(Content-Length \d+\): raise Limits\(body=\)"
    with Server(raw(), "none") as server, pytest.raises(OracleError, match=stated):
        OpenInference(server.url, "m", limits=Limits(body=50))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "bare"])
def test_a_compressed_answer_is_decompressed(coding):
    packer = zlib.compressobj(wbits={"gzip": 31, "deflate": 15, "bare": -15}[coding])
    body = packer.compress(json.dumps(METADATA).encode()) + packer.flush()
    name = "deflate" if coding == "bare" else coding
    behave = answer(body, 200, f"Content-Encoding: {name}")
    with (
        Server(behave, "metadata") as server,
        closing(OpenInference(server.url, "m")) as remote,
    ):
        assert remote.dim == DIM


@pytest.mark.parametrize("connections", [1, 2])
def test_connections_are_reused(connections):
    with (
        Server(raw(), "none") as server,
        closing(
            OpenInference(server.url, "m", batch=1, connections=connections)
        ) as remote,
    ):
        for _ in range(3):
            assert torch.equal(
                remote(QUESTIONS), torch.full((4,), 0.5, dtype=torch.float64)
            )
        assert server.inferences == 12
        assert server.connections <= connections


def test_long_questions_are_spread_over_requests_that_fit():
    limits = Limits(body=2 * 25 * 3 * DIM)  # an answer of one sequence, twice as wide
    with (
        Server(raw(), "none") as server,
        closing(OpenInference(server.url, "m", limits=limits)) as remote,
    ):
        assert len(remote(QUESTIONS)) == 4
        assert server.inferences == 4


@pytest.mark.parametrize("connections", [1, 4])
def test_answers_besides_a_failure_are_kept(connections):
    with (
        Server(answer("no", 500), "later") as server,
        closing(
            OpenInference(server.url, "m", batch=2, retries=0, connections=connections)
        ) as remote,
        pytest.raises(OracleError, match="status 500: no") as caught,
    ):
        remote(QUESTIONS)
    answers = caught.value.answers
    assert answers is not None
    # Either of two concurrent requests may be the second to arrive.
    assert answers[answers.isfinite()].tolist() == [0.5, 0.5]
    if connections == 1:
        assert answers.tolist() == [0.5, 0.5]


def test_a_transient_failure_is_retried():
    good = answer(json.dumps(METADATA))
    garbage = answer("<html>")
    replies = iter(
        [answer("", 503, "Retry-After: 1"), garbage, answer("", 500), good, good]
    )
    with Server(lambda wire: next(replies)(wire), "metadata") as server:
        with closing(OpenInference(server.url, "m")) as remote:
            assert remote.dim == DIM
        assert server.connections == 5  # the last one asks whether the model is ready


def test_waits_for_a_model_that_is_not_ready():
    good = answer(json.dumps(METADATA))
    early = answer("loading", 503)
    replies = iter([good, early, early, answer("")])
    with (
        Server(lambda wire: next(replies)(wire), "metadata") as server,
        closing(OpenInference(server.url, "m")) as remote,
    ):
        assert remote.dim == DIM
        assert server.connections == 4
    replies = iter([good, answer("broken", 400)])
    with (
        Server(lambda wire: next(replies)(wire), "metadata") as server,
        pytest.raises(OracleError, match="/ready answers with status 400: broken"),
    ):
        OpenInference(server.url, "m")


def test_the_proxy_of_the_environment_is_used(monkeypatch):
    with Server(raw(), "none") as server:
        monkeypatch.setenv("http_proxy", server.url)
        with closing(OpenInference("http://nobody.invalid", "m")) as remote:
            assert len(remote(QUESTIONS)) == 4
        monkeypatch.setenv("http_proxy", "socks5://user:secret@localhost:1")
        with pytest.raises(InputError, match="the proxy in the environment") as caught:
            OpenInference("http://nobody.invalid", "m")
        assert "secret" not in str(caught.value)


def test_an_endless_handshake_ends_at_the_deadline():
    with (
        socket.create_server(
            ("127.0.0.1", 0)
        ) as silent,  # the kernel connects, but no program answers
        pytest.raises(OracleError, match=r"within 1 s: raise --endpoint timeout"),
    ):
        OpenInference(f"https://127.0.0.1:{silent.getsockname()[1]}", "m", timeout=1)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://[::1",
        "http://a..b",
        "http://a:99999",
        "http://a:-1",
        "ftp://a",
    ],
)
def test_an_invalid_address_is_refused(url):
    with pytest.raises(
        InputError, match="expected a URL such as http://localhost:8080, got"
    ):
        OpenInference(url, "m")


@pytest.mark.parametrize("secret", ["token\nHost: evil", "tokén"])
def test_headers_that_cannot_be_sent_are_refused_and_not_shown(secret):
    with (
        Server(raw(), "none") as server,
        pytest.raises(InputError, match="headers") as caught,
    ):
        OpenInference(server.url, "m", headers={"Authorization": secret})
    assert "tok" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"timeout": 0}, {"timeout": float("nan")}, {"retries": -1}, {"batch": 0}]
)
def test_impossible_limits_are_refused(wrong):
    with pytest.raises(
        InputError,
        match=r"(timeout must be above 0|(retries|batch) must be [01] or more), not",
    ):
        OpenInference("http://localhost", "m", **wrong)
    with pytest.raises(InputError, match="a limit body must be above 0, not -1"):
        Limits(body=-1)
