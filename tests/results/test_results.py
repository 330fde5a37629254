"""Results are the same after saving and loading, with weights in a second file."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from exposures import called
from keyhole import extract, oracle
from keyhole.core import Finding, Status, dump, read
from keyhole.core.errors import InputError
from keyhole.core.files import write_text
from keyhole.core.result import typed
from keyhole.extract.extraction import Extraction


@pytest.mark.parametrize("budget", [None, 3, 20])
def test_an_extraction_reads_back_equal(tmp_path, budget):
    result = extract.SingleHead()(
        oracle.Counted(oracle.plant(dim=4, seed=1), budget=budget)
    )
    result.save(tmp_path / "r.json")
    again = Extraction.load(tmp_path / "r.json")
    assert again.to_dict() == result.to_dict()
    assert (again.model is None) == (result.model is None)
    if result.model is not None:
        assert torch.equal(again.model.W, result.model.W)
        assert again.model.identity == result.model.identity


def test_the_stamp_says_what_made_it():
    stamp = extract.SingleHead()(oracle.plant(dim=2)).environment
    assert set(stamp) == {"keyhole", "python", "torch", "platform", "cpus", "threads"}


def test_every_status_has_advice():
    for status in Status:
        assert status.advice.endswith(".")


def test_findings_read_back_equal():
    exposure = called(
        "scores rounded to 3 decimals, inputs of norm 10 at most", "a head"
    )
    finding = Finding(
        exposure,
        "Tolerant",
        Status.INEXACT,
        "why",
        "stop it",
        1e-3,
        7,
        0.1,
        6,
        0.5,
        ((1, 0.5),),
    )
    data = json.loads(json.dumps(asdict(finding)))
    assert typed(Finding, data) == finding
    assert finding.exposed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a JSON file"),
        ("[]", "is not a JSON file of Keyhole"),
        ('{"format": 99}', "reads format 1, not 99 in "),
        ('{"format": 1}', r"^expected a saved extraction, got None in .*r\.json$"),
        (
            '{"format": 1, "kind": "extraction", "status": "splendid"}',
            r"^expected status as 'recovered', .*'splendid' in a saved extraction in .*r\.json$",
        ),
    ],
)
def test_files_that_are_no_result(tmp_path, text, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(InputError, match=message):
        Extraction.load(tmp_path / "r.json")


def test_missing_files(tmp_path):
    with pytest.raises(
        InputError, match=r"cannot read .* as a JSON file: there is no such file"
    ):
        read(tmp_path / "no.json")
    with pytest.raises(InputError, match="cannot write"):
        write_text(tmp_path / "no" / "r.json", "")


def test_missing_weights(tmp_path):
    extract.SingleHead()(oracle.plant(dim=2)).save(tmp_path / "r.json")
    (tmp_path / "r.safetensors").unlink()
    with pytest.raises(
        InputError,
        match=r"^cannot read .* as the weights next to .*r\.json: there is no",
    ):
        Extraction.load(tmp_path / "r.json")


def test_json_never_holds_nan():
    with pytest.raises(ValueError, match="JSON"):
        dump({"error": float("nan")})
