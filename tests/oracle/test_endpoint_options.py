"""Metadata of a server and options of the user are obeyed: tensors, formats, batches, TLS."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing

import pytest
import torch
from endpoint_server import Endpoint, output, scores, self_signed, serving, vectors

from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.core.endpoint import EndpointOptions, headers_of
from keyhole.core.errors import InputError
from keyhole.endpoints import describe, open_endpoint
from keyhole.oracle import OpenInference, OracleError
from keyhole.oracle.open_inference import TakesTexts

DIM = 4
TARGET = oracle.plant(dim=DIM, seed=3)
MASK = {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]}
needs_openssl = pytest.mark.skipif(
    not shutil.which("openssl"), reason="openssl is not installed"
)


def draw(count: int, tokens: int = 2, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(count, tokens, DIM, dtype=torch.float64, generator=stream)


def scoring(**stated) -> Endpoint:
    return Endpoint([vectors(DIM)], scores(TARGET), **stated)


def assert_scores(remote: OpenInference, question: torch.Tensor) -> None:
    assert torch.equal(remote(question), TARGET(question))


def opened(endpoint: Endpoint, **options) -> closing:
    return closing(
        OpenInference(endpoint.url, "m", options=EndpointOptions(**options), retries=0)
    )


def test_single_precision_is_sent_and_noted():
    endpoint = Endpoint([vectors(DIM, "FP32")], scores(TARGET, "FP32"))
    with serving(endpoint), opened(endpoint) as remote:
        answers = remote(draw(5))
        result = extract.run(remote, "auto")
        assert describe(endpoint.address, remote).endswith(f"; {remote.note})")
    sent = endpoint.requests[0]["inputs"][0]
    assert sent["datatype"] == "FP32"
    rounded = draw(5).float().double()
    assert torch.tensor(sent["data"], dtype=torch.float64).equal(rounded.reshape(-1))
    assert torch.equal(answers, TARGET(rounded).float().double())
    assert result.status is Status.RECOVERED
    assert (
        "questions travel in FP32, each number within 6e-08 of its size"
        in result.reason
    )
    assert float((result.model.W - TARGET.W).abs().max()) < 1e-4


def test_numbers_that_a_format_cannot_hold_are_refused():
    with serving(Endpoint([vectors(DIM, "FP16")], scores(TARGET))) as endpoint:
        with (
            opened(endpoint) as remote,
            pytest.raises(InputError, match="takes FP16, which cannot hold"),
        ):
            remote(1e6 * draw(2))
        assert not endpoint.requests


@pytest.mark.parametrize(
    ("stated", "routes"),
    [
        ({"parameters": {"max_batch_size": 8}}, {}),
        ({"platform": "onnxruntime_onnx"}, {"/config": {"max_batch_size": 8}}),
    ],
)
def test_the_largest_batch_that_a_server_states_is_kept(stated, routes):
    endpoint = scoring(**stated)
    endpoint.routes = routes
    with serving(endpoint), opened(endpoint) as remote:
        assert_scores(remote, draw(20))
    assert sorted(r["inputs"][0]["shape"][0] for r in endpoint.requests) == [4, 8, 8]


def test_a_stated_batch_and_length_in_the_shape_are_kept():
    shape = {"name": "x", "datatype": "FP64", "shape": [8, 2, DIM]}
    with (
        serving(Endpoint([shape], scores(TARGET))) as endpoint,
        opened(endpoint) as remote,
    ):
        assert_scores(remote, draw(20))
        with pytest.raises(
            InputError, match=r"takes sequences of 2 tokens only, not of 3"
        ):
            remote(draw(1, 3))
    assert max(r["inputs"][0]["shape"][0] for r in endpoint.requests) == 8


def test_the_batch_option_lowers_a_stated_batch():
    endpoint = scoring(parameters={"max_batch_size": 8})
    with serving(endpoint), opened(endpoint, batch=3) as remote:
        remote(draw(6))
    assert [r["inputs"][0]["shape"][0] for r in endpoint.requests] == [3, 3]


def test_the_tensor_of_vectors_is_chosen_and_masks_are_filled():
    endpoint = Endpoint([MASK, vectors(DIM, name="e")], scores(TARGET))
    with serving(endpoint), opened(endpoint) as remote:
        assert_scores(remote, draw(3))
    inputs = {tensor["name"]: tensor for tensor in endpoint.requests[0]["inputs"]}
    assert inputs["attention_mask"] == {
        "name": "attention_mask",
        "datatype": "INT64",
        "shape": [3, 2],
        "data": [1] * 6,
    }
    assert inputs["e"]["shape"] == [3, 2, DIM]


def test_tensors_are_chosen_by_name():
    def answer(inputs):
        assert set(inputs) == {"b"}
        return [output("first", "FP64", [2], [0.0, 0.0]), *scores(TARGET)(inputs)]

    both = [vectors(DIM, name="a"), vectors(DIM, name="b")]
    with serving(Endpoint(both, answer)) as endpoint:
        with pytest.raises(
            InputError,
            match=r"several inputs of vectors \(a, b\): give --endpoint input",
        ):
            opened(endpoint)
        with pytest.raises(InputError, match=r"has no tensor c: choose among a, b"):
            opened(endpoint, input="c")
        with opened(endpoint, input="b", output="answers") as remote:
            assert_scores(remote, draw(2))
        assert endpoint.requests[0]["outputs"] == [{"name": "answers"}]
        with (
            opened(endpoint, input="b", output="none") as remote,
            pytest.raises(OracleError, match="expected outputs with shape"),
        ):
            remote(draw(2))


def test_a_dimension_that_is_not_stated_is_given():
    with serving(Endpoint([vectors(-1)], scores(TARGET))) as endpoint:
        with pytest.raises(InputError, match=r"has no dimension: give --endpoint dim"):
            opened(endpoint)
        with opened(endpoint, dim=DIM) as remote:
            assert_scores(remote, draw(2))


@pytest.mark.parametrize(
    ("labels", "positive"),
    [(("no", "YES"), None), (("cat", "dog"), "dog"), (("-1", "1"), None)],
)
def test_labels_are_signs(labels, positive):
    def answer(inputs):
        y = torch.tensor(scores(TARGET)(inputs)[0]["data"])
        return [output("label", "BYTES", [len(y), 1], [labels[int(v > 0)] for v in y])]

    with serving(Endpoint([vectors(DIM)], answer)) as endpoint:
        with opened(endpoint, positive=positive) as remote:
            assert torch.equal(remote(draw(9)), (TARGET(draw(9)) > 0).double())
        if positive:
            with (
                opened(endpoint) as remote,
                pytest.raises(
                    OracleError,
                    match=r"got '(cat|dog)': give --endpoint positive=LABEL",
                ),
            ):
                remote(draw(9))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            {"name": "text", "datatype": "BYTES", "shape": [-1]},
            r"takes texts \(BYTES\)",
        ),
        (
            {"name": "input_ids", "datatype": "INT64", "shape": [-1, 128]},
            r"takes token ids \(INT64\)",
        ),
        (
            {"name": "image", "datatype": "UINT8", "shape": [-1, 9]},
            r"only .*image \(UINT8\)",
        ),
    ],
)
def test_an_endpoint_that_takes_no_vectors_is_recognised(tensor, words):
    with serving(Endpoint([MASK, tensor], scores(TARGET))) as endpoint:
        with pytest.raises(InputError, match=words) as caught:
            opened(endpoint)
        assert isinstance(caught.value, TakesTexts) == (tensor["datatype"] != "UINT8")
        assert "\n" not in str(caught.value)


def test_requests_keep_to_the_rate():
    with (
        serving(scoring()) as endpoint,
        opened(endpoint, batch=1, rate=20) as remote,
    ):
        started = time.monotonic()
        remote(draw(8))
        assert time.monotonic() - started > 7 / 20  # between 8 turns


def test_a_repeated_answer_is_not_taken_for_the_next():
    """The second copy stays on the connection, and it has no id that would give it away."""
    endpoint = scoring()
    endpoint.twice = True
    with (
        serving(endpoint),
        closing(OpenInference(endpoint.url, "m", batch=1)) as remote,
    ):
        for number in range(4):
            assert_scores(remote, draw(3, seed=number))


def test_an_answer_with_another_id_is_not_taken():
    endpoint = scoring()
    seen: list[str] = []

    def late(inputs):
        outputs = scores(TARGET)(inputs)
        request = endpoint.requests[-1]
        if len(seen) % 3 == 1:  # as in a late answer: the id of another request
            request["id"] = seen[-1]
        seen.append(request["id"])
        return outputs

    endpoint.answer = late
    with (
        serving(endpoint),
        closing(OpenInference(endpoint.url, "m", batch=1)) as remote,
    ):
        for number in range(6):
            assert_scores(remote, draw(1, seed=number))
    assert len(seen) > 6


@needs_openssl
def test_certificates(tmp_path):
    endpoint = scoring()
    both = self_signed(tmp_path)
    with serving(endpoint, both):
        with pytest.raises(
            OracleError, match=r"is not trusted .*: give --ca FILE .* or --insecure"
        ):
            opened(endpoint)
        for options in ({"ca": tmp_path / "certificate.pem"}, {"insecure": True}):
            with opened(endpoint, **options) as remote:
                assert_scores(remote, draw(3))
        (tmp_path / "no.pem").write_text("no certificate")
        for file, words in (
            ("no.pem", "PEM certificates"),
            ("missing.pem", "no such file|got"),
        ):
            with pytest.raises(InputError, match=words):
                opened(endpoint, ca=tmp_path / file)


@needs_openssl
def test_a_certificate_of_another_host_is_refused(tmp_path):
    endpoint = scoring()
    with (
        serving(endpoint, self_signed(tmp_path, "DNS:elsewhere.invalid")),
        pytest.raises(OracleError, match=r"the certificate of .* is not trusted"),
    ):
        opened(endpoint, ca=tmp_path / "certificate.pem")


def test_a_password_in_the_address_is_sent_and_kept_nowhere(monkeypatch):
    endpoint = scoring()
    endpoint.token = "Basic dXNlcjpwYXNzd29yZC0xMjM="
    with serving(endpoint):
        address = endpoint.address.replace("//", "//user:password-123@")
        with closing(open_endpoint(address)) as remote:
            assert_scores(remote, draw(2))
            assert remote.identity == endpoint.address
            assert "password" not in describe(address, remote)
        for wrong in (address.replace("123", "124"), f"{address}?token=password-123"):
            with pytest.raises((OracleError, InputError)) as caught:
                open_endpoint(wrong)
            assert "password" not in str(caught.value)
        monkeypatch.setenv("MY_KEY", "Bearer other")
        both = EndpointOptions(headers={"authorization": "MY_KEY"})
        with pytest.raises(InputError, match="give one of them"):
            open_endpoint(address, options=both)


def test_other_machines_need_authorized():
    for address in ("http://192.0.2.1/v2/models/m", "https://example.org/v2/models/m"):
        with pytest.raises(InputError, match="is another machine: give --authorized"):
            open_endpoint(address)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch": 0}, "batch must be 1 or more, not 0"),
        ({"rate": 0.0}, "--rate must be above 0"),
        ({"timeout": 1e9}, "timeout must not exceed a day"),
        ({"dim": -1}, "dim must be 1 or more, not -1"),
        ({"ca": "x", "insecure": True}, "exclude each other"),
        ({"headers": {"a b": "PATH"}}, "'a b' is no header's name"),
        (
            {"headers": {"X-Key": "NO_SUCH_VARIABLE"}},
            "X-Key=VARIABLE names an environment variable that is not set",
        ),
    ],
)
def test_wrong_options_are_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        EndpointOptions(**wrong)


def test_headers_name_variables_and_show_no_values(monkeypatch):
    monkeypatch.setenv("MY_KEY", "s3cret-value")
    options = EndpointOptions(headers=headers_of(["X-Key=MY_KEY"]))
    assert options.secrets() == {"X-Key": "s3cret-value"}
    assert "s3cret" not in repr(options)
    for wrong in (["s3cret-value"], ["=MY_KEY"], ["X-Key="], ["A=MY_KEY", "a=MY_KEY"]):
        with pytest.raises(InputError, match="header") as caught:
            headers_of(wrong)
        assert "s3cret" not in str(caught.value)
    assert json.dumps(options.given) == '["--header"]'
