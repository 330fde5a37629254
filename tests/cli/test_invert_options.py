"""`keyhole invert`: starts and regularisers from the command line, and the paper's bounds."""

from __future__ import annotations

import json

import pytest
import torch

from keyhole import invert
from keyhole.core.files import write_tensors


@pytest.fixture
def secret(tmp_path):
    """The input behind p.safetensors; near.safetensors is close to it."""
    problem, X = invert.plant(3, 3, seed=2)
    problem.save(tmp_path / "p.safetensors")
    write_tensors(tmp_path / "near.safetensors", {"X": X + 1e-5})
    write_tensors(tmp_path / "input.safetensors", {"X": X})
    return X


@pytest.mark.parametrize("method", ["levenberg-marquardt", "newton-cg", "lbfgs"])
def test_a_search_starts_where_it_is_told(tmp_path, keyhole, secret, method):
    view = "invert p.safetensors --start near.safetensors --out f.json --method"
    done = keyhole(view, method)
    assert done.returncode == 1, done.stderr
    assert "1 starts" in done.stdout
    X = invert.Inversion.load(tmp_path / "f.json").X
    assert X is not None
    assert (X - secret).abs().max() < 1e-8


def test_gamma_and_slack_reach_the_theorem(keyhole, secret):
    newton = "invert p.safetensors --method regularized-newton --start near.safetensors --json"
    plain = keyhole(newton, "-o gamma=0 -o slack=0")
    assert plain.returncode == 1, plain.stderr
    assert "gamma=0.0, slack=0.0" in json.loads(plain.stdout)["method"]
    paper = json.loads(keyhole(newton, "-o gamma=paper").stdout)
    assert "is not the input" in paper["reason"]
    assert "gamma='paper', slack=0.1" in paper["method"]
    drawn = json.loads(keyhole(newton, "-o delta=0.05").stdout)
    assert "delta=0.05" in drawn["method"]
    assert drawn["iterations"] != paper["iterations"]
    slow = json.loads(keyhole(newton, "-o slack=0.5").stdout)
    assert slow["iterations"] > paper["iterations"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("-o gamma=1", "auto has no option 'gamma'"),
        ("-o slack=0.1 --method lbfgs", "lbfgs has no option 'slack'"),
        ("-o rate=0.1", "auto has no option 'rate'"),
        (
            "-o rate=0 --method gradient-descent-as-published",
            "rate must be above 0, not 0",
        ),
        ("-o delta=0.1", "auto has no option 'delta'"),
        ("-o delta=1 --method regularized-newton", "delta must be below 1, not 1"),
        ("-o rate=nan --method adam", "rate must be above 0, not nan"),
        (
            "--start near.safetensors",
            "auto takes no start: choose levenberg-marquardt or ",
        ),
        (
            "--start near.safetensors --method token-by-token",
            "token-by-token takes no start: choose ",
        ),
        (
            "--start near.safetensors -o starts=3 --method adam",
            "starts and --start exclude each other",
        ),
        (
            "-o gamma=small --method regularized-newton",
            'gamma must be "paper" or a number',
        ),
        (
            "-o gamma=nan --method regularized-newton",
            "gamma must be 0 or more, not nan",
        ),
        ("-o slack=1 --method regularized-newton", "slack must be below 1, not 1"),
        (
            "--start p.safetensors --method adam",
            "p.safetensors must hold a tensor X: it holds B, V,",
        ),
        (
            "--start wide.safetensors --method adam",
            "expected X of shape n×d = 3×3 in wide.",
        ),
        (
            "--start nan.safetensors --method adam",
            "X in nan.safetensors must hold finite",
        ),
    ],
)
def test_what_does_not_apply_is_refused_in_one_line(
    tmp_path, keyhole, secret, words, error
):
    write_tensors(tmp_path / "wide.safetensors", {"X": torch.ones(3, 4)})
    write_tensors(tmp_path / "nan.safetensors", {"X": secret * torch.nan})
    done = keyhole("invert p.safetensors", words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"keyhole: {error}")
    assert done.stderr.count("\n") == 1


BOUNDS = "lab bounds p.safetensors input.safetensors"


def test_bounds_are_printed_with_what_is_measured(tmp_path, keyhole, secret):
    words = keyhole(BOUNDS)
    assert words.returncode == 0, words.stderr
    assert "holds: ‖X‖ ≤ R" in words.stdout
    assert "Lemma 4.5" in words.stdout
    assert "Lemma 4.4" in words.stdout
    data = json.loads(keyhole(BOUNDS, "--json").stdout)
    expected = invert.bounds(invert.Problem.load(tmp_path / "p.safetensors"), secret)
    assert data == json.loads(json.dumps(expected.to_dict()))
    assert all(data["assumptions"].values())


def test_bounds_say_which_assumption_does_not_hold(keyhole, secret):
    done = keyhole(BOUNDS, "-o R=1")
    assert done.returncode == 0
    assert "does not hold: ‖X‖ ≤ R" in done.stdout
    for option in ("R=0.5", "neighbours=0"):
        wrong = keyhole(BOUNDS, "-o", option)
        assert wrong.returncode == 2
        assert f"{option.partition('=')[0]} must be" in wrong.stderr
