"""Endpoints that take texts or token ids: what their answers expose."""

from __future__ import annotations

import pytest
import torch
from endpoint_server import Endpoint, output, serving

import keyhole
import tiny_models as tiny
from exposures import names
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.models import load_model

TEXT = {"name": "text", "datatype": "BYTES", "shape": [-1]}
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]}
MASK = {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]}
TYPES = {"name": "token_type_ids", "datatype": "INT64", "shape": [-1, -1]}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "encoder"
    tiny.save("bert", folder)
    return load_model(folder), str(folder)


@pytest.fixture
def data(tmp_path):
    (tmp_path / "texts.txt").write_text("w1 w20 w3\nw7 w8\nw4 w5 w6 w9\n")
    return tmp_path / "texts.txt"


def audited(inputs, answer, **options):
    endpoint = Endpoint(inputs, answer)
    with serving(endpoint):
        return keyhole.audit(endpoint.address, **options), endpoint


def numbers(name, rows, datatype="FP32"):
    values = torch.as_tensor(rows)
    return lambda _: [
        output(name, datatype, [1, *values.shape], values.reshape(-1).tolist())
    ]


@pytest.mark.parametrize(
    ("answer", "exposure", "words"),
    [
        (
            lambda _: [output("label", "BYTES", [1], ["POSITIVE"])],
            "labels: output label",
            "labels ('POSITIVE')",
        ),
        (
            lambda _: [output("class", "INT64", [1], [2])],
            "labels: output class",
            "the number of a class, in INT64",
        ),
        (
            numbers("scores", [0.2, 0.3, 0.5]),
            "a number for each class: output scores",
            "3 numbers, probabilities",
        ),
        (
            numbers("y", torch.randn(5).log_softmax(0)),
            "a number for each class: output y",
            "5 numbers, log-probabilities",
        ),
        (
            numbers("logits", [2.0, -1.0]),
            "a number for each class: output logits",
            "2 numbers, logits",
        ),
        (numbers("y", [3.5]), "one score: output y", "one number"),
        (
            numbers("e", torch.ones(64) / 8),
            "a vector for the text: output e",
            "64 numbers, of length one",
        ),
    ],
)
def test_what_answers_are_is_said_and_is_no_clean_bill(answer, exposure, words):
    audit, _ = audited([TEXT], answer)
    (finding,) = audit.findings
    assert names([finding]) == [exposure]
    assert words in finding.reason
    vector = exposure.startswith("a vector")
    assert finding.status is (Status.EXPOSED if vector else Status.NOT_APPLICABLE)
    assert bool(finding.command) is vector
    assert audit.exit_code == (1 if vector else 3)
    assert "takes texts" in audit.target


def test_a_vector_for_each_token_is_given_away():
    audit, endpoint = audited([IDS, MASK], numbers("h", torch.randn(6, 16)))
    (finding,) = audit.findings
    assert (finding.status, finding.sought) == (Status.EXPOSED, "token states")
    assert "16 numbers for each token" in finding.reason
    assert audit.exit_code == 1
    assert [r["inputs"][0]["name"] for r in endpoint.requests] == ["input_ids"] * 3
    assert "takes token ids" in audit.target


def served(encoder, form):
    """Answers of a model to ids, as a server of it gives them."""

    def answer(inputs):
        ids = torch.tensor(inputs["input_ids"]["data"]).reshape(
            inputs["input_ids"]["shape"]
        )
        mask = torch.tensor(inputs["attention_mask"]["data"]).reshape(ids.shape)
        with torch.no_grad():
            values = form(
                encoder.model(ids, attention_mask=mask).last_hidden_state[0], mask[0]
            )
        return numbers("h", values)(inputs)

    return answer


@pytest.mark.parametrize("length", [-1, 12])
def test_tokens_are_those_of_the_model(encoder, data, length):
    loaded, folder = encoder
    ids = {**IDS, "shape": [-1, length]}
    answer = served(loaded, lambda states, _: states)
    audit, endpoint = audited([MASK, TYPES, ids], answer, model=folder, data=data)
    (finding,) = audit.findings
    assert (finding.status, finding.queries) == (Status.EXPOSED, 3)
    assert folder not in audit.identity  # a folder is no identity
    sent = {tensor["name"]: tensor["data"] for tensor in endpoint.requests[0]["inputs"]}
    assert sum(sent["attention_mask"]) == 5
    assert len(sent["input_ids"]) == (5 if length < 0 else 12)


def test_what_an_endpoint_answers_wrongly_is_one_line():
    audit, _ = audited([TEXT], lambda _: [output("y", "FP32", [3], [1.0, 2.0, 3.0])])
    (skip,) = audit.skips
    assert skip.unchecked
    assert "expected one answer for one text" in skip.reason
    assert audit.exit_code == 3


def test_options_of_vectors_have_no_place_there(tmp_path):
    with pytest.raises(InputError, match="--ledger keeps the answers of an endpoint"):
        audited([TEXT], numbers("y", [1.0]), ledger=tmp_path / "run.db")
