"""The last layer over llama.cpp's own server: whole answers, the best k with a bias, resuming."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial

import gguf
import numpy as np
import pytest
import torch

import command_line
import kill_points
import tiny_gguf
from keyhole import extract, oracle
from keyhole.core.errors import InputError
from keyhole.extract import OutputLayer, Status
from keyhole.extract.output_layer import distance
from keyhole.oracle.completions import Completions
from keyhole.oracle.ledger import answers_in

FULL = pytest.mark.skipif(
    not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it"
)
RELEASE = pytest.mark.release
ROUTES = ["/completion", "/v1/completions"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    tiny_gguf.expect_server()
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def url(weights):
    with tiny_gguf.serving(weights) as address:
        yield address


def matrix(path):
    """The output matrix as the file has it, dequantised."""
    (tensor,) = [
        part for part in gguf.GGUFReader(path).tensors if part.name == "output.weight"
    ]
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values.astype(np.float64))


@pytest.mark.parametrize(
    "route", ["", *(pytest.param(route, marks=RELEASE) for route in ROUTES)]
)
def test_whole_answers(route, url, weights):
    result = extract.run(f"{url}{route}", "output-layer")
    assert (result.status, result.width) == (Status.RECOVERED, tiny_gguf.WIDTH)
    # Blocks of four bits are multiplied in blocks of 32, whose sums have a direction
    # each.
    assert (result.layer.rank, result.layer.blocks) == (66, 2)
    assert (result.layer.constant, result.layer.log_probabilities) == (False, True)
    assert distance(result.model, matrix(weights), centred=True)[0] < 1e-5
    assert result.layer.stated == tiny_gguf.WIDTH
    assert result.queries < 2 * tiny_gguf.WIDTH


@RELEASE
def test_a_matrix_without_blocks(tmp_path):
    tiny_gguf.expect_server()
    kind = gguf.GGMLQuantizationType.Q8_0
    path = tiny_gguf.write(tmp_path / "tiny.gguf", seed=1, kind=kind)
    with tiny_gguf.serving(path) as address:
        result = extract.run(address, reference=path)
    assert (result.width, result.layer.rank, result.layer.blocks) == (64, 64, 0)
    assert result.layer.rms < 1e-6
    assert result.layer.tied is False


@RELEASE
@pytest.mark.parametrize("route", ROUTES)
def test_the_best_twenty_with_a_bias(route, url, weights):
    result = extract.run(f"{url}{route}", "output-layer", top=20)
    assert (result.status, result.width) == (Status.RECOVERED, tiny_gguf.WIDTH)
    assert 100 <= result.layer.tokens < 140
    assert result.queries < 600
    assert distance(result.model, matrix(weights), centred=True)[0] < 1e-4


@FULL
@pytest.mark.parametrize("route", ROUTES)
def test_one_at_a_time_as_it_is_sampled(route, url):
    result = extract.run(f"{url}{route}", "output-layer", top=1)
    assert (result.status, result.width) == (Status.RECOVERED, tiny_gguf.WIDTH)


@pytest.mark.parametrize(
    "decimals", [3, *(pytest.param(decimals, marks=RELEASE) for decimals in (1, 6))]
)
def test_rounded_answers_of_a_server(decimals, url, weights):
    with closing(Completions.at(url)) as server:
        result = OutputLayer()(oracle.Rounded(server, decimals))
    assert (result.width, result.layer.decimals) == (tiny_gguf.WIDTH, decimals)
    error = distance(result.model, matrix(weights), centred=True)[1]
    assert 0.1 * 10.0**-decimals < error < 2 * 10.0**-decimals


@RELEASE
def test_killed_it_goes_on_and_asks_nothing_twice(url, tmp_path):
    ledger = tmp_path / "layer.db"
    case = kill_points.Case(
        (
            "extract",
            url,
            "--method",
            "output-layer",
            "--ledger",
            ledger,
            "--out",
            "layer.json",
        ),
        (),
    )
    with kill_points.running(case, tmp_path / "killed") as process:
        kill_points.wait_until(lambda: answers_in(ledger) >= 10, process)
        os.kill(process.pid, kill_points.KILL)
        kill_points.wait_until(lambda: False, process)
    kept = answers_in(ledger)
    assert 10 <= kept < 80
    done = kill_points.finish(case, tmp_path / "again")
    assert done.code == 1, done.words
    result = extract.Extraction.load(tmp_path / "again/layer.json")
    assert (result.width, result.remembered) == (tiny_gguf.WIDTH, kept)
    assert answers_in(ledger) == result.queries + result.check.queries


def test_wrong_input_is_one_line(url, tmp_path, monkeypatch, capsys):
    run = partial(
        command_line.inside, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys
    )
    done = run(
        "extract", url, "--method", "output-layer", "--reference", "nowhere.gguf"
    )
    assert done.returncode == 2
    assert "nowhere.gguf" in done.stderr
    with pytest.raises(
        InputError, match="must have the form http://host:port/v2/models/NAME"
    ):
        extract.run(url, "single-head")
