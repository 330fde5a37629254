"""Hyperparameters on the command line, which are refused where they have no meaning."""

from __future__ import annotations

import json

import pytest
import torch

from keyhole import extract, oracle
from keyhole.core.errors import InputError


@pytest.fixture
def head(tmp_path):
    """A head with ‖v‖ = 1, no small entry in v, and a small W."""
    target = oracle.plant(dim=3, seed=1, scale=0.3)
    v = torch.tensor([0.6, -0.5, 0.62], dtype=torch.float64)
    target = oracle.Head(target.W, v / v.norm())
    oracle.save(target, tmp_path / "head.safetensors")
    signs = oracle.Defence(sign_only=True)
    oracle.save(target, tmp_path / "signs.safetensors", signs)


REACHED = {
    "head.safetensors --method tolerant -o answer_error=1e-3 -o bound=2 -o margin=0.3 "
    "-o repeats=2 -o max_norm=5": (
        "Tolerant(tolerance=0.001, bound=2.0, margin=0.3, max_norm=5.0"
    ),
    "head.safetensors --method tolerant-as-published -o answer_error=1e-6 "
    "-o bound=2 -o margin=0.3": (
        "TolerantAsPublished(tolerance=1e-06, bound=2.0, margin=0.3"
    ),
    "signs.safetensors --method sign-only -o accuracy=1e-3": "SignOnly(accuracy=0.001",
    "signs.safetensors --method sign-only-as-published -o accuracy=0.9 "
    "-o bound=1 -o margin=0.4": (
        "SignOnlyAsPublished(bound=1.0, margin=0.4, accuracy=0.9"
    ),
    "head.safetensors --method nuclear-norm -o rank=3 -o oversampling=2": (
        "NuclearNorm(rank=3, oversampling=2.0"
    ),
    "head.safetensors --method multi-head -o heads=1": "MultiHead(heads=1",
    "head.safetensors --method fitted -o heads=1 -o oversampling=3": "Fitted(heads=1",
}


@pytest.mark.parametrize(("words", "called"), REACHED.items())
def test_an_option_reaches_its_method(words, called, head, keyhole):
    done = keyhole("extract --json", words)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["method"].startswith(called)


def test_the_theorem_is_printed_with_what_the_answers_prove(head, keyhole):
    options = "-o answer_error=1e-6 -o bound=1 -o margin=0.5"
    done = keyhole("extract head.safetensors --method tolerant-as-published", options)
    assert "Theorem 6.1 states: W and v within" in done.stdout
    assert "12 queries (unknowns: 12)" in done.stdout
    assert "proved if every answer is within" in done.stdout


@pytest.mark.parametrize("method", ["auto", "single-head", "full-output"])
def test_an_option_that_does_not_apply_is_an_error(method, head, keyhole):
    done = keyhole("extract head.safetensors --method", method, "-o rank=1")
    assert done.returncode == 2
    assert f"{method} has no option 'rank': it has " in done.stderr


def test_a_rank_beyond_the_dimension_is_an_error(head, keyhole):
    for method in ("low-rank", "nuclear-norm"):
        done = keyhole("extract head.safetensors --method", method, "-o rank=4")
        assert done.returncode == 2
        assert "the rank must not exceed the dimension, 3: got 4" in done.stderr


def test_options_are_no_second_way_to_set_a_method():
    with pytest.raises(InputError, match="rank must be set on the LowRank given"):
        extract.run(oracle.plant(dim=3), extract.LowRank(), rank=1)


DEGRADED = [
    ("-o sign_only=true", "", "SignOnly, since the answers are 0 and 1"),
    ("-o decimals=3", "", "Tolerant, since the answers have 3 decimals"),
    (
        "-o decimals=3 -o max_norm=10",
        "--method tolerant -o answer_error=5e-4 -o max_norm=10",
        "W is within",
    ),
    ("-o noise=1e-3", "--method tolerant -o answer_error=1e-3", "W is within"),
]


@pytest.mark.parametrize(("options", "attack", "reason"), DEGRADED)
def test_a_target_may_degrade_its_answers(options, attack, reason, keyhole):
    done = keyhole("lab plant t.safetensors -o dim=4", options)
    assert done.returncode == 0, done.stderr
    found = keyhole("extract t.safetensors --json", attack)
    assert found.returncode == 1, found.stderr
    assert reason in json.loads(found.stdout)["reason"]


def test_orthogonal_heads_are_planted_with_their_bases(keyhole):
    options = "--kind orthogonal-heads -o dim=6 -o heads=2 -o bases=b.safetensors"
    planted = keyhole("lab plant t.safetensors", options)
    assert planted.returncode == 0, planted.stderr
    view = "extract t.safetensors --method orthogonal-heads --json"
    known = json.loads(keyhole(view, "-o bases=b.safetensors").stdout)
    unknown = json.loads(keyhole(view).stdout)
    assert known["status"] == unknown["status"] == "recovered"
    assert known["queries"] == 2 * (9 + 3) < unknown["queries"]
    broken = keyhole(view, "-o bases=t.safetensors")
    assert broken.returncode == 2
    assert "in t.safetensors" in broken.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-o heads=2", "head has no option 'heads'"),
        ("--kind relu -o rank=1", "relu has no option 'rank'"),
        ("-o tokens=3", "head has no option 'tokens'"),
        ("--kind inversion -o decimals=3", "inversion has no option 'decimals'"),
        ("--kind nothing", "there is no kind 'nothing': choose among head, multi-head"),
        ("-o decimals=16", "decimals must be at most 15, not 16"),
        ("-o noise=-1", "noise must be 0 or more, not -1.0"),
        ("-o max_norm=0", "max_norm must be above 0, not 0.0"),
    ],
)
def test_planting_refuses_what_means_nothing(options, message, keyhole):
    done = keyhole("lab plant t.safetensors -o dim=4", options)
    assert done.returncode == 2
    assert message in done.stderr


def test_canonical_and_same(keyhole, tmp_path):
    heads = oracle.plant("multi-head", dim=4, heads=2, seed=1)
    W = list(heads.W)
    v = list(heads.v)
    split = oracle.MultiHead([W[1], W[0], W[0]], [v[1], v[0] / 2, v[0] / 2])
    other = oracle.MultiHead(W, [v[0], v[1] + 1e-3])
    for name, model in {"a": heads, "b": split, "c": other}.items():
        oracle.save(model, tmp_path / f"{name}.safetensors")
    reduced = keyhole("lab canonical b.safetensors --out d.safetensors")
    assert reduced.returncode == 0
    assert "3 heads, 2 in canonical form, d = 4" in reduced.stdout
    assert "heads 1, 2 act as one: equal W" in reduced.stdout
    assert len(oracle.load(tmp_path / "d.safetensors").W) == 2
    for second in ("b", "d"):
        done = keyhole(f"lab same a.safetensors {second}.safetensors")
        assert (done.returncode, done.stdout.strip()) == (0, "the same function")
    done = keyhole("lab same a.safetensors c.safetensors --json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["difference"].startswith("v differs by")
    loose = keyhole("lab same a.safetensors c.safetensors --tolerance 0.1")
    assert loose.returncode == 0
    oracle.save(oracle.plant(dim=4, seed=1), tmp_path / "one.safetensors")
    done = keyhole("lab same a.safetensors one.safetensors")
    assert "2 against 1 heads in canonical form" in done.stdout
    oracle.save(oracle.plant("attention", dim=4), tmp_path / "layer.safetensors")
    done = keyhole("lab same a.safetensors layer.safetensors")
    assert done.returncode == 2
    assert "layer.safetensors holds attention, not heads" in done.stderr
